"""Run the parts of `multiring verify gpu`, each as a job of its own, and keep their results."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from multiring._settings import inherited_environment
from multiring._verify.parts import PARTS, VerifyPart
from multiring._verify.results import FAILED, NOT_RUN, PASSED, Check, PartResult, read, write, write_all
from multiring._version import VERSION
from multiring.errors import ArgumentError, StallError

_WORKERS = Path(__file__).parent / "workers"
_LAST_LINES = 12
_ASK_S = 120.0  # a driver that is broken may never answer
_GRACE_S = 20.0  # of a launcher that is told to end its ranks
_ASK = """
import json
import torch
gpus = torch.cuda.device_count() if torch.version.cuda else 0
names = [torch.cuda.get_device_name(each) for each in range(gpus)]
print("multiring:", json.dumps({"devices": names, "torch": torch.__version__, "CUDA": torch.version.cuda}))
"""


def machine_here(python: Sequence[str] = (sys.executable,)) -> dict[str, Any]:
    """Return the names of the GPUs and the versions of torch and CUDA, as a new process sees them.

    Args:
        python: the command that runs a Python program.

    Raises:
        StallError: the process does not end.
    """
    with tempfile.TemporaryDirectory(prefix="multiring-verify-") as place:
        program = Path(place) / "ask.py"
        program.write_text(_ASK, encoding="utf-8")
        try:
            done = subprocess.run(  # noqa: S603 -- this Python
                [*python, str(program)], capture_output=True, text=True, check=False, timeout=_ASK_S
            )
        except subprocess.TimeoutExpired as error:
            raise StallError(
                f"torch has not said for {_ASK_S:g} s which GPUs there are; want a driver that answers: try nvidia-smi"
            ) from error
    told = done.stdout.rpartition("multiring:")[2].strip()
    found: dict[str, Any] = json.loads(told) if told else {"devices": [], "torch": None, "CUDA": None}
    return {**found, "multiring": VERSION}


def chosen(names: Iterable[str]) -> list[VerifyPart]:
    """Return the parts with these names; all parts if there are none.

    Raises:
        ArgumentError: there is no part of a name.
    """
    known = {each.name: each for each in PARTS}
    wrong = [name for name in names if name not in known]
    if wrong:
        raise ArgumentError(f"no part {', '.join(wrong)}: want {', '.join(known)}")
    wanted = list(names)
    return [each for each in PARTS if not wanted or each.name in wanted]


def run_all(
    parts: Sequence[VerifyPart],
    folder: Path,
    heading: dict[str, Any],
    machine: dict[str, Any],
    *,
    python: Sequence[str] = (sys.executable,),
    tell: Callable[[PartResult], None] = lambda _: None,
) -> list[PartResult]:
    """Run the parts that have no result in `folder`, and write all results there.

    Args:
        parts: the parts to run.
        folder: the folder of the results. A part is run again if its file is deleted or says that it was not run.
        heading: what the page says first.
        machine: of `machine_here`. Results of another machine are not kept.
        python: the command that runs a Python program.
        tell: called with each result.
    """
    folder.mkdir(parents=True, exist_ok=True)
    is_on = json.dumps(machine)
    for part in parts:
        path = folder / f"{part.name}.json"
        found = read(path)
        if found is None or found.status == NOT_RUN or found.machine != is_on:
            found = run_part(part, machine, python)
            write(path, found)
        tell(found)
    kept = [read(folder / f"{part.name}.json") for part in PARTS]
    results = [each for each in kept if each is not None and each.machine == is_on]
    write_all(folder, heading, results)
    return results


def run_part(part: VerifyPart, machine: dict[str, Any], python: Sequence[str] = (sys.executable,)) -> PartResult:
    """Run one part and return its result."""
    gpus = len(machine["devices"])
    about: dict[str, Any] = {"part": part.name, "title": part.title, "machine": json.dumps(machine)}
    ranks = part.ranks(gpus) if gpus else None
    if ranks is None:
        needs = part.needs or "a GPU, and torch's CUDA build"
        untried = "; until this part has run, what it checks is verified on stand-ins only"
        reason = f"it needs {needs}; torch sees {gpus} GPUs{untried if gpus else ''}"
        return PartResult(**about, status=NOT_RUN, reason=reason)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="multiring-verify-") as place:
        target = Path(place) / "result.json"
        command = [
            sys.executable,
            "-m",
            "multiring",
            "run",
            "-n",
            str(ranks),
            "--",
            *python,
            str(_WORKERS / part.worker),
        ]
        code, output = _ended([*command, part.name, str(target), *python], part.limit_s, part.settings)
        told = json.loads(target.read_text(encoding="utf-8")) if target.exists() else None
    seconds = time.monotonic() - began_s
    if told and "not_run" in told and code == 0:
        return PartResult(**about, status=NOT_RUN, reason=told["not_run"], seconds=seconds)
    checks = [Check(**each) for each in told["checks"]] if told else []
    reason = ""
    if told is None or (code != 0 and not part.loses_a_rank):
        last = "\n".join(output.strip().splitlines()[-_LAST_LINES:])
        reason = f"{_ending(code, part.limit_s)}; the last lines of {ranks} ranks:\n{last}"
    status = PASSED if not reason and checks and all(each.holds for each in checks) else FAILED
    return PartResult(
        **about,
        status=status,
        reason=reason,
        seconds=seconds,
        checks=checks,
        figures=told["figures"] if told else {},
    )


def _ending(code: int | None, limit_s: float) -> str:
    return f"no end within {limit_s:.0f} s" if code is None else f"exit code {code}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a job that has not ended, with its ranks."""
    if process.poll() is not None:
        return
    process.terminate()  # the launcher ends its ranks
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()  # the launcher's watchdog ends its ranks then
        process.wait()


def _ended(command: list[str], limit_s: float, settings: dict[str, str]) -> tuple[int | None, str]:
    """Return the exit code of a command and its output; None in place of the code if it did not end in time."""
    with tempfile.TemporaryFile() as output:
        # JAX takes most of a GPU's memory when it starts, and ranks may share a GPU.
        environment = inherited_environment() | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | settings
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)  # noqa: S603 -- this Python
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        output.seek(0)
        return code, output.read().decode(errors="replace")
