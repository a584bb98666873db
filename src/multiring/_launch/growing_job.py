"""A job in which newcomers replace lost ranks: `multiring run --min-ranks K --max-ranks N`."""

import contextlib
import os
import secrets
import selectors
import time
from collections.abc import Sequence
from dataclasses import replace

from multiring._launch.intake_point import FormationOpening, IntakePoint
from multiring._launch.job import JobOptions
from multiring._launch.job_process import JobProcess, Start
from multiring._launch.local_job import LocalJob
from multiring._launch.shrinking_job import Shrinking
from multiring._launch.vote_point import VotePoint
from multiring._runtime.failures.formation_place import FormationPlace
from multiring._settings import environment_of, intake_address, vote_address

_MOST_UNSETTLED = 3  # newcomers in a row that end before their first commit, and are the last ones
_LOOK_S = 0.5  # between two looks for a place for a newcomer
_LONGEST_PAUSE_S = 60.0  # between a loss and the start of its newcomer


class Growing(Shrinking):
    """The part of a job whose lost ranks are replaced by newcomers, which get the ranks' state at a commit.

    A newcomer's number is the next one after those of all processes before it. After each loss, the next newcomer
    starts later, until one has committed. The same error of two ranks ends the job, if the ranks have not committed
    between. A subclass makes `_intake`, where newcomers come in.
    """

    _intake: IntakePoint

    def _prepare_to_grow(self, options: JobOptions, size: int) -> None:
        self._size = size  # the number of ranks at the start
        self._most = options.max_ranks or size
        self._left = options.reset_limit  # how many lost ranks may still be replaced
        self._wanted = [0.0] * (self._most - size)  # when to start newcomers
        self._pause_s = 0.0
        self._unsettled = 0

    def _begin_newcomer(self, number: int) -> bool:
        """Start process `number`; return False if it has no place yet."""
        raise NotImplementedError

    def _open_votes(self, place: FormationPlace, numbers: Sequence[int]) -> None:
        self._votes.close()
        names = [self._members[each].name for each in numbers]
        self._votes = VotePoint(place.votes, place.secret.encode(), place.job, names, self._say)

    def _watch_more(self, poll: selectors.BaseSelector) -> None:
        super()._watch_more(poll)
        self._intake.watch(poll)

    def _wake_at(self) -> float | None:
        return min(
            (at for at in (super()._wake_at(), self._intake.acts_at, *self._due()) if at is not None), default=None
        )

    def _do_more(self) -> None:
        super()._do_more()
        self._intake.act(self._votes)
        if self._intake.given_up and self._code is None:
            self._end_within_grace(self._intake.given_up)
        if self._intake.has_committed:
            self._intake.has_committed = False
            self._errors.clear()
        if self._intake.is_settled:
            self._intake.is_settled, self._pause_s, self._unsettled = False, 0.0, 0
        if self._wanted and any(member.code == 0 or self._has_done(member) for member in self._members):
            self._wanted = []  # the job comes to its end
        now = time.monotonic()
        for at in [each for each in self._due() if now >= each]:
            if self._code is None and not self._begin_newcomer(len(self._members)):
                self._wanted = [max(each, now + _LOOK_S) for each in self._wanted]
                break
            self._wanted.remove(at)

    def _due(self) -> list[float]:
        """Return when to start newcomers: never before the ranks have shown by a commit that they can let them in.

        Else the newcomer of a program without elastic.run would run the whole program, alone.
        """
        return self._wanted if self._intake.was_committed else []

    def _goes_on(self) -> bool:
        return any(not self._is_outside(each) for each in self._running())

    def _ends_job(self, member: JobProcess) -> bool:
        if self._is_outside(member) or not self._intake.is_open:
            return False
        if member.is_consequence and self._members.index(member) >= self._size:
            return False  # it has lost a rank while it came
        return super()._ends_job(member)

    def _go_on_without(self, member: JobProcess) -> None:
        number = self._members.index(member)
        self._intake.kill(number)
        if self._is_outside(member):
            member.is_excused = True
            self._tell_failure(member)
        else:
            super()._go_on_without(member)
        self._unsettled += number >= self._size and not self._intake.is_settled_in(number)
        if self._code is not None or any(map(self._has_done, self._members)):
            return
        if self._unsettled >= _MOST_UNSETTLED:
            self._say(f"{self._unsettled} newcomers in a row have ended before their first commit: no more are started")
        elif self._left == 0:
            self._say("the limit of --reset-limit is reached: no more newcomers are started")
        else:
            self._left -= 1
            self._wanted.append(time.monotonic() + self._pause_s)
            self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s or 1.0)

    def _is_outside(self, member: JobProcess) -> bool:
        """Return whether a process is none of the ranks: a newcomer that is not in yet."""
        return self._members.index(member) not in self._intake.members

    def _survivors(self) -> list[JobProcess]:
        return [each for each in super()._survivors() if not self._is_outside(each)]

    def _rank_of(self, member: JobProcess) -> int:
        number = self._members.index(member)
        ranks = self._intake.members if self._intake.is_open else self._intake.admitted
        return ranks.index(number) if number in ranks else -1


class GrowingJob(Growing, LocalJob):
    """A job of this host whose lost ranks are replaced by newcomers.

    Args:
        name: the job's name.
        starts: the ranks.
        options: the job's options, with `min_ranks` and `max_ranks`.
        reports: the address at which ranks report, as in MULTIRING_REPORTS.
        said: messages to print at the start of the job.
        secret: the job's secret.
    """

    def __init__(
        self, name: str, starts: Sequence[Start], options: JobOptions, reports: str, said: Sequence[str], secret: bytes
    ) -> None:
        super().__init__(name, starts, options, reports, said)
        self._prepare_to_go_on(options)
        self._prepare_to_grow(options, len(starts))
        self._logs = options.logs
        self._place = vote_address(reports), secret, name, [start.name for start in starts]
        self._intake_place = intake_address(reports), name, [(secret.decode(), name) for _ in starts], self._most

    def _open(self, stack: contextlib.ExitStack) -> None:
        super()._open(stack)
        self._votes = VotePoint(*self._place, self._say)
        self._intake = IntakePoint(*self._intake_place, FormationOpening(self._open_votes), self._say)
        stack.callback(self._intake.close)
        stack.callback(self._close_votes)

    def _close_votes(self) -> None:
        self._votes.close()

    def _begin_newcomer(self, number: int) -> bool:
        secret, job = secrets.token_hex(32), f"{self._name}/newcomer-{number}"
        slot = self._starts[number % len(self._starts)]
        start = replace(
            slot,
            name=f"rank {number}",
            tag=f"[{number}] ",
            log_files=self._logs(number, number + 1),
            environment={**slot.environment, **environment_of(intake=number, secret=secret, job=job)},
            has_stdin=False,
        )
        self._intake.expect(number, secret, job)
        try:
            self._members.append(self._start(start))
        except OSError as error:
            self._say(f"a newcomer cannot be started: {error.strerror}")
            return True
        self._born(self._members[-1])
        self._recorder.add_newcomer(number, os.uname().nodename)
        self._say(f"{start.name} is started as a newcomer (pid {self._members[-1].pid})")
        return True
