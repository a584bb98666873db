"""One parameter's gradient, and the bucket it travels in.

The place of a gradient in its bucket is never handed out. `.grad` becomes another tensor of the same memory, and may
be given other memory at any time: whether it still lies in its place is asked of the memory, each time.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from multiring.errors import StateError, UnsupportedError
from multiring.gradients.buckets import COMPARES_FLAG, SPARSE_FLAG, TRAINS_FLAG
from multiring.gradients.reductions import Reduction
from multiring.torch.gradients.sparse_rows import Gathered
from multiring.torch.interop import apart, described, is_same_memory, touches


@dataclass(slots=True, eq=False)
class ParameterGradient:
    """One parameter's gradient."""

    name: str
    parameter: Tensor
    view: Tensor  # its place in the bucket, with the parameter's shape and order of strides; nobody else has it
    bucket: "Bucket"
    member: int  # its number in the bucket
    has_arrived: bool = False  # in the backward that is going on
    is_reduced: bool = False  # what is in its place came out of a reduction
    is_sparse: bool = False  # on some rank it came as a sparse one; the same on all ranks
    came_sparse: bool = False  # since the last reduction, and the ranks do not know yet
    early_sum: Tensor | None = None  # what a reduction made of it before its group of backwards was complete
    rows: Tensor | None = None  # the sparse tensor that the last reduction made `.grad`
    brought: Tensor | None = None  # `.grad`, a copy of which is on its way, where nobody waits for that yet
    _out: dict[int, Tensor] = field(default_factory=dict)  # what was handed out last, by the address of the place

    def handed_out(self, place: Tensor) -> Tensor:
        """Return what may be `.grad`, of the memory of `place`, which is this parameter's in some bucket."""
        found = self._out.get(place.data_ptr())
        if found is None or not is_same_memory(found, place):
            if len(self._out) > 1:  # a bucket and its twin have one each; others are of buckets that are no more
                self._out.clear()
            found = self._out[place.data_ptr()] = apart(place)
        return found

    def lies_in_place(self, gradient: Tensor) -> bool:
        """Return whether `gradient`, a dense one, is in the memory that the ranks reduce."""
        return is_same_memory(gradient, self.view)

    def holds(self, gradient: Tensor | None) -> bool:
        """Return whether `gradient` is what a reduction made `.grad`, or has been added to that.

        It is so also where the program has given that tensor other memory since, as by `p.grad.data = ...`.
        """
        if gradient is None:
            return False
        if gradient is self.rows or any(gradient is each for each in self._out.values()):
            return True
        return gradient.layout is torch.strided and self.lies_in_place(gradient)

    def take_in(self, gradient: Tensor, *, hands_out: bool) -> None:
        """Put a gradient that is not in its place yet there, and with `hands_out` make that place `.grad`.

        Raises:
            UnsupportedError: it is differentiable, or neither dense nor sparse COO.
            StateError: it is of another shape or type than the parameter had.
        """
        self.check(gradient)
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
            if not self.is_sparse:
                self.came_sparse = self.bucket.has_news = True
        elif touches(gradient, self.view):  # as one that was transposed in its place
            gradient = gradient.resolve_conj().resolve_neg().clone()
        self.view.copy_(gradient)
        if hands_out:
            self.parameter.grad = self.handed_out(self.view)

    def come_out(self) -> None:
        """Make what the reduction left in the place `.grad`, where any rank has such a gradient.

        Raises:
            StateError: `.grad` has been replaced since it was taken, so that it is this rank's own.
        """
        gradient = self.parameter.grad
        if gradient is None and self.bucket.reduction.flags[self.member]:
            self.parameter.grad = self.handed_out(self.view)
        elif (
            gradient is not None
            and not isinstance(self.bucket.reduction, Gathered)
            and (gradient.layout is not torch.strided or not self.lies_in_place(gradient))
        ):
            raise StateError(
                f"the gradient of {self.name} was replaced while backward ran, after it was on its way to the other "
                "ranks, as by a hook of the program's: want that hook before the DistributedOptimizer is made, or the "
                "change after backward"
            )
        self.is_reduced = self.parameter.grad is not None

    def hand_out_rows(self) -> None:
        """Make `.grad` sparse, of a reduced gradient that came as one."""
        reduction = self.bucket.reduction
        if isinstance(reduction, Gathered):
            self.parameter.grad = reduction.gradient
        elif self.parameter.grad is not None:
            self.parameter.grad = self.view.to_sparse(1)
        self.rows = self.parameter.grad
        self.is_reduced = self.rows is not None

    def check(self, gradient: Tensor) -> None:
        """Raise what `take_in` does."""
        if gradient.requires_grad:
            raise UnsupportedError(
                f"the gradient of {self.name} is itself differentiable (create_graph=True); that graph would be lost"
            )
        if gradient.layout is not torch.strided and gradient.layout is not torch.sparse_coo:
            kind = str(gradient.layout).removeprefix("torch.")
            raise UnsupportedError(f"the gradient of {self.name} is {kind}; want a dense or a sparse COO one")
        if gradient.shape != self.view.shape or gradient.dtype != self.view.dtype:
            raise StateError(
                f"the gradient of {self.name} is {described(gradient)}, but was {described(self.view)} when the "
                "DistributedOptimizer was made; make it anew on every rank"
            )


@dataclass(slots=True, eq=False)
class Bucket:
    """Gradients that are reduced together."""

    reduction: Reduction
    gradients: list[ParameterGradient]
    missing: int = 0  # gradients, in the backward that is going on
    has_news: bool = False  # that gradients came as sparse ones
    spare: Reduction | None = None  # the twin, whose gradients are on their way or in use

    def turn(self) -> None:
        """Let the next gradients be brought to the twin's places."""
        self.reduction, self.spare = self.spare or self.reduction.twin(), self.reduction
        for entry in self.gradients:
            entry.view = self.reduction.places[entry.member]

    def mark(self, *, trains: bool, compares: bool) -> None:
        """Set the flags that are not one member's; `compares` says whether ranks are to compare their first steps."""
        flags = self.reduction.flags
        flags[COMPARES_FLAG] = compares
        flags[SPARSE_FLAG] = self.has_news
        flags[TRAINS_FLAG] = trains
