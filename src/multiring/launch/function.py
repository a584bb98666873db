"""A function on several ranks of this machine, and what it returned on each: from a script, or from a notebook.

The function goes to the ranks, and results and errors come back, as pickles in a folder that only this user can
enter. The ranks are started and watched by a launcher process of their own, which ends them when one fails.
"""

import codecs
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TextIO, cast

from multiring.errors import ArgumentError, LaunchError
from multiring.launch.commands import refuse_places
from multiring.launch.job import JobOptions
from multiring.launch.pickled_call import CallFolder, Failure, Outcome, Returned
from multiring.settings import inherited_environment

_READ_BYTES = 1 << 16
_TOLD = "job.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionOptions:
    """How the ranks of a function run. `failed` begins the error of a job in which one failed; `python` runs them."""

    job: JobOptions = field(default_factory=JobOptions)
    python: str = sys.executable
    failed: str = "the function did not return on every rank"


def run(
    function: Callable[..., Any],
    ranks: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    log_dir: str | Path | None = None,
) -> list[Any]:
    """Call `function(*args, **kwargs)` on `ranks` new processes of this machine and return the results, by rank.

    In each it may call `multiring.init()`, and is what a script under `multiring run` is. What they write is written
    here, tagged with the rank, also in a notebook. Interrupting this call ends them.

    Args:
        function: found by its name in its module, or sent along (by cloudpickle, where that is installed; functions of
            a notebook need it).
        ranks: how many.
        args: its arguments.
        kwargs: its arguments by name.
        env: variables to set for the ranks.
        log_dir: a folder; what rank K writes is also in its files rank-K.out and rank-K.err.

    Raises:
        ArgumentError: there can be no so many ranks, or the function or its arguments cannot be sent.
        LaunchError: a rank failed; its error is the cause, and its traceback in the text. The others were stopped.
        KeyboardInterrupt: once all ranks have ended.
    """
    options = JobOptions(log_dir=None if log_dir is None else Path(log_dir), variables=dict(env or {}))
    return run_function(function, args, kwargs or {}, ranks, FunctionOptions(job=options))


def run_function(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    ranks: int,
    options: FunctionOptions,
) -> list[Any]:
    """Do what `run` does, and raise what it raises, as `options` say; `timeline` and `stdin_rank` have no effect."""
    wanted: object = function  # whatever a user gave
    if not callable(wanted):
        scripts = "; a script is started by `multiring run -n N script.py`" if isinstance(wanted, str) else ""
        raise ArgumentError(f"{wanted!r} is no function: want one, not what it returns{scripts}")
    count: object = ranks  # whatever a user gave
    if not isinstance(count, int) or count < 1:
        raise ArgumentError(f"ranks={ranks!r}: want an integer, at least 1")
    refuse_places(options.job.variables, horovod=options.job.horovod, timeline=False)
    with tempfile.TemporaryDirectory(prefix="multiring-run-") as folder:
        call = CallFolder(Path(folder))
        call.send(function, tuple(args), dict(kwargs))
        told = {
            "ranks": ranks,
            "python": options.python,
            "log_dir": "" if options.job.log_dir is None else str(options.job.log_dir),
            "horovod": options.job.horovod,
            "grace_s": options.job.grace_s,
        }
        (Path(folder) / _TOLD).write_text(json.dumps(told), encoding="utf-8")
        code = _launched(Path(folder) / _TOLD, options.job.variables)
        return _results(code, call.outcomes(ranks), options.failed)


def _launched(told: Path, variables: Mapping[str, str]) -> int:
    """Run the launcher to its end; Ctrl-C ends the ranks before it goes on."""
    process = subprocess.Popen(  # noqa: S603 -- our own module
        [sys.executable, "-m", "multiring.launch.function_launcher", str(os.getpid()), str(told)],
        env={**inherited_environment(), **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    with process:
        interrupts: list[KeyboardInterrupt] = []
        while True:
            try:
                _pass_on(process)
                code = process.wait()
                break
            except KeyboardInterrupt as error:  # once: the ranks may save their work; twice: they are killed
                interrupts.append(error)
                process.send_signal(signal.SIGINT)
        for first in interrupts:
            raise first
        return code


def _pass_on(process: "subprocess.Popen[bytes]") -> None:
    """Write to this program's own streams what the launcher writes; a notebook's are no files."""
    with selectors.DefaultSelector() as selector:
        for pipe, stream in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if pipe is not None and not pipe.closed:
                selector.register(
                    pipe, selectors.EVENT_READ, (codecs.getincrementaldecoder("utf-8")("replace"), stream)
                )
        while selector.get_map():
            for key, _ in selector.select():
                pipe = cast("IO[bytes]", key.fileobj)
                if not _passed_on(pipe, *key.data):
                    selector.unregister(pipe)
                    pipe.close()


def _passed_on(pipe: IO[bytes], decoder: codecs.IncrementalDecoder, stream: TextIO) -> bool:
    data = os.read(pipe.fileno(), _READ_BYTES)
    stream.write(decoder.decode(data, final=not data))
    stream.flush()
    return bool(data)


def _results(code: int, outcomes: Sequence[Outcome | None], failed: str) -> list[Any]:
    returned = [each.value for each in outcomes if isinstance(each, Returned)]
    if code == 0 and len(returned) == len(outcomes):
        return returned
    failures = [(rank, each) for rank, each in enumerate(outcomes) if isinstance(each, Failure)]
    # A rank that raises because it misses another one is not the cause.
    causes = [(rank, failure) for rank, failure in failures if not failure.is_consequence]
    if causes:
        rank, failure = causes[0]
        raise LaunchError(f"{failed}: rank {rank} raised\n{failure.text}") from failure.error
    missing = [rank for rank, each in enumerate(outcomes) if each is None]
    told = "".join(f"\nrank {rank} raised\n{failure.text}" for rank, failure in failures)
    raise LaunchError(f"{failed}: exit code {code}; ranks {missing} neither returned nor raised{told}")
