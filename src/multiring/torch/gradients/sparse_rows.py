"""Sparse gradients: the ranks gather the rows of all ranks.

A sparse gradient, such as an embedding's, has the numbers and the values of some of the parameter's rows. Each rank
adds up its own rows of the same number. All ranks then gather all rows, and add up rows of the same number in the order
of ranks. All ranks therefore get the same bits.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from multiring._gradients.buckets import MORE_FLAGS
from multiring._gradients.reductions import CompressionState
from multiring._runtime import Group
from multiring.torch.interop import allocate, array_of, tensor_of


class Gathered:
    """The reduction of one parameter's gradient by its rows; see `Reduction`.

    `places` has the right shape and type, but no memory for a gradient. Pass the gradient to `bring` instead.
    """

    def __init__(self, group: Group, op: str, parameter: Tensor) -> None:
        self._group = group
        self._op = op
        self._parameter = parameter
        self._flags = allocate(group, 1 + MORE_FLAGS, torch.uint8)
        self.flags = self._flags.array
        self.places = [torch.empty((), dtype=parameter.dtype, device="cpu").expand(parameter.shape)]
        self._own: Tensor | None = None
        self.sent_bytes = int(self.flags.nbytes)
        self.gradient: Tensor | None = None  # the result of the last reduction

    def bring(self, gradient: Tensor | None) -> None:
        """Set this rank's gradient, dense or sparse, for the next reduction; None if this rank has no gradient."""
        self._own = gradient

    def start(self) -> Callable[[], object]:
        """Start to reduce; return a function that waits until `gradient` and `flags` hold the reduced values."""
        shape, dtype = self.places[0].shape, self.places[0].dtype
        nowhere = torch.empty(0, dtype=torch.int64, device="cpu")
        own = _sparse(nowhere, torch.empty(0, *shape[1:], dtype=dtype, device="cpu"), shape)
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
        """Return an empty state: this reduction keeps nothing from step to step."""
        return CompressionState()

    def load_state(self, _member: int, _state: CompressionState) -> None:
        """Ignore the state: this reduction keeps nothing from step to step."""

    def twin(self) -> "Gathered":
        """See `Reduction.twin`."""
        return Gathered(self._group, self._op, self._parameter)


def rows_of(gradient: Tensor) -> Tensor:
    """Return a dense or sparse gradient as a sparse tensor of rows; each row occurs once, in ascending order."""
    if gradient.layout != torch.strided and gradient.sparse_dim() != 1:
        gradient = gradient.to_dense()
    return gradient.to_sparse(1) if gradient.layout == torch.strided else gradient.coalesce()


def _added_up(indices: Tensor, values: Tensor, shape: torch.Size, divisor: int) -> Tensor:
    # Add up 16-bit numbers in 32 bits, so that they are rounded only once.
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    whole = _sparse(indices, wide, shape).coalesce()
    return _sparse(whole.indices()[0], (whole.values() / divisor).to(values.dtype), shape).coalesce()


def _sparse(indices: Tensor, rows: Tensor, shape: torch.Size) -> Tensor:
    # torch warns that the default of check_invariants may change, so the argument is explicit.
    return torch.sparse_coo_tensor(indices.unsqueeze(0), rows, shape, check_invariants=False)
