"""Delayed reductions of all gradients: a round is reduced while the next step's backward runs."""

from collections.abc import Callable, Sequence

from torch import Tensor

from multiring._frontend.errors import internal_errors
from multiring._gradients.reductions import Reduction
from multiring.errors import MultiringError, StateError
from multiring.torch.gradients.bucket_assignment import BucketAssignment, GradientWatch
from multiring.torch.gradients.change_detection import GradientRecords, LateComparison
from multiring.torch.gradients.parameter_gradient import ParameterGradient, turn
from multiring.torch.gradients.sparse_rows import Gathered

_WHAT = "DistributedOptimizer"
_TOO_LATE = (
    "gradient lag is already reducing copies of them while the next step runs (mt.clip_gradients and "
    "mt.mixed_precision work on the reduced gradients)"
)
INSTEAD = (
    "Call optimizer.synchronize() after the last backward, before gradients are used, and step within `with "
    "optimizer.skip_synchronize():`"
)
"""What a program should do that changes gradients too early."""


class Round:
    """One reduction of all gradients in flight, and the places of its results."""

    def __init__(
        self,
        number: int,
        assignment: BucketAssignment,
        wait: Callable[[], None],
        see_whole: Callable[[Sequence[Tensor]], None] | None,
    ) -> None:
        """Record a reduction that has been started.

        Args:
            number: the number of the round, the same on all ranks.
            assignment: the buckets that were started.
            wait: waits for all buckets; raises an error if the reduction fails.
            see_whole: is called with all reduced dense gradients.
        """
        self._number = number
        self._assignment = assignment
        self._wait: Callable[[], None] | None = wait
        self._see_whole = see_whole
        self._reductions = [bucket.reduction for bucket in assignment.buckets]
        self._told = assignment.first_steps.told()
        self._places = [(entry, entry.view, entry.bucket.reduction, entry.member) for entry in assignment.gradients]
        self._is_lost = False
        self.comparison: LateComparison | None = None  # of the gradients at the backward's end and at the step

    def settle(self) -> None:
        """Wait until the gradients are reduced; later calls return at once.

        Raises:
            CollectiveError: the ranks' operations differ, or a rank has failed. Each later call raises it again.
        """
        if self._wait is None:
            return
        self._wait()
        if self._see_whole is not None:
            self._see_whole([view for _, view, reduction, _ in self._places if not isinstance(reduction, Gathered)])
        with internal_errors(_WHAT):
            self._assignment.learn_later(self._number, self._reductions)
            self._assignment.compare(self._reductions, self._told)
        self._wait = None

    def settle_or_lose(self) -> None:
        """Wait as `settle` does. After a failure, treat all gradients as missing."""
        try:
            self.settle()
        except MultiringError:
            self._is_lost, self._wait = True, None

    def gradients(self) -> dict[int, Tensor]:
        """Wait for the reduced gradients and return them by the parameters' `id`.

        A gradient that no rank has is omitted.

        The gradients are valid until the round after the next one begins.

        Raises:
            CollectiveError: as `settle`.
            StateError: the program changed its own gradients on a device before the step, which has no effect.
        """
        self.settle()
        if self._is_lost:
            return {}
        # The comparison was queued a step ago, so the device has most likely finished it.
        how = "" if self.comparison is None else self.comparison.changed()
        if how:
            raise StateError(
                f"optimizer.step(): {how} between the backward and the call of optimizer.step() before this one, but "
                f"{_TOO_LATE}. Those gradients are not applied. {INSTEAD}"
            )
        found = {id(entry.parameter): _outcome(*place) for place in self._places for entry in (place[0],)}
        return {key: gradient for key, gradient in found.items() if gradient is not None}


class Rounds:
    """The successive rounds of some gradients. Two rounds may be in use at a time; they alternate between two buffers.

    Without `delays`, each reduction ends with its backward, and this object only counts the rounds.
    """

    def __init__(self, assignment: BucketAssignment, records: GradientRecords) -> None:
        self._assignment = assignment
        self._records = records
        self.delays = False  # whether a backward ends before its gradients are reduced
        self._current: Round | None = None  # the round in flight, until it is taken
        self._taken: Round | None = None  # the last round that was taken
        self._number = 0  # the observer of the current round
        self.watching: GradientWatch | None = None  # the observer of rounds that begin from now on

    @property
    def is_on_its_way(self) -> bool:
        """Whether a started round has not been taken yet."""
        return self._current is not None

    def begin(self) -> None:
        """Begin a new round. It reuses the places of a round in flight, if there is one.

        In that case, a group of backwards seemed complete but continues. The new round reduces the
        gradients of the whole group.
        """
        if self._current is not None:
            self._current.settle()
            self._current = None
        self._number += 1
        self._assignment.move_due(self._number)
        self._assignment.watch = self.watching
        if self.watching is not None:
            self.watching.begin()
        self._assignment.begin()

    def see_whole(self) -> None:
        """Show the observer the reduced gradients."""
        if self._assignment.watch is not None:
            own = [entry for entry in self._assignment.gradients if not isinstance(entry.bucket.reduction, Gathered)]
            self._assignment.watch.see_whole([entry.view for entry in own])

    def post(self, wait: Callable[[], None]) -> None:
        """Record that a round has started. `.grad` keeps this rank's own gradients, which must not change.

        Args:
            wait: waits for all buckets of the round.
        """
        watch = self._assignment.watch
        self._current = Round(self._number, self._assignment, wait, None if watch is None else watch.see_whole)
        self._records.clear()
        self._records.see(self._assignment.buckets)

    def take(self) -> Round | None:
        """Return the round in flight, or None if its gradients were already handed out.

        The caller may then change `.grad`.

        The next round reuses the places of the round before this one. The caller must not use the earlier round any
        more when the next round begins.
        """
        found, self._current = self._current, None
        self._taken = found or self._taken
        self._forget_own()
        for bucket in self._assignment.buckets:
            turn(bucket)
        return found

    def hand_out(self) -> None:
        """Wait for the round in flight, if there is one, and make `.grad` its reduced gradients."""
        if self._current is None:
            return
        found = self._current.gradients()
        self._current = None
        self._forget_own()
        for entry in self._assignment.gradients:
            entry.parameter.grad = found.get(id(entry.parameter))
            entry.is_reduced = entry.parameter.grad is not None

    def changed(self, step: int, passes_done: int, passes: int, *, waits: bool) -> str:
        """Return how gradients were changed since the last backward, and why that has no effect; "" if they were not.

        Without `waits`, a change on a device that torch does not count, as that of a GradScaler's `unscale_`, is found
        when the round's gradients are used.

        Args:
            step: the number of the current step, from 1.
            passes_done: the number of backwards since the last reduction.
            passes: the number of backwards per step.
            waits: whether the caller waits for the reduced gradients next; otherwise, a round in flight is not delayed
                by a device.
        """
        how = self._records.changed(waits=waits or not self.is_on_its_way)
        if how and self.is_on_its_way:
            return f"{how} after the last backward, but {_TOO_LATE}"
        if self._current is not None and not waits:
            self._current.comparison = self._records.compare_later()
        return how and (
            f"{how} after the last backward, but the gradients are not reduced yet: step {step} has had "
            f"{passes_done} of its backward_passes_per_step={passes} backwards, so this rank clipped or scaled its "
            "own gradients, not those of all ranks"
        )

    def are_settled(self) -> bool:
        """Wait for all rounds and return whether they succeeded. A failed round raises its error at its next use."""
        try:
            for each in (self._taken, self._current):
                if each is not None:
                    each.settle()
        except MultiringError:
            return False
        return True

    def close(self) -> None:
        """Wait for all rounds; treat a failed round as if no rank had a gradient.

        The caller begins anew. Another operation of the ranks has raised the failure, or will raise it.
        """
        for each in (self._taken, self._current):
            if each is not None:
                each.settle_or_lose()

    def contribute_neutrally(self) -> None:
        """Contribute zeros to the other ranks' reductions, until every rank has stopped training."""
        assignment = self._assignment
        self.are_settled()
        while True:
            self._number += 1
            assignment.move_due(self._number)
            if not assignment.contribute_neutrally():
                return
            with internal_errors(_WHAT):
                reductions = [bucket.reduction for bucket in assignment.buckets]
                # In the order of a rank that trains: it waits for one before it starts the other.
                if self.delays:
                    assignment.learn_later(self._number, reductions)
                else:
                    assignment.move_out(assignment.learn_sparse())
                assignment.compare(reductions, assignment.first_steps.told_nothing())

    def _forget_own(self) -> None:
        self._records.clear()
        for entry in self._assignment.gradients:
            entry.brought = None


def _outcome(entry: ParameterGradient, view: Tensor, reduction: Reduction, member: int) -> Tensor | None:
    if isinstance(reduction, Gathered):
        return reduction.gradient
    if not reduction.flags[member]:
        return None
    return view.to_sparse(1) if entry.is_sparse else entry.handed_out(view)
