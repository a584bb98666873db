"""Where each gradient is reduced: its slot and its bucket, and how both change once it is known to be sparse."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from multiring.gradients.buckets import SPARSE_FLAG, lay_out, lay_out_one
from multiring.gradients.options import Options
from multiring.gradients.reductions import Reduction
from multiring.runtime import Group
from multiring.torch.bucket_tensors import TensorReductionOf, specs_of
from multiring.torch.optimizer.parameter_gradient import Bucket, ParameterGradient
from multiring.torch.optimizer.sparse_rows import Gathered


class BucketAssignment:
    """The slots and buckets of some parameters; `buckets` are in the order in which they start."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor]],
        group: Group,
        options: Options,
        reduction_of: TensorReductionOf,
        together: Sequence[Sequence[int]],
    ) -> None:
        """As for GradientReducer."""
        self._group = group
        self._op = options.op
        self._stays_dense = options.sparse_as_dense
        self._reduction_of = reduction_of
        self.buckets: list[Bucket] = []
        self.gradients: list[ParameterGradient] = []
        for layout in lay_out(specs_of([parameter for _, parameter in parameters]), options.bucket_bytes, together):
            named = [parameters[index] for index in layout.members]
            bucket = Bucket(reduction_of(layout, [parameter for _, parameter in named]), [])
            for member, ((name, parameter), view) in enumerate(zip(named, bucket.reduction.places, strict=True)):
                bucket.gradients.append(ParameterGradient(name, parameter, view, bucket, member))
            self.buckets.append(bucket)
            self.gradients += bucket.gradients
        self.sparse: list[ParameterGradient] = []  # those that all ranks know to be
        self._moves: list[tuple[int, list[ParameterGradient]]] = []  # those to move out, from a round on

    def clear(self) -> None:
        """Let go of the parameters."""
        self.gradients.clear()
        self.sparse.clear()
        self.buckets.clear()
        self._moves.clear()

    def learn_sparse(self) -> list[ParameterGradient]:
        """Return those whose gradients came as sparse ones, on any rank, and were not known to; all ranks know then."""
        return self._learned([bucket.reduction for bucket in self.buckets], self._group)

    def learn_later(self, number: int, reductions: Sequence[Reduction]) -> None:
        """Learn the same of the round `number`, which `reductions` were, while the next one may be on its way.

        What was found moves out where the round after that one begins, on all ranks alike, whenever each comes to it.
        """
        # In an order of its own: one rank may learn before it starts the next round, and another after that.
        found = self._learned(reductions, self._group.twin_for("sparse gradients"))
        if found:
            self._moves.append((number + 2, found))

    def begin(self, number: int) -> None:
        """Move out what is due as the round `number` begins."""
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
        """Have these gradients gathered from now on, unless they are to stay dense on their way."""
        if self._stays_dense:
            return
        for bucket in dict.fromkeys(entry.bucket for entry in found):
            rest = [entry for entry in bucket.gradients if entry not in found]
            gathered = [entry for entry in bucket.gradients if entry in found]
            parts = [self._bucket_of(rest)] if rest else []
            parts += [self._settle([entry], Gathered(self._group, self._op, entry.parameter)) for entry in gathered]
            at = self.buckets.index(bucket)
            self.buckets[at : at + 1] = parts

    def _bucket_of(self, gradients: list[ParameterGradient]) -> Bucket:
        """Return a bucket with places of their own for these, which are of one type, and what they hold."""
        parameters = [entry.parameter for entry in gradients]
        return self._settle(gradients, self._reduction_of(lay_out_one(specs_of(parameters)), parameters))

    def _settle(self, gradients: list[ParameterGradient], reduction: Reduction) -> Bucket:
        bucket = Bucket(reduction, gradients)
        for member, (entry, view) in enumerate(zip(gradients, reduction.places, strict=True)):
            gradient = entry.parameter.grad
            if gradient is not None and gradient.layout is torch.strided and entry.lies_in_place(gradient):
                entry.parameter.grad = entry.handed_out(view.copy_(entry.view))
            entry.view, entry.bucket, entry.member = view, bucket, member
        return bucket
