"""Compression: in what form tensors travel.

Of Horovod's and multiring's compressors the wire types are the same things: `compress` gives a tensor in a narrower
type, as Horovod does, and where a Group can code by itself what crosses hosts, `wire` is the name of that: sums within
a host are then still those of float32, and nothing is rounded twice.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from multiring.runtime import round_trip


class Compressor:
    """How a tensor is compressed before it is reduced, and decompressed afterwards; anybody may add one."""

    wire: ClassVar[str | None] = None
    """The wire type by which sums and averages of float32 travel between hosts instead, where there is one."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return `tensor` compressed, and what `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return `tensor`, which `compress` or a sum of such gave, in its first form."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Tensors travel as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return `tensor`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:  # noqa: ARG004 -- of the contract
        """Return `tensor`."""
        return tensor


class _NarrowFloat(Compressor):
    """Floating-point tensors travel in a narrower type, others as they are."""

    _dtype: ClassVar[torch.dtype]

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return `tensor` in the narrower type, and its own."""
        narrow = tensor.dtype.is_floating_point and tensor.dtype.itemsize > cls._dtype.itemsize
        return (tensor.to(cls._dtype) if narrow else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return `tensor` in the type it had."""
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class FP16Compressor(_NarrowFloat):
    """Floating-point tensors travel as float16."""

    _dtype = torch.float16
    wire = "fp16"


class BF16Compressor(_NarrowFloat):
    """Floating-point tensors travel as bfloat16, which keeps float32's range."""

    _dtype = torch.bfloat16
    wire = "bf16"


class Int8Compressor(Compressor):
    """Tensors of float32 travel between hosts as 8-bit integers with scales, others as they are."""

    wire = "int8"

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what a wire makes of `tensor`, which is still float32: sums of 8-bit integers would overflow."""
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            return tensor, None
        return torch.from_numpy(round_trip(tensor.detach().contiguous().numpy(), "int8")).view(tensor.shape), None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:  # noqa: ARG004 -- of the contract
        """Return `tensor`."""
        return tensor


class Compression:
    """The compressors by name, for `compression=`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor


def option_of(compression: Any) -> Any:
    """Return `compression` as `Options` have it: None for Compression.none."""
    return None if compression is Compression.none else compression
