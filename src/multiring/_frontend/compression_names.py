"""Compression by name, and what the compressors of all frameworks share."""

from typing import Any, ClassVar

from multiring._schedule import WIRES
from multiring.errors import ArgumentError, UnsupportedError

NAMES = ("none", *WIRES)


class Compression:
    """The values of `compression=`: the types in which float32 travels between hosts.

    A call also takes the name of a member, such as "bf16".
    """

    none = None
    fp16 = "fp16"
    bf16 = "bf16"
    int8 = "int8"


for _name in WIRES:
    setattr(Compression, _name, _name)


class Compressor:
    """Compress a tensor before a reduction, and decompress the result; a program may derive its own compressor."""

    wire: ClassVar[str | None] = None
    """The wire type in which sums and averages of float32 travel between hosts instead; None if there is none."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the compressed tensor, and the context that `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the original form of a compressed tensor, or of a sum of compressed tensors."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Tensors travel unchanged."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return `tensor`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:  # noqa: ARG004 -- part of the interface
        """Return `tensor`."""
        return tensor


def wire_of(compression: Any) -> str | None:
    """Return the wire type for a value of `compression=`; None for float32 itself.

    Args:
        compression: a value of Compression, its name, or a compressor of an adapter.

    Raises:
        ArgumentError: `compression` is an unknown name, or is no compression.
        UnsupportedError: `compression` is a compressor of the program's own.
    """
    if compression is None or isinstance(compression, str):
        named = compression if compression is None else known_name(compression)
        return None if named == "none" else named
    if getattr(compression, "__name__", "") == "NoneCompressor":
        return None
    wire: str | None = getattr(compression, "wire", None)
    if wire:
        return wire
    if callable(getattr(compression, "compress", None)):
        raise UnsupportedError(
            f"compression={compression!r} is a compressor of the program's own, which this adapter does not support: "
            f"use a member of Compression: {', '.join(NAMES)}"
        )
    raise ArgumentError(f"compression={compression!r}: want a member of Compression, or its name: {', '.join(NAMES)}")


def known_name(compression: str) -> str:
    """Return `compression`, the name of a member of Compression.

    Raises:
        ArgumentError: there is no such member.
    """
    if compression not in NAMES:
        raise ArgumentError(f"compression={compression!r}: want one of {', '.join(NAMES)}")
    return compression
