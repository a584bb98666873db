"""The contents of a request, without the memory of its arrays."""

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from multiring._frontend.reduce_ops import LINEAR, Average, name_of
from multiring._frontend.signatures import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    DATA_TYPE,
    ELEMENTS,
    GROUPED_ALLREDUCE,
    OPERATION,
    PART,
    REDUCESCATTER,
    REDUCTION,
    ROOT,
    SCALES,
    SHAPE,
    TENSORS,
    WIRE,
    scales_text,
)
from multiring._native import Request
from multiring.errors import Signature

# Indexed by the numbers in multiring.h.
TYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
COLLECTIVES = (ALLREDUCE, BROADCAST, ALLGATHER, ALLTOALL, REDUCESCATTER, BARRIER)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The contents of a request, without the memory of its arrays."""

    collective: str
    dtype: str  # NumPy's name
    op: int
    # A broadcast's root; the collective of an operation that failed; else the number of a reduction whose first steps
    # are compared.
    root: int
    prescale: float
    postscale: float
    wire: str | None  # for a barrier, why this rank cannot take part in the operation of this name
    name: str | None
    shapes: tuple[tuple[int, ...], ...]
    splits: tuple[int, ...] | None

    @property
    def kind(self) -> "np.dtype[Any]":
        """The arrays' type."""
        return np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))


def wanted_of(request: Request) -> Wanted:
    """Return the contents of `request`."""
    splits: Any = request.splits
    shapes: list[list[int]] = request.shapes
    return Wanted(
        COLLECTIVES[request.collective],
        TYPES[request.type],
        request.op,
        request.root,
        request.prescale,
        request.postscale,
        request.wire.decode(errors="replace") or None,
        request.name.decode(errors="replace") or None,
        tuple(tuple(shape) for shape in shapes),
        None if splits is None else tuple(splits),
    )


def whole_signature(wanted: Wanted) -> Signature:
    """Return the signature of an all_reduce, a broadcast or a barrier."""
    if wanted.collective == BARRIER:
        return ((OPERATION, BARRIER),)
    single = len(wanted.shapes) == 1
    shapes = str(wanted.shapes[0]) if single else " ".join(str(shape).replace(" ", "") for shape in wanted.shapes)
    if wanted.collective == BROADCAST:
        return (
            (OPERATION, BROADCAST),
            *(() if single else ((TENSORS, str(len(wanted.shapes))),)),
            (DATA_TYPE, wanted.dtype),
            (SHAPE, shapes),
            (ROOT, str(wanted.root)),
        )
    how = (
        (DATA_TYPE, wanted.dtype),
        (SHAPE, shapes),
        (REDUCTION, name_of(wanted.op)),
        (SCALES, scales_text(wanted.prescale, wanted.postscale)),
        (WIRE, str(wire_of(wanted))),
    )
    if single:
        return ((OPERATION, ALLREDUCE), *how)
    is_split = wanted.op == Average and wanted.dtype in {"int64", "uint64"}
    total = sum(math.prod(shape) for shape in wanted.shapes) * (
        2 if is_split or wanted.dtype.startswith("complex") else 1
    )
    return (
        (OPERATION, GROUPED_ALLREDUCE),
        (TENSORS, str(len(wanted.shapes))),
        *how,
        (PART, "1 of 1"),
        (ELEMENTS, str(total)),
    )


def wire_of(wanted: Wanted) -> str | None:
    """Return the type in which the request's arrays travel between hosts; None for their own type."""
    return wanted.wire if wanted.dtype == "float32" and wanted.op in LINEAR else None
