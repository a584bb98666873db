"""A job whose ranks go on without lost ones: `multiring run --min-ranks`."""

import contextlib
import selectors
import signal
import time
from collections.abc import Sequence

from multiring._launch.job import GRACE_S, Job, JobOptions
from multiring._launch.job_process import JobProcess, Start, text_of
from multiring._launch.local_job import LocalJob
from multiring._launch.vote_point import VotePoint
from multiring._settings import vote_address

LEFT_CODE = 128 + signal.SIGTERM  # of a rank that was asked to leave, and has
TOO_FEW_CODE = 75  # sysexits.h: EX_TEMPFAIL, the failure is temporary, and another attempt may succeed


class Shrinking(Job):
    """The part of a job that does not end because a rank is lost, as long as enough are left.

    These failures end it, as in any job: of a rank before all have joined, of a rank that has left the job, of a rank
    because it lost another one (the program does not go on), and the same error on two ranks (the program is wrong).
    A subclass makes `_votes`, where the ranks vote.
    """

    _votes: VotePoint

    def _prepare_to_go_on(self, options: JobOptions) -> None:
        self._least = options.min_ranks or 1
        self._end_s = options.grace_s  # how long too few ranks may take to save their state and end
        self._gone: list[JobProcess] = []  # the ranks without which the others went on
        self._errors: dict[tuple[int, bytes], JobProcess] = {}  # exit code and last line -> the rank

    def _watch_more(self, poll: selectors.BaseSelector) -> None:
        super()._watch_more(poll)
        self._votes.watch(poll)

    def _wake_at(self) -> float | None:
        return min((at for at in (super()._wake_at(), self._votes.acts_at) if at is not None), default=None)

    def _do_more(self) -> None:
        super()._do_more()
        self._votes.act()
        if self._votes.given_up and self._code is None:
            self._end_within_grace(self._votes.given_up)

    def _stop(self, code: int, number: int = signal.SIGTERM, grace_s: float = GRACE_S) -> None:
        self._votes.job_ends = True  # said before the signal comes
        super()._stop(code, number, grace_s)

    def _judge(self) -> None:
        failed, self._failed = self._failed, []
        for member in failed:
            if self._code is None and not self._ends_job(member):
                self._go_on_without(member)
            else:
                self._failed.append(member)
        if not self._failed or self._code is not None:
            return
        # The first loss is the likeliest cause, and it is a failure again.
        for member in self._gone:
            member.is_excused = False
        self._failed = [*self._gone, *self._failed]
        self._gone = []
        super()._judge()

    def _ends_job(self, member: JobProcess) -> bool:
        """Return whether a rank's failure is one that ends any job; see the class."""
        rank = self._rank_of(member)
        if not self._votes.is_complete or self._votes.has_left(rank) or member.is_consequence:
            return True
        if not self._votes.is_out(rank) and any(map(self._has_done, self._members)):
            return True  # the others have left the job, and this rank's part is missing
        lines = member.err.last_lines
        if member.exit_code == LEFT_CODE:
            return False
        if member.exit_code != member.code or not lines:  # it was killed, or said nothing
            return False
        same = self._errors.setdefault((member.exit_code, lines[-1]), member)
        if same is not member:
            self._say(f"{same.name} and {member.name} ended with the same error, so the program is wrong")
        return same is not member

    def _go_on_without(self, member: JobProcess) -> None:
        rank = self._rank_of(member)
        self._votes.kill(rank)  # the process that ended may have been a shell
        member.is_excused = True
        self._gone.append(member)
        if member.code == LEFT_CODE:
            self._say(f"{member.name} has left, because it got SIGTERM")
        elif not self._votes.has_killed(rank) or member.code != -signal.SIGKILL:
            self._tell_failure(member)
        left = self._survivors()
        if any(map(self._has_done, self._members)):
            self._say(f"the others have gone on without {member.name}, and ranks have come to the end")
            return
        if len(left) >= self._least:
            self._say(f"{text_of(left)} may go on without {member.name}, as at least {self._least} are left")
            return
        who = f"{text_of(left)} {'is' if len(left) == 1 else 'are'}" if left else "no rank is"
        self._end_within_grace(f"{who} left, fewer than --min-ranks {self._least}")

    def _survivors(self) -> list[JobProcess]:
        return [each for each in self._running() if not self._has_done(each)]

    def _end_within_grace(self, why: str) -> None:
        self._code = TOO_FEW_CODE
        self._kill_at = time.monotonic() + self._end_s
        self._votes.tell_end(why)
        self._say(
            f"{why}. The job ends with exit code {TOO_FEW_CODE} within {self._end_s:g} s, in which ranks may save "
            "their state"
        )

    def _has_done(self, member: JobProcess) -> bool:
        return self._votes.has_left(self._rank_of(member))

    def _rank_of(self, member: JobProcess) -> int:
        return self._members.index(member)

    def _conclude(self) -> None:
        super()._conclude()
        if self._gone and not self._code:
            ends = "; ".join(f"{each.name} was lost: {each.ending}" for each in self._gone)
            self._say(f"the job ended without some of its ranks ({ends})")


class ShrinkingJob(Shrinking, LocalJob):
    """A job of this host that does not end because a rank is lost.

    Args:
        name: the job's name.
        starts: the ranks.
        options: the job's options, with `min_ranks`.
        reports: the address at which ranks report, as in MULTIRING_REPORTS.
        said: messages to print at the start of the job.
        secret: the job's secret.
    """

    def __init__(
        self, name: str, starts: Sequence[Start], options: JobOptions, reports: str, said: Sequence[str], secret: bytes
    ) -> None:
        super().__init__(name, starts, options, reports, said)
        self._prepare_to_go_on(options)
        self._place = vote_address(reports), secret, name, [start.name for start in starts]

    def _open(self, stack: contextlib.ExitStack) -> None:
        super()._open(stack)
        self._votes = VotePoint(*self._place, self._say)
        stack.callback(self._votes.close)
