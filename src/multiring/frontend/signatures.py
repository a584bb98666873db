"""Signatures: what ranks have to agree on before an operation starts, in words, in the order in which it is checked."""

from collections.abc import Sequence
from functools import lru_cache

from multiring.errors import Signature

ALLREDUCE, GROUPED_ALLREDUCE, SPARSE_ALLREDUCE = "allreduce", "grouped allreduce", "sparse allreduce"
ALLGATHER, ALLTOALL, BROADCAST, REDUCESCATTER = "allgather", "alltoall", "broadcast", "reducescatter"
BARRIER = "barrier"

OPERATION = "operation"
DATA_TYPE = "data type"
SHAPE = "shape"
WHOLE_SHAPE = "shape of the whole"  # of a sparse tensor
REDUCTION = "reduction operation"
SCALES = "prescale and postscale factors"
WIRE = "wire type"
ROOT = "root rank"
TENSORS = "tensors"
PART = "part of the group"
ELEMENTS = "elements"  # on the wire

_KEPT = 4096  # signatures that are kept in words


def _shape(shape: Sequence[int]) -> str:
    """Return a shape in words, the same for all that are equal: caches take numbers that are equal for one."""
    return str(tuple(map(int, shape)))


def scales_text(prescale: float, postscale: float) -> str:
    """Return the text of two factors. Equal factors have one text, as 1 and 1.0 have, or 0.0 and -0.0."""
    return str((float(prescale) + 0.0, float(postscale) + 0.0))


@lru_cache(maxsize=_KEPT)
def allreduce_signature(
    dtype: str, shape: Sequence[int], reduction: str, scales: tuple[float, float], wire: str | None
) -> Signature:
    """Return the signature of an allreduce of one tensor; `dtype`, here and below, is NumPy's name."""
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
    """Return the signature of an operation whose ranks may differ in rows, the first dimension."""
    behind = ", ".join(["*", *map(str, map(int, shape[1:]))]) if shape else ""
    return ((OPERATION, operation), (DATA_TYPE, dtype), (SHAPE, f"({behind})"), *more)


@lru_cache(maxsize=_KEPT)
def plain_signature(operation: str, dtype: str, shape: Sequence[int], more: Signature = ()) -> Signature:
    """Return the signature of an operation whose ranks all bring the same shape."""
    return ((OPERATION, operation), (DATA_TYPE, dtype), (SHAPE, _shape(shape)), *more)


def numbers_in(words: str) -> tuple[float, ...]:
    """Return the numbers of a shape, or of factors, that `str` gave in `words`."""
    return tuple(float(word) for word in words.strip("()").split(",") if word.strip())
