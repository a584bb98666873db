"""Operations whose ranks agree how the operation runs: a small reduction, and what follows from it.

Each rank says whether it can take the better way, and the least answer over the ranks decides. The agreement is matched
by name like any operation. So the ranks agree on shapes and types, and may start operations in different orders. What
follows starts in the order in which the agreements were posted. This order is the same on all ranks.

While all answers are the same, the ranks expect the next one: if it is the better way, an operation starts ahead of its
agreement; if that way is out of the question, the operation runs without one. Whether they do must be the same on all
ranks, so it depends on the answers of agreements that lie `BEHIND` operations back. All ranks know those.
docs/decisions/0121-nccl-in-torch.md has the reasons.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from multiring._runtime import Group, Handle
from multiring._runtime.group.starting import start_agreement
from multiring.errors import MultiringError

DEVICE_PATH = "device path"  # the term of operations whose ranks agree how they reduce tensors on devices

NO, NEVER, YES, LATER = range(4)
"""A rank's answers: it cannot take the better way this time; it can never; it can; it can after the agreement only.

Ranks that agree on one way give one of the last two.
"""
BEHIND = 64
"""How many operations lie between an agreement and the first operation that depends on its answer."""
EQUAL = 16
"""How many equal answers must follow each other."""


class FollowUp(Protocol):
    """An operation, and what follows its agreement. The methods are called on the threads of `FollowUps`.

    `follow` must not raise.
    """

    answer: int
    """This rank's answer; after the agreement, the least of all ranks."""

    def begin(self) -> None:
        """Start the better way, ahead of the agreement. It must not wait for other ranks."""

    def follow(self) -> None:
        """Start what follows from the agreement."""


class NeutralFollowUp:
    """The follow-up of a rank that has joined."""

    answer = NO

    def __init__(self, contribute: Callable[[], object]) -> None:
        """Make it. `contribute` starts a contribution that does not change the other ranks' operation."""
        self._contribute = contribute

    def begin(self) -> None:
        """Do nothing: such a rank starts nothing ahead."""

    def follow(self) -> None:
        """Contribute."""
        self._contribute()


class _Job:
    """A follow-up whose agreement was posted."""

    def __init__(self, agreement: Handle, told: NDArray[np.int64], work: FollowUp, *, is_ahead: bool, own: int) -> None:
        self.agreement, self.told, self.work, self.is_ahead = agreement, told, work, is_ahead
        self.own = own  # how many operations had started ahead, without those that this rank made up for


class Expectation:
    """What the ranks expect of the next agreement, by the answers of those that lie back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: deque[tuple[int, Handle, NDArray[np.int64]]] = deque()
        self._answer, self._streak = NO, 0

    def note(self, number: int, agreement: Handle, told: NDArray[np.int64]) -> None:
        """Take note of an agreement, which is operation `number` of its group."""
        self._open.append((number, agreement, told))

    def of(self, number: int) -> int:
        """Return the expected answer for operation `number`; NO if there is none.

        It waits for the agreements that lie `BEHIND` operations back.
        """
        with self._lock:
            while self._open and self._open[0][0] <= number - BEHIND:
                _, agreement, told = self._open.popleft()
                try:
                    agreement.wait()
                except MultiringError:  # it has no answer, on all ranks
                    continue
                answer = int(told[0])
                self._streak = self._streak + 1 if answer == self._answer else 1
                self._answer = answer
            return self._answer if self._streak >= EQUAL else NO


class FollowUps:
    """What follows the agreements of one process set."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._expectation = Expectation()
        self._ahead = 0  # operations that have started ahead, without those below
        self._made_up = 0  # operations in which this rank only took part to make them fail
        self._begun: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()  # to be started ahead
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._plain = 0  # jobs without a start ahead that nothing has followed yet
        self._changed = threading.Condition()
        self.make_up: Callable[[], object] | None = None
        """Takes part in an operation that other ranks have started ahead, so that it fails on all ranks."""
        self._threads: list[threading.Thread] = []

    @property
    def staged(self) -> Group:
        """The group in host memory for what follows; only this object's thread posts operations on it."""
        return self._group.twin_for("what follows an agreement on devices")

    def expected(self, number: int) -> int:
        """Return the answer that the ranks expect for operation `number` in the program's order; NO if there is none.

        It waits for the agreements that lie `BEHIND` operations back. All ranks get the same.
        """
        return self._expectation.of(number)

    def agree(self, group: Group, label: str, work: FollowUp, *, is_tracked: bool, is_ahead: bool) -> Handle:
        """Post an agreement, and return its handle. The caller holds the lock of the set's named operations.

        Args:
            group: the group on which the ranks agree.
            label: the operation's label.
            work: the operation. What follows does not, if the agreement fails.
            is_tracked: whether `group` has the program's order, so that the answer counts for later operations.
            is_ahead: whether the operation starts ahead, because the ranks expect the answer YES.
        """
        with self._changed:
            self._ahead += is_ahead
            own = self._ahead
            told = np.array([work.answer, -own - self._made_up], np.int64)
        agreement = start_agreement(group.calls, told, "min", label, waits=False)
        if is_tracked:
            self._expectation.note(group.calls.last, agreement, told)
        job = _Job(agreement, told, work, is_ahead=is_ahead, own=own)
        if not self._threads:
            self._start(self._follow_all, "multiring follow-ups")
        if is_ahead and len(self._threads) == 1:
            self._start(self._begin_all, "multiring operations ahead")
        if len(self._threads) > 1:
            self._begun.put(job)
        else:
            self._put(job)
        return agreement

    def _start(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _put(self, job: _Job) -> None:
        with self._changed:
            self._plain += not job.is_ahead
        self._jobs.put(job)

    def close(self) -> None:
        """End the threads after the operations that have been posted."""
        threads, self._threads = self._threads, []
        if threads:
            (self._begun if len(threads) > 1 else self._jobs).put(None)

    def _begin_all(self) -> None:
        while (job := self._begun.get()) is not None:
            if job.is_ahead:
                with self._changed:  # what follows agreements starts before, as on the other ranks
                    self._changed.wait_for(lambda: self._plain == 0)
                with suppress(Exception):  # of a group that has failed; what follows raises it
                    job.work.begin()
            self._put(job)
            del job  # it holds the operation's tensors
        self._jobs.put(None)

    def _follow_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.agreement.wait()
            except MultiringError:  # the operation fails, or is posted again in the negotiated order
                pass
            else:
                self._follow(job)
            with self._changed:
                self._plain -= not job.is_ahead
                self._changed.notify_all()
            del job  # it holds the operation's tensors

    def _follow(self, job: _Job) -> None:
        job.work.answer = int(job.told[0])
        with self._changed:
            # Operations that another rank has started ahead, and this one has not: the ranks did not agree on them.
            missing = max(0, -int(job.told[1]) - job.own - self._made_up)
            self._made_up += missing
        for _ in range(missing):
            assert self.make_up is not None  # noqa: S101 -- all ranks had answered YES
            with suppress(Exception):  # as above: a thread that ended here would leave the program waiting
                self.make_up()
        job.work.follow()
