"""Compression: the form in which tensors travel.

A compressor is used in one of two ways. In general, its `compress` makes a tensor of a narrower type before the
reduction, as in Horovod. For sums and averages of float32, the Group instead compresses only the data between hosts, to
the compressor's `wire` type. Sums within a host are then computed in float32, and no number is rounded twice.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from multiring._frontend.compression_names import NAMES, Compressor, NoneCompressor
from multiring._runtime import quantize_dequantize
from multiring._schedule import WIRES


class _NarrowFloat(Compressor):
    """Floating-point tensors travel in a narrower type, other tensors unchanged."""

    _dtype: ClassVar[torch.dtype]

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return `tensor` in the narrower type, and its original type."""
        narrow = tensor.dtype.is_floating_point and tensor.dtype.itemsize > cls._dtype.itemsize
        return (tensor.to(cls._dtype) if narrow else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return `tensor` in its original type."""
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class FP16Compressor(_NarrowFloat):
    """Floating-point tensors travel as float16."""

    _dtype = torch.float16
    wire = "fp16"


class BF16Compressor(_NarrowFloat):
    """Floating-point tensors travel as bfloat16, which keeps float32's range."""

    _dtype = torch.bfloat16
    wire = "bf16"


class _WireCompressor(Compressor):
    """Tensors of float32 travel between hosts in the wire type, other tensors unchanged."""

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        """Encode `tensor`, and return it decoded to float32, because sums of encoded numbers would overflow."""
        if tensor.dtype != torch.float32 or not (tensor.is_cpu or tensor.is_cuda):
            return tensor, None
        # A tensor of a device is encoded on the host. The caller's thread waits for the device.
        decoded = quantize_dequantize(tensor.detach().cpu().contiguous().numpy(), cls.wire)
        return torch.from_numpy(decoded).view(tensor.shape).to(tensor.device), None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:  # noqa: ARG004 -- part of the interface
        """Return `tensor`."""
        return tensor


class Int8Compressor(_WireCompressor):
    """Tensors of float32 travel between hosts as 8-bit integers with scales, other tensors unchanged."""

    wire = "int8"


class Compression:
    """The compressors by name, for `compression=`. A call also takes a name, such as "bf16"."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor


for _name in set(WIRES) - set(vars(Compression)):  # a wire type without a compressor of its own
    setattr(Compression, _name, type(f"{_name.capitalize()}Compressor", (_WireCompressor,), {"wire": _name}))


def compressor_of(compression: Any) -> Any:
    """Return the compressor for a value of `compression=`: a name becomes the member of Compression; None its `none`.

    A value that is neither a name nor a compressor is returned for `require_compressor`, which refuses it.
    """
    if compression is None:
        return Compression.none
    is_name = isinstance(compression, str) and compression in NAMES
    return getattr(Compression, compression) if is_name else compression


def option_of(compression: Any) -> Any:
    """Return `compression` in the form for `GradientOptions`: None for Compression.none."""
    compression = compressor_of(compression)
    return None if compression is Compression.none else compression
