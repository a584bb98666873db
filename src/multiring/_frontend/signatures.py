"""Signatures: the terms that must be equal on all ranks before an operation starts, in the order of the checks."""

from collections.abc import Sequence
from functools import lru_cache

from multiring.errors import Signature

ALLREDUCE, GROUPED_ALLREDUCE, SPARSE_ALLREDUCE = "allreduce", "grouped allreduce", "sparse allreduce"
ALLGATHER, ALLTOALL, BROADCAST, REDUCESCATTER = "allgather", "alltoall", "broadcast", "reducescatter"
BARRIER = "barrier"

OPERATION = "operation"
DATA_TYPE = "data type"
SHAPE = "shape"
WHOLE_SHAPE = "shape of the whole"  # the dense shape of a sparse tensor
SPARSE_DIMENSIONS = "sparse dimensions"  # how many dimensions of a sparse tensor its indices have
REDUCTION = "reduction operation"
SCALES = "prescale and postscale factors"
WIRE = "wire type"
ROOT = "root rank"
TENSORS = "tensors"
PART = "part of the group"
ELEMENTS = "elements"  # the number of elements on the wire

_KEPT = 4096  # the number of signatures in a cache


def _shape(shape: Sequence[int]) -> str:
    """Return a shape as text. Equal shapes have equal texts, because the caches do not distinguish 1 from 1.0."""
    return str(tuple(map(int, shape)))


def scales_text(prescale: float, postscale: float) -> str:
    """Return two factors as text.

    Equal factors, such as 1 and 1.0 or 0.0 and -0.0, have equal texts.
    """
    return str((float(prescale) + 0.0, float(postscale) + 0.0))


@lru_cache(maxsize=_KEPT)
def allreduce_signature(
    dtype: str, shape: Sequence[int], reduction: str, scales: tuple[float, float], wire: str | None
) -> Signature:
    """Return the signature of an allreduce of one tensor.

    `dtype`, here and below, is NumPy's name of the type.
    """
    return (
        (OPERATION, ALLREDUCE),
        (DATA_TYPE, dtype),
        (SHAPE, _shape(shape)),
        (REDUCTION, reduction),
        (SCALES, scales_text(*scales)),
        (WIRE, str(wire)),
    )


@lru_cache(maxsize=_KEPT)
def rows_signature(operation: str, dtype: str, shape: Sequence[int], more: Signature = ()) -> Signature:
    """Return the signature of an operation whose arrays may differ in the first dimension."""
    behind = ", ".join(["*", *map(str, map(int, shape[1:]))]) if shape else ""
    return ((OPERATION, operation), (DATA_TYPE, dtype), (SHAPE, f"({behind})"), *more)


@lru_cache(maxsize=_KEPT)
def plain_signature(operation: str, dtype: str, shape: Sequence[int], more: Signature = ()) -> Signature:
    """Return the signature of an operation in which all ranks have the same shape."""
    return ((OPERATION, operation), (DATA_TYPE, dtype), (SHAPE, _shape(shape)), *more)


def numbers_in(words: str) -> tuple[float, ...]:
    """Return the numbers in the text of a shape or of factors."""
    return tuple(float(word) for word in words.strip("()").split(",") if word.strip())
