"""Where the tensors of a group lie: one pass over them, as fetching each from memory is most of what that costs."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from multiring._native import Footprint as NativeFootprint


class TensorLayout(Protocol):
    """Tensors of one type in host memory, each row by row: which objects they are, and where each of them lies."""

    @property
    def address(self) -> int:
        """Of the first of them."""

    @property
    def form(self) -> Hashable:
        """Equal for tensors that lie to each other alike, wherever the first one is."""

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these are the same objects, and lie as they did."""


@dataclass(frozen=True, slots=True)
class PlainTensorLayout:
    """The same without DLPack's table of C functions, which torch has from 2.10 on: what NativeFootprint must equal."""

    address: int
    form: Hashable
    ids: tuple[int, ...]
    kept: Hashable

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "PlainTensorLayout | None":
        """Return where `tensors` lie; None unless all are of one type, and row by row in host memory."""
        try:
            kinds = {(tensor.dtype, tensor.layout, tensor.is_cpu) for tensor in tensors}
        except AttributeError:  # no tensors
            return None
        if len(kinds) != 1 or next(iter(kinds))[1:] != (torch.strided, True):
            return None
        if not all(map(Tensor.is_contiguous, tensors)):
            return None
        start = tensors[0].data_ptr()
        form = tensors[0].dtype, tuple([(tensor.data_ptr() - start, tensor.shape) for tensor in tensors])
        return cls(start, form, tuple(map(id, tensors)), _positions(tensors))

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these are the same objects, and lie as they did."""
        return tuple(map(id, tensors)) == self.ids and _positions(tensors) == self.kept


def tensor_layout_of(tensors: Sequence[Tensor]) -> TensorLayout | None:
    """Return where `tensors`, a list or tuple, lie; None unless all are of one type, and row by row in host memory."""
    if hasattr(Tensor, "__dlpack_c_exchange_api__"):
        return NativeFootprint.of(tensors, Tensor)
    return PlainTensorLayout.of(tensors)


def _positions(tensors: Sequence[Tensor]) -> Hashable:
    return tuple([(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors])
