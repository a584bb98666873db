"""A second process that outlives a killed launcher, for as long as it takes to end what the job left."""

import contextlib
import os
import signal
from pathlib import Path

from multiring.launch.leftovers import end_leftovers
from multiring.launch.signals import PASSED_ON

_GRACE_S = 2.0
_ALL_IS_WELL = b"."
_READ_BYTES = 4096


class Watchdog:
    """Forked before the ranks; it waits at a pipe whose other end only the launcher holds.

    When the launcher dies without having said that all is well, even by kill -9, the pipe closes and the guard
    ends the job's processes. The ranks themselves are killed by the kernel before (PR_SET_PDEATHSIG); the
    guard is for what they started.
    """

    def __init__(self, job: str) -> None:
        watched, self._pipe = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _watch_launcher(job, watched)
        os.close(watched)

    def watch(self, group: int) -> None:
        """Add a rank's process group, from its start."""
        self._say(b"+%d\n" % group)

    def forget(self, group: int) -> None:
        """Drop a process group whose leader was reaped: its number may come to mean something else."""
        self._say(b"-%d\n" % group)

    def dismiss(self) -> None:
        """Let the guard go; the job is over and nothing is left."""
        self._say(_ALL_IS_WELL)
        os.close(self._pipe)
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)  # it has nothing to do any more; it may have been stopped
            os.waitpid(self._pid, 0)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._pid

    def _say(self, words: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # someone killed the guard; the job goes on without it
            os.write(self._pipe, words)


def _watch_launcher(job: str, watched: int) -> None:
    """Never returns: in this process the launcher's stack must not be unwound."""
    try:
        os.setsid()  # a signal to the launcher's group, even SIGKILL, must not reach the guard
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, *PASSED_ON):
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        # Whoever waits for the end of the launcher's output must not wait for the guard.
        for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
            if descriptor != watched:
                with contextlib.suppress(OSError):  # the listing's own, closed already
                    os.close(descriptor)
        heard = _listen(watched)
        if not heard.endswith(_ALL_IS_WELL):
            end_leftovers(job, _groups(heard), _GRACE_S)
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
