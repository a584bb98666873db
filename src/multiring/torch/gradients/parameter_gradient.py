"""One parameter's gradient, and its bucket.

The tensor of a gradient's place in its bucket is never handed out. `.grad` becomes another tensor of the same memory,
and the program may give that tensor other memory at any time. Each check therefore compares the memory.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from multiring._gradients.bucket_order import Bucket, BucketMember
from multiring.errors import StateError, UnsupportedError
from multiring.torch.gradients.sparse_rows import Gathered
from multiring.torch.interop import apart, described, is_same_memory, touches


@dataclass(slots=True, eq=False)
class ParameterGradient(BucketMember):
    """One parameter's gradient."""

    parameter: Tensor
    view: Tensor  # `place`, with the parameter's shape and stride order; never handed out
    is_reduced: bool = False  # the place holds the result of a reduction
    is_sparse: bool = False  # the gradient was sparse on some rank; the same value on all ranks
    came_sparse: bool = False  # the gradient was sparse here since the last reduction; the other ranks are not informed
    early_sum: Tensor | None = None  # the result of a reduction before the group of backwards was complete
    rows: Tensor | None = None  # the sparse tensor that the last reduction assigned to `.grad`
    brought: Tensor | None = None  # the `.grad` whose copy is being reduced in a delayed round
    device: torch.device = field(init=False)  # where the gradient's place is
    _out: dict[int, Tensor] = field(default_factory=dict)  # the tensors handed out last, by the address of the place

    def __post_init__(self) -> None:
        self.device = self.parameter.device

    def handed_out(self, place: Tensor) -> Tensor:
        """Return a tensor for `.grad` in the memory of `place`, this parameter's place in a bucket."""
        found = self._out.get(place.data_ptr())
        if found is None or not is_same_memory(found, place):
            if len(self._out) > 1:  # a bucket and its twin have one each; the others belong to discarded buckets
                self._out.clear()
            found = self._out[place.data_ptr()] = apart(place)
        return found

    def lies_in_place(self, gradient: Tensor) -> bool:
        """Return whether the dense tensor `gradient` is in the memory that the ranks reduce."""
        return is_same_memory(gradient, self.view)

    def holds(self, gradient: Tensor | None) -> bool:
        """Return whether `gradient` is the tensor that a reduction assigned to `.grad`, perhaps with additions.

        This is also true if the program has given that tensor other memory since, for example by `p.grad.data = ...`.
        """
        if gradient is None:
            return False
        if gradient is self.rows or any(gradient is each for each in self._out.values()):
            return True
        return gradient.layout is torch.strided and self.lies_in_place(gradient)

    def take_in(self, gradient: Tensor, *, hands_out: bool) -> None:
        """Copy `gradient` to its place in the bucket; with `hands_out`, make `.grad` this place.

        Raises:
            UnsupportedError: the gradient is differentiable, or neither dense nor sparse COO.
            StateError: the gradient's shape or type differs from the parameter's.
        """
        self.check(gradient)
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
            if not self.is_sparse:
                self.came_sparse = self.bucket.has_news = True
        elif touches(gradient, self.view):  # for example, a transposed view of the place
            gradient = gradient.resolve_conj().resolve_neg().clone()
        self.view.copy_(gradient)
        if hands_out:
            self.parameter.grad = self.handed_out(self.view)

    def come_out(self) -> None:
        """Make `.grad` the reduced gradient, if any rank has this gradient.

        Raises:
            StateError: the program replaced `.grad` after its reduction had started.
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
                f"the gradient of {self.name} was replaced while backward ran, after its reduction had started, "
                "for example by a hook of the program: register that hook before the DistributedOptimizer is made, or "
                "change the gradient after backward"
            )
        self.is_reduced = self.parameter.grad is not None

    def hand_out_rows(self) -> None:
        """Make `.grad` the sparse form of a reduced gradient that arrived sparse."""
        reduction = self.bucket.reduction
        if isinstance(reduction, Gathered):
            self.parameter.grad = reduction.gradient
        elif self.parameter.grad is not None:
            self.parameter.grad = self.view.to_sparse(1)
        self.rows = self.parameter.grad
        self.is_reduced = self.rows is not None

    def check(self, gradient: Tensor) -> None:
        """Raise the errors of `take_in` if `gradient` is unsuitable."""
        if gradient.requires_grad:
            raise UnsupportedError(
                f"the gradient of {self.name} is itself differentiable (create_graph=True); that graph would be lost"
            )
        if gradient.layout is not torch.strided and gradient.layout is not torch.sparse_coo:
            kind = str(gradient.layout).removeprefix("torch.")
            raise UnsupportedError(f"the gradient of {self.name} is {kind}; want a dense or sparse COO gradient")
        if gradient.shape != self.view.shape or gradient.dtype != self.view.dtype:
            raise StateError(
                f"the gradient of {self.name} is {described(gradient)}, but was {described(self.view)} when the "
                "DistributedOptimizer was made; make it anew on every rank"
            )


TensorBucket = Bucket[ParameterGradient]


def turn(bucket: TensorBucket) -> None:
    """Switch to the bucket's twin reduction; the next gradients go to its places."""
    bucket.reduction, bucket.spare = bucket.spare or bucket.reduction.twin(), bucket.reduction
    for entry in bucket.gradients:
        entry.view = entry.place
