"""Compression of tensors for transport.

This is TensorFlow's version of multiring.torch.compression.
"""

from typing import Any, ClassVar

import tensorflow as tf

from multiring._frontend.compression_names import Compressor, NoneCompressor, known_name
from multiring._schedule import WIRES


class _NarrowFloat(Compressor):
    """Converts floating-point tensors to a narrower type, and leaves other tensors unchanged."""

    _dtype: ClassVar[Any]

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return `tensor` in the narrower type, and its original type."""
        narrow = tensor.dtype.is_floating and tensor.dtype.size > cls._dtype.size
        return (tf.cast(tensor, cls._dtype) if narrow else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return `tensor` in its original type `ctx`."""
        return tf.cast(tensor, ctx) if tensor.dtype != ctx else tensor


class FP16Compressor(_NarrowFloat):
    """Sends floating-point tensors as float16."""

    _dtype = tf.float16
    wire = "fp16"


class BF16Compressor(_NarrowFloat):
    """Sends floating-point tensors as bfloat16, which has the range of float32."""

    _dtype = tf.bfloat16
    wire = "bf16"


class Int8Compressor(NoneCompressor):
    """Sends float32 tensors between hosts as 8-bit integers with scales.

    Other tensors are not changed.
    """

    wire = "int8"


class Compression:
    """The compressors by name, as values for the parameter `compression`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor


for _name in set(WIRES) - set(vars(Compression)):  # a wire type without a compressor of its own
    setattr(Compression, _name, type(f"{_name.capitalize()}Compressor", (NoneCompressor,), {"wire": _name}))


def compressor_of(compression: Any) -> Any:
    """Return the compressor for a value of `compression=`: a name becomes the member of Compression.

    Raises:
        ArgumentError: there is no member of this name.
    """
    return getattr(Compression, known_name(compression)) if isinstance(compression, str) else compression
