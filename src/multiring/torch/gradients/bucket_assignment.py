"""Assign each gradient to a place in a bucket, and move gradients that turn out to be sparse."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from multiring._frontend.consistency_check import reporting_errors, require_alike
from multiring._frontend.errors import internal_errors
from multiring._frontend.first_steps import FirstSteps
from multiring._gradients.bucket_order import BucketOrder, any_compares
from multiring._gradients.buckets import SPARSE_FLAG, lay_out, lay_out_one
from multiring._gradients.options import GradientOptions
from multiring._gradients.reductions import Reduction
from multiring._runtime import Group
from multiring.errors import StateError, UnsupportedError
from multiring.torch.gradients.bucket_tensors import TensorReductions, specs_of
from multiring.torch.gradients.device_buckets import on_host
from multiring.torch.gradients.parameter_gradient import ParameterGradient, TensorBucket
from multiring.torch.gradients.sparse_rows import Gathered
from multiring.torch.interop import array_of, in_one_piece

_WHAT = "DistributedOptimizer"
_MOVED = (
    "parameter {} is on {} now, and was on {} when the DistributedOptimizer was made, so its gradient has no place in "
    "a bucket: move the model first, then make the optimizer, and then the DistributedOptimizer, on every rank"
)


class GradientWatch(Protocol):
    """An observer of dense gradients before and after their reduction."""

    def begin(self) -> None:
        """Start to observe a reduction; discard the observations of an unfinished one."""

    def see_own(self, gradients: Sequence[Tensor]) -> None:
        """Observe some of this rank's gradients, before their reduction."""

    def see_whole(self, gradients: Sequence[Tensor]) -> None:
        """Observe all reduced gradients."""


class BucketAssignment(BucketOrder[ParameterGradient]):
    """The buckets of some parameters' gradients."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor]],
        group: Group,
        options: GradientOptions,
        reductions: TensorReductions,
        together: Sequence[Sequence[int]],
    ) -> None:
        """Lay out the buckets; the arguments are those of AutogradReducer."""
        names = [name for name, _ in parameters]
        super().__init__(_WHAT, FirstSteps(_WHAT, group, names, self._values))
        self._group = group
        self._stays_dense = options.sparse_as_dense
        self._reductions = reductions
        self._tensors = [parameter for _, parameter in parameters]
        self.gradients: list[ParameterGradient] = []
        for layout in lay_out(specs_of(self._tensors), options.bucket_bytes, together):
            bucket = TensorBucket(reductions.dense(layout, [self._tensors[index] for index in layout.members]), [])
            for member, (index, view) in enumerate(zip(layout.members, bucket.reduction.places, strict=True)):
                bucket.gradients.append(ParameterGradient(names[index], bucket, member, self._tensors[index], view))
            self.buckets.append(bucket)
            self.gradients += bucket.gradients
        self.watch: GradientWatch | None = None  # the observer of the current round
        self.moved = ""  # which parameter was moved to another device since; "" if none was
        self._told: list[NDArray[np.int64]] = []  # this rank's data for first-step checks that have not run yet
        self.sparse: list[ParameterGradient] = []  # the gradients that all ranks treat as sparse
        self._moves: list[tuple[int, list[ParameterGradient]]] = []  # gradients to move out when a round begins

    def _values(self) -> list[NDArray[Any]]:
        return [array_of(in_one_piece(each)) for each in on_host(self._tensors)]

    def clear(self) -> None:
        """Release the parameters and buckets."""
        self.gradients.clear()
        self.sparse.clear()
        self.buckets.clear()
        self._moves.clear()

    def learn_sparse(self) -> list[ParameterGradient]:
        """Return the gradients that were sparse on any rank for the first time; the result is the same on all ranks."""
        return self._learned([bucket.reduction for bucket in self.buckets], self._group)

    def begin(self) -> None:
        """Begin a step; see `BucketOrder`. If a parameter was moved to another device, this rank adds only zeros."""
        super().begin()
        found = next((each for each in self.gradients if each.parameter.device != each.device), None)
        self.moved = "" if found is None else _MOVED.format(found.name, found.parameter.device, found.device)

    @property
    def compares(self) -> bool:
        """Whether this rank wants all ranks to compare; they then also report models that were moved."""
        return bool(self.moved) or self.first_steps.wants

    def see(self, bucket: TensorBucket) -> None:
        """Observe a bucket that is about to start, for the first-step check and the observer of the round."""
        if isinstance(bucket.reduction, Gathered):
            return
        if self.first_steps.wants and not self.moved:
            self.first_steps.see(
                array_of(in_one_piece(each)) for each in on_host([each.view for each in bucket.gradients])
            )
        if self.watch is not None:
            self.watch.see_own([entry.view for entry in bucket.gradients])

    def zero(self, bucket: TensorBucket) -> None:
        """Set the gradients of a bucket to zero."""
        if not isinstance(bucket.reduction, Gathered):
            for place in bucket.reduction.places:
                place.zero_()
        for entry in bucket.gradients:
            entry.is_reduced = False

    def note_wishes(self) -> None:
        """Record this rank's data for `compare_noted`, if any rank wants to compare.

        The ranks cannot compare at once: at the end of a backward, other gradient reducers may wait for the ranks in
        another order.
        """
        if any_compares(bucket.reduction for bucket in self.buckets):
            self._told.append(self.first_steps.told())

    def compare_noted(self) -> None:
        """Compare the ranks' first steps, if any rank asked for this.

        Raises:
            CollectiveError: the ranks' parameters differ, or a rank has failed. Every rank raises it.
        """
        told, self._told = self._told, []
        with suppress(StateError):  # this process has left the job of these ranks
            for each in told:
                self._meet(each)

    def compare(self, reductions: Sequence[Reduction], told: NDArray[np.int64]) -> None:
        """Compare the ranks' first steps, if any rank asked for this when these `reductions` started."""
        if any_compares(reductions):
            self._meet(told)

    def _meet(self, told: NDArray[np.int64]) -> None:
        with internal_errors(_WHAT):
            # The twin's group has its own order of operations: one rank may compare before the next round starts,
            # another rank after it.
            group = self._group.twin_for("first steps")
            with reporting_errors(group, _WHAT):
                if self.moved:
                    raise UnsupportedError(self.moved)  # a StateError says that this process has left the job
            require_alike(group, _WHAT, [])
            self.first_steps.meet(told, group)

    def learn_later(self, number: int, reductions: Sequence[Reduction]) -> None:
        """Find newly sparse gradients in the `reductions` of round `number`; the next round may be in progress.

        These gradients move out of their buckets when round `number + 2` begins. This is the same round on all ranks.
        """
        # The twin's group has its own order of operations: one rank may call this before the next round starts, another
        # rank after it.
        found = self._learned(reductions, self._group.twin_for("sparse gradients"))
        if found:
            self._moves.append((number + 2, found))

    def move_due(self, number: int) -> None:
        """Move out the gradients that are due when round `number` begins."""
        while self._moves and self._moves[0][0] <= number:
            self.move_out(self._moves.pop(0)[1])

    def _learned(self, reductions: Sequence[Reduction], group: Group) -> list[ParameterGradient]:
        if not any(reduction.flags[SPARSE_FLAG] for reduction in reductions):
            return []
        came = np.array([entry.came_sparse for entry in self.gradients], np.uint8)
        group.all_reduce(came, "max")
        found = [entry for entry, is_sparse in zip(self.gradients, came, strict=True) if is_sparse]
        for entry in found:
            entry.is_sparse, entry.came_sparse = True, False
            entry.bucket.has_news = False
        self.sparse += found
        return found

    def move_out(self, found: Sequence[ParameterGradient]) -> None:
        """Gather the rows of these gradients from now on, unless the options ask for dense transport."""
        if self._stays_dense:
            return
        for bucket in dict.fromkeys(entry.bucket for entry in found):
            rest = [entry for entry in bucket.gradients if entry not in found]
            gathered = [entry for entry in bucket.gradients if entry in found]
            parts = [self._bucket_of(rest)] if rest else []
            parts += [self._settle([entry], self._reductions.rows(entry.parameter)) for entry in gathered]
            at = self.buckets.index(bucket)
            self.buckets[at : at + 1] = parts

    def _bucket_of(self, gradients: list[ParameterGradient]) -> TensorBucket:
        """Return a new bucket for these gradients of one type, with their current contents."""
        parameters = [entry.parameter for entry in gradients]
        return self._settle(gradients, self._reductions.dense(lay_out_one(specs_of(parameters)), parameters))

    def _settle(self, gradients: list[ParameterGradient], reduction: Reduction) -> TensorBucket:
        bucket = TensorBucket(reduction, gradients)
        for member, (entry, view) in enumerate(zip(gradients, reduction.places, strict=True)):
            gradient = entry.parameter.grad
            if gradient is not None and gradient.layout is torch.strided and entry.lies_in_place(gradient):
                entry.parameter.grad = entry.handed_out(view.copy_(entry.view))
            entry.view, entry.bucket, entry.member = view, bucket, member
        return bucket
