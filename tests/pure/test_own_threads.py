"""The detector of standoffs knows each thread that multiring starts beside the program."""

import ast
import re
from functools import cache
from pathlib import Path

from multiring._runtime.job import threads

SOURCES = Path(threads.__file__).parents[2]
# Files whose threads are in no rank, or run calls of the program.
ELSEWHERE = {
    "_diagnosis/relay.py": "multiring doctor, which has no ranks",
    "_diagnosis/transfers.py": "multiring doctor, which has no ranks",
    "_verify/behaviours/streams.py": "an experiment of one process",
    "_verify/behaviours/nccl_calls.py": "an experiment of one process",
    "_verify/behaviours/torch_calls.py": "an experiment of one process",
    "adapters/conformance/members.py": "its threads make the calls that it tests",
    "dask/job.py": "the driver's process",
    "spark/job.py": "the driver's process",
    "horovod/threads.py": "its threads run the program's functions",
    "vision/labelling/proposing.py": "a process of the labelling page",
}
# Threads that count as the program's own: they wait for the ranks, and may then run a callback of the program, or the
# further steps of an operation.
PROGRAM = {"multiring future", "multiring {}"}
SERVICE = "name"  # of _frontend/requests/service.py: its names begin with REQUESTS


@cache
def names() -> dict[str, str]:
    """Return the names of all threads, with {} for a part that is not a constant, and the files that start them."""
    found: dict[str, str] = {}
    for path in SOURCES.rglob("*.py"):
        if str(path.relative_to(SOURCES)) in ELSEWHERE:
            continue
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text if "Thread(" in text else "")
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] == "Thread":
                name = next((each.value for each in call.keywords if each.arg == "name"), None)
                for shown in _shown(name, tree):
                    found[shown] = str(path.relative_to(SOURCES))
    return found


def _shown(name: ast.expr | None, tree: ast.Module) -> list[str]:
    if isinstance(name, ast.Constant):
        return [str(name.value)]
    if isinstance(name, ast.JoinedStr):
        return ["".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in name.values)]
    texts = [str(each.value) for each in ast.walk(tree) if isinstance(each, ast.Constant)]  # perhaps passed by a caller
    named = [each for each in texts if each.startswith("multiring ")]
    return named or ["a thread without a name" if name is None else ast.unparse(name)]


def pattern_of(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(re.escape("{}"), ".+"))


def idle() -> dict[str, str]:
    """Return the threads that the detector knows, and the function in which each waits for work, if it matters."""
    return {**dict.fromkeys(threads._OWN_THREADS, ""), **threads._CARRIERS, **threads._CALLERS}


def test_all_threads_are_known() -> None:
    unknown = {}
    for name, where in names().items():
        if name in PROGRAM | {SERVICE} or name.startswith((threads._ENGINES, threads.REQUESTS, *threads.READERS)):
            continue
        if not any(pattern_of(name).fullmatch(each) for each in idle()):
            unknown[name] = where
    # Add such a thread to _OWN_THREADS, _CARRIERS or _CALLERS, or a circle of waiting ranks is never certain.
    assert not unknown, unknown
    assert PROGRAM | {SERVICE} < set(names())
    assert all(any(each.startswith(begin) for each in names()) for begin in threads.READERS)


def test_files_elsewhere_start_threads() -> None:
    assert [each for each in ELSEWHERE if "Thread(" not in (SOURCES / each).read_text(encoding="utf-8")] == []


def test_all_known_threads_exist() -> None:
    """A name that is left over would hide a new thread, and a wrong idle function makes an idle thread count."""
    places = {name: where for name, where in names().items() if name not in PROGRAM}
    for name, function in idle().items():
        files = [where for each, where in places.items() if pattern_of(each).fullmatch(name)]
        assert files, name
        assert not function or f"def {function}(" in (SOURCES / files[0]).read_text(encoding="utf-8"), name
