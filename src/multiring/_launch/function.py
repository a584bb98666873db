"""Run a function on several ranks of this machine and return the results.

The caller is a script or a notebook.

The function, the results and the errors are pickles in a folder that only this user can enter. A separate launcher
process starts and watches the ranks. It stops all of them if one fails.
"""

import codecs
import fcntl
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TextIO, cast

from multiring._launch.commands import refuse_places
from multiring._launch.first_failure import Ended, end_in
from multiring._launch.job import JobOptions
from multiring._launch.pickled_call import CallFolder, Failure, Outcome, Returned
from multiring._limits.processes import refused
from multiring._settings import inherited_environment
from multiring.errors import ArgumentError, LaunchError

_READ_BYTES = 1 << 16
_TOLD = "job.json"
_FOLDER = "multiring-run-"  # begins the name of a call's folder
_LOCK = "caller"  # the file that the caller locks while it needs the folder


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionOptions:
    """Options of `run_function`.

    - job: options of the job.
    - python: the ranks' Python.
    - hosts: hosts like `a:4,b:4` whose first places the ranks take, by ssh. None: this host.
    - failed: the first words of the error for a failed job.
    """

    job: JobOptions = field(default_factory=JobOptions)
    python: str = sys.executable
    hosts: str | None = None
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
    """Call a function on `ranks` new processes and return its results by rank.

    In each process the function runs like a script under `multiring run`, and may call `multiring.init()`. The output
    of the ranks appears in this process's output, tagged with the rank, also in a notebook. Ctrl-C stops the ranks.

    Args:
        function: the function, called as `function(*args, **kwargs)`. Without cloudpickle it must be importable by
            its name. With cloudpickle installed it may also be defined in a notebook.
        ranks: the number of processes.
        args: positional arguments.
        kwargs: keyword arguments.
        env: variables to set for the ranks.
        log_dir: a folder. The output of rank K also goes to rank-K.out and rank-K.err in it.

    Raises:
        ArgumentError: `ranks` is not a positive integer, the function or its arguments cannot be pickled, or `env` sets
            a variable that the launcher sets itself.
        LaunchError: a rank failed, and the others were stopped. The rank's error is the cause (`__cause__`), and its
            traceback is in the text.
        KeyboardInterrupt: the user pressed Ctrl-C. It is raised after all ranks have ended.
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
    """Run a function on `ranks` processes, like `run`, with `options`.

    `timeline` and `stdin_rank` have no effect.
    """
    wanted: object = function  # a user may pass a value of any type
    if not callable(wanted):
        scripts = "; a script is started by `multiring run -n N script.py`" if isinstance(wanted, str) else ""
        raise ArgumentError(f"{wanted!r} is not a function: want the function itself, not its result{scripts}")
    count: object = ranks  # a user may pass a value of any type
    if not isinstance(count, int) or count < 1:
        raise ArgumentError(f"ranks={ranks!r}: want an integer, at least 1")
    refuse_places(options.job.variables, horovod=options.job.horovod, timeline=False)
    with call_folder() as folder:
        call = CallFolder(folder)
        call.send(function, tuple(args), dict(kwargs))
        told = {
            "ranks": ranks,
            "python": options.python,
            "hosts": options.hosts,
            "ssh_words": options.job.ssh_words,
            "variables": sorted(options.job.variables),  # the launcher inherits their values
            "log_dir": "" if options.job.log_dir is None else str(options.job.log_dir),
            "horovod": options.job.horovod,
            "grace_s": options.job.grace_s,
        }
        (folder / _TOLD).write_text(json.dumps(told), encoding="utf-8")
        code = _launched(folder / _TOLD, options.job.variables)
        if (refusal := call.refusal) is not None:
            raise refusal
        ends = [None if outcome is None else end_in(outcome) for outcome in call.outcomes(ranks)]
        return _results(code, ends, options.failed)


@contextmanager
def call_folder() -> Iterator[Path]:
    """Make a private folder, and remove it at the end. Folders whose callers were killed are removed, too."""
    _remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=_FOLDER) as name:
        draft = Path(name) / "draft"
        with draft.open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it when this process ends, in any way
            draft.rename(Path(name) / _LOCK)  # no other process sees the file before it is locked
            yield Path(name)


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        with suppress(OSError):  # it is being made or removed, or its caller holds the lock
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("r+b") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)


class _Interrupts:
    """Sends Ctrl-C on to the launcher, and raises it after the launcher's end.

    A KeyboardInterrupt within Popen, or while another one is handled, would leave a launcher that nobody knows. Only
    Python's own handler is replaced: a program's handler need not raise.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._count = self._sent = 0  # of interrupts
        is_main = threading.current_thread() is threading.main_thread()
        self._is_replaced = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def __enter__(self) -> "_Interrupts":  # noqa: PYI034 -- typing.Self is of 3.11
        if self._is_replaced:
            signal.signal(signal.SIGINT, lambda *_: self.take())
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._is_replaced:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._count and kind is None:
            raise KeyboardInterrupt

    def take(self) -> None:
        """Take one interrupt: the first lets the ranks save their work, the second kills the ranks."""
        self._count += 1
        self._send()

    def to(self, process: "subprocess.Popen[bytes]") -> None:
        """Send all interrupts to this process."""
        self._process = process
        self._send()

    def _send(self) -> None:
        while self._process is not None and self._sent < self._count:
            self._sent += 1
            self._process.send_signal(signal.SIGINT)


def _launched(told: Path, variables: Mapping[str, str]) -> int:
    """Run the launcher process and return its exit code. Ctrl-C stops the ranks, and is raised after their end."""
    command = [sys.executable, "-m", "multiring._launch.function_launcher", str(os.getpid()), str(told)]
    with _Interrupts() as interrupts:
        try:
            process = subprocess.Popen(  # noqa: S603 -- a module of multiring
                command,
                env={**inherited_environment(), **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                # A terminal sends Ctrl-C to the whole process group. The launcher gets it from this process only: it
                # takes a second SIGINT as the wish to kill the ranks at once. If this process dies, the kernel kills
                # the launcher.
                start_new_session=True,
            )
        except OSError as error:
            raise refused("the launcher cannot be started", error) from None
        with process:
            interrupts.to(process)
            while True:
                try:
                    _pass_on(process)
                    return process.wait()
                except KeyboardInterrupt:  # of a handler of the program
                    interrupts.take()
                except BaseException:  # as above, or the output cannot be shown; ranks that print nothing would run on
                    process.terminate()
                    raise


def _pass_on(process: "subprocess.Popen[bytes]") -> None:
    """Copy the launcher's output to sys.stdout and sys.stderr, because a notebook's streams have no descriptors."""
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


def _results(code: int, ends: Sequence[Outcome | Ended | None], failed: str) -> list[Any]:
    returned = [each.value for each in ends if isinstance(each, Returned)]
    if code == 0 and len(returned) == len(ends):
        return returned
    failures = [(rank, each) for rank, each in enumerate(ends) if isinstance(each, Failure)]
    # A rank that raises because it lost another rank is not the cause of the failure.
    causes = [(rank, failure) for rank, failure in failures if not failure.is_consequence]
    if causes:
        rank, failure = causes[0]
        raise LaunchError(f"{failed}: rank {rank} raised\n{failure.text}") from failure.error
    for rank, end in enumerate(ends):
        if isinstance(end, Ended):  # its result cannot be unpickled here
            raise LaunchError(f"{failed}: rank {rank} {end.text}")
    missing = [rank for rank, each in enumerate(ends) if each is None]
    told = "".join(f"\nrank {rank} raised\n{failure.text}" for rank, failure in failures)
    raise LaunchError(f"{failed}: exit code {code}; ranks {missing} neither returned nor raised{told}")
