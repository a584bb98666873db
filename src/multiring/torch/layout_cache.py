"""The memory layout of a group of tensors, found in one pass: most of the cost is to read each tensor object."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from multiring._native import Footprint as NativeFootprint


class TensorLayout(Protocol):
    """The identities and addresses of row-major tensors of one type in host memory."""

    @property
    def address(self) -> int:
        """The address of the first tensor."""

    @property
    def form(self) -> Hashable:
        """A key that is equal for groups with equal types, shapes and offsets from the first tensor."""

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether `tensors` are the same objects, with the same memory and shapes as before."""


@dataclass(frozen=True, slots=True)
class PlainTensorLayout:
    """A TensorLayout in Python, for torch before 2.10, which has no DLPack table of C functions.

    NativeFootprint must give equal results.
    """

    address: int
    form: Hashable
    ids: tuple[int, ...]
    kept: Hashable

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "PlainTensorLayout | None":
        """Return the layout of `tensors`; None unless all are row-major, of one type and in host memory."""
        try:
            kinds = {(tensor.dtype, tensor.layout, tensor.is_cpu) for tensor in tensors}
        except AttributeError:  # an element is not a tensor
            return None
        if len(kinds) != 1 or next(iter(kinds))[1:] != (torch.strided, True):
            return None
        if not all(map(Tensor.is_contiguous, tensors)):
            return None
        start = tensors[0].data_ptr()
        form = tensors[0].dtype, tuple([(tensor.data_ptr() - start, tensor.shape) for tensor in tensors])
        return cls(start, form, tuple(map(id, tensors)), _positions(tensors))

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether `tensors` are the same objects, with the same memory and shapes as before."""
        return tuple(map(id, tensors)) == self.ids and _positions(tensors) == self.kept


def tensor_layout_of(tensors: Sequence[Tensor]) -> TensorLayout | None:
    """Return the layout of a list or tuple of tensors.

    The result is None unless all tensors are row-major, of one type and in host memory.
    """
    if hasattr(Tensor, "__dlpack_c_exchange_api__"):
        return NativeFootprint.of(tensors, Tensor)
    return PlainTensorLayout.of(tensors)


def _positions(tensors: Sequence[Tensor]) -> Hashable:
    return tuple([(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors])
