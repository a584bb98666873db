"""One reduction of all gradients that nobody waits for yet: it goes on while the next step's backward runs."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from multiring.errors import MultiringError
from multiring.frontend.errors import HorovodInternalError, internal_errors
from multiring.gradients.buckets import TRAINS_FLAG
from multiring.gradients.reducer import BucketOrder
from multiring.gradients.reductions import Reduction
from multiring.torch.gradients.bucket_assignment import BucketAssignment
from multiring.torch.gradients.change_detection import Witnesses
from multiring.torch.gradients.parameter_gradient import Bucket, ParameterGradient
from multiring.torch.gradients.sparse_rows import Gathered

_WHAT = "DistributedOptimizer"


class GradientWatch(Protocol):
    """Who looks at gradients on their way; dense ones only."""

    def begin(self) -> None:
        """Take note that a reduction begins; an earlier one that it had begun to look at was for nothing."""

    def see_own(self, gradients: Sequence[Tensor]) -> None:
        """Look at some of this rank's, which are about to be reduced."""

    def see_whole(self, gradients: Sequence[Tensor]) -> None:
        """Look at all of them, reduced."""


class Round:
    """The gradients of one step on their way, and where they come out."""

    def __init__(
        self,
        number: int,
        assignment: BucketAssignment,
        wait: Callable[[], None],
        see_whole: Callable[[Sequence[Tensor]], None] | None,
    ) -> None:
        """Take note of what has been started.

        Args:
            number: of the round, the same on all ranks.
            assignment: the buckets, as they were started.
            wait: waits for all of them, or raises.
            see_whole: looks at all dense gradients as they come out.
        """
        self._number = number
        self._assignment = assignment
        self._wait: Callable[[], None] | None = wait
        self._see_whole = see_whole
        self._reductions = [bucket.reduction for bucket in assignment.buckets]
        self._told = assignment.first_steps.told()
        self._places = [(entry, entry.view, entry.bucket.reduction, entry.member) for entry in assignment.gradients]
        self._is_lost = False

    def settle(self) -> None:
        """Return once the gradients are those of all ranks; again, at once.

        Raises:
            HorovodInternalError: ranks disagree, or one is gone; again, each time.
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
        """As `settle`; what failed is as if no rank had had a gradient."""
        try:
            self.settle()
        except (MultiringError, HorovodInternalError):
            self._is_lost, self._wait = True, None

    def gradients(self) -> dict[int, Tensor]:
        """Return the gradients of all ranks, by the parameters' `id`, of those that any rank has; once they are there.

        They hold until the round after the next one begins.
        """
        self.settle()
        if self._is_lost:
            return {}
        found = {id(entry.parameter): _outcome(*place) for place in self._places for entry in (place[0],)}
        return {key: gradient for key, gradient in found.items() if gradient is not None}


class Rounds:
    """The reductions of some gradients, one after the other, of which two may be under way: they take turns.

    Without `delays` each ends with its backward, and there is nothing here but their number.
    """

    def __init__(self, assignment: BucketAssignment, witnesses: Witnesses) -> None:
        self._assignment = assignment
        self._witnesses = witnesses
        self.delays = False  # whether a backward ends before its gradients are there
        self._current: Round | None = None  # on its way, and nobody has taken it
        self._taken: Round | None = None  # the last one that somebody took
        self._number = 0  # of those that began, the same on all ranks
        self.watching: GradientWatch | None = None  # looks at those that begin from now on
        self._watch: GradientWatch | None = None  # looks at the one that has begun

    @property
    def is_on_its_way(self) -> bool:
        """Whether the last one has started, and nobody has taken it."""
        return self._current is not None

    def begin(self) -> None:
        """Take note that one begins, in the places of the one that is on its way, if there is one.

        That was of a group of backwards that was thought to be complete, and goes on: the next one has its gradients.
        """
        if self._current is not None:
            self._current.settle()
            self._current = None
        self._number += 1
        self._assignment.begin(self._number)
        self._watch = self.watching
        if self._watch is not None:
            self._watch.begin()

    def see_own(self, bucket: Bucket) -> None:
        """Show a bucket that is about to start to whoever watches."""
        if self._watch is not None and not isinstance(bucket.reduction, Gathered):
            self._watch.see_own([entry.view for entry in bucket.gradients])

    def see_whole(self) -> None:
        """Show the gradients of all ranks, which are there, to whoever watches."""
        if self._watch is not None:
            own = [entry for entry in self._assignment.gradients if not isinstance(entry.bucket.reduction, Gathered)]
            self._watch.see_whole([entry.view for entry in own])

    def post(self, wait: Callable[[], None]) -> None:
        """Take note that one has started, for which `wait` waits; `.grad` stays this rank's own, and is not to change.

        Args:
            wait: for all its buckets.
        """
        see_whole = None if self._watch is None else self._watch.see_whole
        self._current = Round(self._number, self._assignment, wait, see_whole)
        self._witnesses.clear()
        self._witnesses.see(self._assignment.buckets)

    def take(self) -> Round | None:
        """Return the one that is on its way; None where its gradients were handed out. `.grad` is free then.

        The one that was taken before has been used up by the time the next one begins, which takes its places.
        """
        found, self._current = self._current, None
        self._taken = found or self._taken
        self._forget_own()
        for bucket in self._assignment.buckets:
            bucket.turn()
        return found

    def hand_out(self) -> None:
        """Make `.grad` the gradients of all ranks that are still on their way, if there are some."""
        if self._current is None:
            return
        found = self._current.gradients()
        self._current = None
        self._forget_own()
        for entry in self._assignment.gradients:
            entry.parameter.grad = found.get(id(entry.parameter))
            entry.is_reduced = entry.parameter.grad is not None

    def changed(self, step: int, passes_done: int, passes: int) -> str:
        """Return how gradients were changed since the last backward, if they were, and why that is of no use; else "".

        Args:
            step: the number of the step that is being made, from 1.
            passes_done: backwards since the last reduction.
            passes: backwards that make a step.
        """
        how = self._witnesses.changed()
        if how and self.is_on_its_way:
            return (
                f"{how} after the last backward, and copies of them are on their way, as gradient lag reduces them "
                "behind the next step (mt.clip_gradients and mt.mixed_precision see them when they are there)"
            )
        return how and (
            f"{how} after the last backward, and are not reduced yet: step {step} has had {passes_done} of the "
            f"backwards that backward_passes_per_step={passes} promised, so what was clipped or scaled is this rank's "
            "own gradient, not that of all ranks"
        )

    def are_settled(self) -> bool:
        """Wait until nothing is on its way; return whether that arrived. Else whoever takes it is told."""
        try:
            for each in (self._taken, self._current):
                if each is not None:
                    each.settle()
        except (MultiringError, HorovodInternalError):
            return False
        return True

    def close(self) -> None:
        """Wait until nothing is on its way; what failed is as if no rank had had a gradient.

        For who begins anew: the failure has been raised where the ranks met, or will be there.
        """
        for each in (self._taken, self._current):
            if each is not None:
                each.settle_or_lose()

    def contribute_neutrally(self, order: BucketOrder) -> None:
        """Take part in the other ranks' reductions without gradients of this rank's own, until no rank trains any more.

        Args:
            order: starts buckets.
        """
        assignment = self._assignment
        self.are_settled()
        trains = bool(assignment.buckets)
        while trains:
            self._number += 1
            assignment.begin(self._number)
            for bucket in assignment.buckets:
                for entry in bucket.gradients:
                    if not isinstance(bucket.reduction, Gathered):
                        entry.view.zero_()
                    entry.is_reduced = False
                bucket.reduction.flags[:] = 0
                order.start(bucket.reduction)
            order.wait()
            order.begin()
            trains = bool(assignment.buckets[0].reduction.flags[TRAINS_FLAG])
            with internal_errors(_WHAT):
                reductions = [bucket.reduction for bucket in assignment.buckets]
                if self.delays:
                    assignment.learn_later(self._number, reductions)
                    assignment.compare(reductions, assignment.first_steps.told_nothing())
                else:
                    assignment.compare(reductions, assignment.first_steps.told_nothing())
                    assignment.move_out(assignment.learn_sparse())

    def _forget_own(self) -> None:
        self._witnesses.clear()
        for entry in self._assignment.gradients:
            entry.brought = None


def _outcome(entry: ParameterGradient, view: Tensor, reduction: Reduction, member: int) -> Tensor | None:
    if isinstance(reduction, Gathered):
        return reduction.gradient
    if not reduction.flags[member]:
        return None
    return view.to_sparse(1) if entry.is_sparse else entry.handed_out(view)
