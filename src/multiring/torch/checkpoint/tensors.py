"""torch's tensors in checkpoints: their bytes, and kinds that cannot be saved."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from multiring._frontend.checkpoint.arrays import Buffer, Kind, Outgoing, blocks_of, shown
from multiring.errors import ArgumentError
from multiring.torch.interop import dtype_name, is_one_piece
from multiring.torch.parallelizing.held import is_dtensor

_PLAIN = {Tensor, nn.Parameter, nn.Buffer} if hasattr(nn, "Buffer") else {Tensor, nn.Parameter}
_WIDER = {  # for each type, the types that can hold all of its values
    "bfloat16": {"float32", "float64"},
    "float16": {"float32", "float64"},
    "float32": {"float64"},
    "complex64": {"complex128"},
    "complex32": {"complex64", "complex128"},
    "bool": {"uint8", "int8", "int16", "int32", "int64"},
    "uint8": {"int16", "int32", "int64"},
    "int8": {"int16", "int32", "int64"},
    "int16": {"int32", "int64"},
    "int32": {"int64"},
}


def widens(kind: Any, dtype: torch.dtype) -> bool:
    """Return whether a tensor of `dtype` can hold every value of the file's type."""
    name = dtype_name(dtype)
    return bool(kind == name or name in _WIDER.get(str(kind), ()))


class TensorArrays:
    """Array functions for torch's tensors in checkpoints."""

    def is_array(self, value: Any) -> bool:
        """Return whether `value` is a tensor of any kind."""
        return isinstance(value, Tensor)

    def outgoing(self, array: Tensor, name: str) -> Outgoing:
        """Return a tensor's type, shape and bytes.

        Raise ArgumentError if the tensor cannot be saved.
        """
        whole = is_dtensor(array)
        if not whole:
            _refuse(array, name)
        kind, size = _kind(array.dtype, name), array.dtype.itemsize
        if whole:
            return Outgoing(kind, tuple(array.shape), size, lambda: _pieces(_gathered(array)), gathers=True)
        return Outgoing(kind, tuple(array.shape), size, lambda: _pieces(array))

    def empty(self, kind: Kind, shape: tuple[int, ...]) -> Tensor:
        """Return a new tensor with undefined contents."""
        dtype = getattr(torch, kind, None) if isinstance(kind, str) else None
        if not isinstance(dtype, torch.dtype):
            raise ArgumentError(
                f"the checkpoint has tensors of type {str(kind)[:80]!r}, which torch {torch.__version__} does not "
                "know: want the version that saved it"
            )
        return torch.empty(shape, dtype=dtype, device="cpu")

    def itemsize(self, array: Tensor) -> int:
        """Return the number of bytes of an element."""
        return array.dtype.itemsize

    def windows(self, array: Tensor) -> Iterator[memoryview]:
        """Yield buffers to write a tensor's bytes to, row by row.

        The tensor must satisfy `can_be_filled`.
        """
        if is_one_piece(array):
            yield _bytes_of(array)
            return
        scratch = _Scratch(array.dtype)
        for block in blocks_of(array.detach(), array.dtype.itemsize):
            filled = scratch.of(block.shape)
            yield _bytes_of(filled)
            block.copy_(filled)


def is_plain_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is dense and in host memory."""
    return type(tensor) in _PLAIN and tensor.layout == torch.strided and tensor.device.type == "cpu"


def has_plain_values(tensor: Tensor) -> bool:
    """Return whether a tensor is dense, and in host memory or on a CUDA device, so that it can be saved."""
    is_reached = tensor.device.type in {"cpu", "cuda"}
    return type(tensor) in _PLAIN and tensor.layout == torch.strided and is_reached


def can_be_filled(tensor: Tensor) -> bool:
    """Return whether a tensor's elements can be overwritten one by one.

    The tensor has to be in host memory, and no two of its elements may share memory.
    """
    if not is_plain_memory(tensor) or tensor.is_conj() or tensor.is_neg():
        return False
    extent = 1
    for stride, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if count > 1 and stride < extent:
            return False
        extent = max(extent, stride * count)
    return True


def placed_as(whole: Tensor, like: Tensor) -> Tensor:
    """Return `whole`, distributed like the DTensor `like`; nothing is sent.

    Every rank must have the same `whole` tensor.
    """
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415 -- the import takes a second

    placed: Tensor = distribute_tensor(
        whole.to(like.dtype),
        like.device_mesh,  # type: ignore[attr-defined]
        like.placements,  # type: ignore[attr-defined]
        src_data_rank=None,
    )
    return placed


def _gathered(array: Any) -> Tensor:
    whole: Tensor = array.detach().full_tensor()
    return whole.cpu()


def _refuse(array: Tensor, name: str) -> None:
    """Raise ArgumentError unless a tensor's elements can be saved."""
    kind, told = type(array), shown(name)
    if is_uninitialized(array):
        raise ArgumentError(
            f"{told} has no shape yet, because its module has processed no batch: run the module once before saving"
        )
    if kind not in _PLAIN:
        raise ArgumentError(
            f"{told} is a {kind.__name__}, a subclass of Tensor that would be loaded as a plain tensor: save "
            "the tensors that it consists of"
        )
    if array.is_nested:
        raise ArgumentError(f"{told} is a nested tensor: save its tensors, as in value.unbind()")
    if array.layout != torch.strided:
        layout = str(array.layout).removeprefix("torch.")
        raise ArgumentError(f"{told} is {layout}: save its indices and values, or value.to_dense()")
    if array.is_quantized:
        raise ArgumentError(f"{told} is quantized: save value.int_repr(), its scale and its zero point")
    if array.is_meta:
        raise ArgumentError(
            f"{told} is on meta and has no values: call to_empty(device='cpu') and set the values first"
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(array):  # noqa: SLF001 -- torch has no other way to ask
        raise ArgumentError(
            f"{told} is a tensor inside a transformation such as vmap: save outside of the transformation"
        )


def _kind(dtype: torch.dtype, name: str) -> str:
    kind = dtype_name(dtype)
    if getattr(torch, kind, None) is not dtype or kind.startswith(("bits", "quint", "qint")):
        raise ArgumentError(f"{shown(name)} is of type {kind}, whose elements cannot be saved: want another type")
    return kind


def _pieces(array: Tensor) -> Iterator[Buffer]:
    with torch.no_grad():
        array = array.detach()
        if array.device.type == "cpu" and is_one_piece(array):
            if array.numel():
                yield _bytes_of(array)
            return
        scratch = _Scratch(array.dtype)
        for block in blocks_of(array, array.dtype.itemsize):
            yield _bytes_of(scratch.of(block.shape).copy_(block))


class _Scratch:
    """Memory that every block reuses. New memory for each block could fragment the heap."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._memory = torch.empty(0, dtype=dtype, device="cpu")

    def of(self, shape: torch.Size) -> Tensor:
        """Return memory of this shape. Writing to it overwrites the previous block."""
        if self._memory.numel() < shape.numel():
            self._memory = torch.empty(shape.numel(), dtype=self._memory.dtype, device="cpu")
        return self._memory[: shape.numel()].view(shape)


def _bytes_of(array: Tensor) -> memoryview:
    if not array.numel():
        return memoryview(bytearray())
    # A tensor of one element may have any stride, but a view as bytes accepts only some strides.
    flat = array.detach().as_strided((array.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def is_uninitialized(tensor: Tensor) -> bool:
    """Return whether a tensor of a lazy module has no shape yet."""
    return isinstance(tensor, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer)
