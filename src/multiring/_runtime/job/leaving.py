"""SIGTERM to a rank of a job that goes on without it: the rank leaves at its next commit."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from multiring._runtime.job.job import current, is_rank, lets_in, may_go_on

EXIT_CODE = 128 + signal.SIGTERM


class LeaveRequest:
    """Whether this rank has been asked to leave.

    The launcher sends SIGTERM, too, to end the job. So the rank asks it, and if the job ends, it goes by the signal's
    default action.
    """

    def __init__(self) -> None:
        self.has_come = False
        self._pid = 0  # the process that handles the signal; its forked children end by it
        self._must_ask = False  # the signal came while the ranks formed anew, when nobody can be asked

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Handle SIGTERM in the block, if the program does not, and the other ranks can go on without this one."""
        # A rank that is alone, so that nobody could go on without it, may not be for long.
        may_leave = may_go_on() or lets_in()
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or not may_leave or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return
        self._pid = os.getpid()
        signal.signal(signal.SIGTERM, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def follow_up(self) -> None:
        """Ask the launcher, at a commit, if it could not be asked when the signal came."""
        vote = current().vote if self._must_ask and is_rank() else None
        if vote is not None:
            self._must_ask = False
            vote.ask_for_end()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if not is_rank() and os.getpid() == self._pid:
            self.has_come = self._must_ask = True
            return
        vote = current().vote if is_rank() else None
        if vote is None or vote.job_ends:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self.has_come = True
        vote.ask_for_end()


def leave_at_commit() -> None:
    """Leave the job at a commit, while the other ranks go on.

    Every other rank calls `succeed` or `let_in` at the same commit.
    """
    world = current()
    if world.vote is not None:
        world.vote.withdraw()
    world.end(0.0, announce=False)
