"""A process that outlives a killed launcher and ends its job's processes."""

import contextlib
import os
import signal
from pathlib import Path

from multiring._launch.leftovers import end_leftovers
from multiring._launch.signals import PASSED_ON
from multiring._limits.processes import refused

_GRACE_S = 2.0
_ALL_IS_WELL = b"."
_READ_BYTES = 4096


class Watchdog:
    """A process forked before the ranks.

    The process reads a pipe; only the launcher holds the other end.

    If the launcher dies, even by kill -9, the pipe closes without the launcher's final message. Then the
    watchdog ends the job's processes. The kernel has already killed the ranks themselves (PR_SET_PDEATHSIG). The
    watchdog is needed for the processes that the ranks started.

    Args:
        job: the name of the job.
        rank: the only rank whose processes the watchdog ends. Default: the whole job's.

    Raises:
        LaunchError: the system refuses the process.
    """

    def __init__(self, job: str, rank: int | None = None) -> None:
        watched, self._pipe = os.pipe()
        try:
            self._pid = os.fork()
        except OSError as error:
            os.close(watched)
            os.close(self._pipe)
            raise refused("the launcher's watchdog cannot be started", error) from None
        if self._pid == 0:
            _watch_launcher(job, rank, watched)
        os.close(watched)

    def watch(self, group: int) -> None:
        """Add the process group of a rank that has just started."""
        self._say(b"+%d\n" % group)

    def forget(self, group: int) -> None:
        """Drop a process group whose leader was reaped.

        The system may reuse its ID.
        """
        self._say(b"-%d\n" % group)

    def dismiss(self) -> None:
        """End the watchdog. Call it when no process of the job is left."""
        self._say(_ALL_IS_WELL)
        os.close(self._pipe)
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)  # a signal may have stopped the watchdog, so do not wait for its exit
            os.waitpid(self._pid, 0)

    @property
    def pid(self) -> int:
        """The watchdog's process ID."""
        return self._pid

    def _say(self, words: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # the watchdog was killed; the job continues without it
            os.write(self._pipe, words)


def _watch_launcher(job: str, rank: int | None, watched: int) -> None:
    """Run the watchdog and exit the process.

    The function never returns, because it must not unwind the launcher's stack.
    """
    try:
        os.setsid()  # a signal to the launcher's group, even SIGKILL, must not reach the watchdog
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, *PASSED_ON):
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        # Close inherited descriptors. Otherwise a reader of the launcher's output would wait for the end of the
        # watchdog.
        for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
            if descriptor != watched:
                with contextlib.suppress(OSError):  # the descriptor of the listing is closed already
                    os.close(descriptor)
        heard = _listen(watched)
        if not heard.endswith(_ALL_IS_WELL):
            end_leftovers(job, _groups(heard), _GRACE_S, rank=rank)
    finally:
        os._exit(0)


def _listen(pipe: int) -> bytes:
    heard = b""
    while words := os.read(pipe, _READ_BYTES):
        heard += words
    return heard


def _groups(heard: bytes) -> set[int]:
    groups: set[int] = set()
    for word in heard.split():
        (groups.add if word[:1] == b"+" else groups.discard)(int(word[1:]))
    return groups
