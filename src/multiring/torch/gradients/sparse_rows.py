"""Sparse gradients: the rows that they have, gathered from all ranks.

A gradient that is sparse, such as an embedding's, says which rows of the parameter it has, and what they are. Each rank
adds up its own rows of one number, all ranks gather all rows, and each adds up those of one number again, in the order
of ranks: so all get the same bits.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from multiring.gradients.buckets import MORE_FLAGS
from multiring.gradients.reductions import CompressionState
from multiring.runtime import Group
from multiring.torch.interop import allocate, array_of, tensor_of


class Gathered:
    """One parameter's gradient, as the rows it has; see `Reduction`.

    Its place is none, only of the right shape and type: gradients are brought.
    """

    def __init__(self, group: Group, op: str, parameter: Tensor) -> None:
        self._group = group
        self._op = op
        self._parameter = parameter
        self._flags = allocate(group, 1 + MORE_FLAGS, torch.uint8)
        self.flags = self._flags.array
        self.places = [torch.empty((), dtype=parameter.dtype).expand(parameter.shape)]
        self._own: Tensor | None = None
        self.sent_bytes = int(self.flags.nbytes)
        self.gradient: Tensor | None = None  # what the last reduction made of it

    def bring(self, gradient: Tensor | None) -> None:
        """Take this rank's gradient, dense or sparse, for the reduction that comes; None where it has none."""
        self._own = gradient

    def start(self) -> Callable[[], object]:
        """Start to reduce; return what waits until `gradient` is that of all ranks, and `flags` are, or raises."""
        shape, dtype = self.places[0].shape, self.places[0].dtype
        own = _sparse(torch.empty(0, dtype=torch.int64), torch.empty(0, *shape[1:], dtype=dtype), shape)
        rows = rows_of(own if self._own is None else self._own.detach())
        self._own = None
        indices, values = rows.indices()[0].contiguous(), rows.values().contiguous()
        self.sent_bytes = int(self.flags.nbytes) + indices.nbytes + values.nbytes
        flags = self._group.all_reduce_async(self.flags, "max")
        all_indices = self._group.all_gather_async(array_of(indices))
        all_values = self._group.all_gather_async(array_of(values).reshape(len(indices), math.prod(shape[1:])))

        def wait() -> None:
            flags.wait()
            found = tensor_of(all_indices.wait(), torch.int64)
            gathered = tensor_of(all_values.wait(), dtype).view(len(found), *shape[1:])
            divisor = self._group.size if self._op == "average" else 1
            self.gradient = _added_up(found, gathered, shape, divisor) if self.flags[0] else None

        return wait

    def state(self, _member: int) -> CompressionState:
        """Return a copy of what is carried on for `member`; not while a reduction is going on."""
        return CompressionState()

    def load_state(self, _member: int, _state: CompressionState) -> None:
        """Carry `state` on, as far as this reduction has use for it, in place of its own; of fitting shapes."""

    def twin(self) -> "Gathered":
        """See `Reduction.twin`."""
        return Gathered(self._group, self._op, self._parameter)


def rows_of(gradient: Tensor) -> Tensor:
    """Return a gradient, dense or sparse, as rows: sparse in its first dimension, each row once, in order."""
    if gradient.layout != torch.strided and gradient.sparse_dim() != 1:
        gradient = gradient.to_dense()
    return gradient.to_sparse(1) if gradient.layout == torch.strided else gradient.coalesce()


def _added_up(indices: Tensor, values: Tensor, shape: torch.Size, divisor: int) -> Tensor:
    # 16-bit numbers are added up in 32 bits, and rounded once.
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    whole = _sparse(indices, wide, shape).coalesce()
    return _sparse(whole.indices()[0], (whole.values() / divisor).to(values.dtype), shape).coalesce()


def _sparse(indices: Tensor, rows: Tensor, shape: torch.Size) -> Tensor:
    # Said explicitly, as torch warns of a default that may change.
    return torch.sparse_coo_tensor(indices.unsqueeze(0), rows, shape, check_invariants=False)
