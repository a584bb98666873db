"""One parameter's gradient, and the bucket it travels in."""

from dataclasses import dataclass

import torch
from torch import Tensor

from multiring.errors import StateError, UnsupportedError
from multiring.gradients.buckets import SPARSE_FLAG, TRAINS_FLAG
from multiring.gradients.reductions import Reduction
from multiring.torch.interop import described
from multiring.torch.optimizer.sparse_rows import Gathered


@dataclass(slots=True, eq=False)
class ParameterGradient:
    """One parameter's gradient."""

    name: str
    parameter: Tensor
    view: Tensor  # its place in the bucket, with the parameter's shape and order of strides
    bucket: "Bucket"
    member: int  # its number in the bucket
    has_arrived: bool = False  # in the backward that is going on
    is_reduced: bool = False  # what is in its place came out of a reduction
    is_sparse: bool = False  # on some rank it came as a sparse one; the same on all ranks
    came_sparse: bool = False  # since the last reduction, and the ranks do not know yet
    early_sum: Tensor | None = None  # what a reduction made of it before its group of backwards was complete
    rows: Tensor | None = None  # the sparse tensor that the last reduction made `.grad`
    brought: Tensor | None = None  # `.grad`, a copy of which is on its way, where nobody waits for that yet

    def holds(self, gradient: Tensor | None) -> bool:
        """Return whether `gradient` is what a reduction made `.grad`, or has been added to that."""
        return gradient is not None and (gradient is self.view or gradient is self.rows)

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
        self.view.copy_(gradient)
        if hands_out:
            self.parameter.grad = self.view

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

    def mark(self, *, trains: bool) -> None:
        """Set the flags that are not one member's."""
        flags = self.reduction.flags
        flags[SPARSE_FLAG] = self.has_news
        flags[TRAINS_FLAG] = trains
