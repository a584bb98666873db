"""Compression: in what form tensors travel. See multiring.torch.compression, of which this is TensorFlow's."""

from typing import Any, ClassVar

import tensorflow as tf


class Compressor:
    """How a tensor is compressed before it is reduced, and decompressed afterwards; anybody may add one."""

    wire: ClassVar[str | None] = None
    """The wire type by which sums and averages of float32 travel between hosts instead, where there is one."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return `tensor` compressed, and what `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return `tensor`, which `compress` or a sum of such gave, in its first form."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Tensors travel as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return `tensor`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:  # noqa: ARG004 -- of the contract
        """Return `tensor`."""
        return tensor


class _NarrowFloat(Compressor):
    """Floating-point tensors travel in a narrower type, others as they are."""

    _dtype: ClassVar[Any]

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return `tensor` in the narrower type, and its own."""
        narrow = tensor.dtype.is_floating and tensor.dtype.size > cls._dtype.size
        return (tf.cast(tensor, cls._dtype) if narrow else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return `tensor` in the type it had."""
        return tf.cast(tensor, ctx) if tensor.dtype != ctx else tensor


class FP16Compressor(_NarrowFloat):
    """Floating-point tensors travel as float16."""

    _dtype = tf.float16
    wire = "fp16"


class BF16Compressor(_NarrowFloat):
    """Floating-point tensors travel as bfloat16, which keeps float32's range."""

    _dtype = tf.bfloat16
    wire = "bf16"


class Int8Compressor(NoneCompressor):
    """Tensors of float32 travel between hosts as 8-bit integers with scales, others as they are."""

    wire = "int8"


class Compression:
    """The compressors by name, for `compression=`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor
