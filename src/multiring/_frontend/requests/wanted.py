"""The contents of a request, without the memory of its arrays."""

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from multiring._frontend.handles import CallName, Prefixed, Unnamed
from multiring._frontend.reduce_ops import LINEAR, Average, name_of
from multiring._frontend.requests.text import (
    GROUP,
    CallSignature,
    known_ending,
    numbered,
    parsed_name,
    wire_and_signature,
)
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
from multiring._runtime.named.signature_text import STRUCTURE, structure_text
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
    sent_name: str | None
    shapes: tuple[tuple[int, ...], ...]
    splits: tuple[int, ...] | None
    call: CallSignature

    @property
    def name(self) -> CallName | None:
        """The name by which the ranks match the operation."""
        return name_for(self.sent_name, self.collective)

    def names(self, number: str) -> list[CallName]:
        """Return the names of the operations if each array has its own; `number` is that of an unnamed operation."""
        endings = [numbered(place, len(self.shapes)) for place in range(1, len(self.shapes) + 1)]
        if self.sent_name is None:
            return [Unnamed(number, known_ending(ending)) for ending in endings]
        if parsed_name(self.sent_name) is None:
            return [self.sent_name + known_ending(ending) for ending in endings]
        names = [name_for(self.sent_name + ending, self.collective) for ending in endings]
        return [name for name in names if name is not None]

    @property
    def begins_call(self) -> bool:
        """Whether the operation is the first one of its call; see `parsed_name`."""
        parsed = None if self.sent_name is None else parsed_name(self.sent_name)
        return parsed is None or not known_ending(parsed[2])

    @property
    def structure(self) -> Signature:
        """The tree to which the arrays belong, as a part of the signature."""
        return ((STRUCTURE, structure_text(self.call.paths)),) if self.call.paths else ()

    @property
    def kind(self) -> "np.dtype[Any]":
        """The arrays' type."""
        return np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))


def wanted_of(request: Request) -> Wanted:
    """Return the contents of `request`."""
    splits: Any = request.splits
    shapes: list[list[int]] = request.shapes
    collective, sent = COLLECTIVES[request.collective], request.wire.decode(errors="replace")
    # A barrier has a reason in place of a wire type.
    wire, call = (sent or None, CallSignature()) if collective == BARRIER else wire_and_signature(sent)
    return Wanted(
        collective,
        TYPES[request.type],
        request.op,
        request.root,
        request.prescale,
        request.postscale,
        wire,
        request.name.decode(errors="replace") or None,
        tuple(tuple(shape) for shape in shapes),
        None if splits is None else tuple(splits),
        call,
    )


def name_for(sent: str | None, operation: str) -> CallName | None:
    """Return the name by which the ranks match an operation.

    Args:
        sent: the name of the request.
        operation: the operation's name.
    """
    parsed = None if sent is None else parsed_name(sent)
    if parsed is None:
        return sent
    kind, name, ending = *parsed[:2], known_ending(parsed[2])
    if not name:
        return Unnamed(kind, ending)
    # A call is the same operation for all numbers of arrays, so that ranks with different numbers of them meet.
    prefix = GROUPED_ALLREDUCE if kind == GROUP and operation == ALLREDUCE else operation
    return Prefixed(prefix, name + ending)


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
            *wanted.structure,
        )
    how = (
        (DATA_TYPE, wanted.dtype),
        (SHAPE, shapes),
        (REDUCTION, name_of(wanted.op)),
        (SCALES, scales_text(wanted.prescale, wanted.postscale)),
        (WIRE, str(wire_of(wanted))),
    )
    if single:
        return ((OPERATION, ALLREDUCE), *how, *wanted.structure)
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
        *wanted.structure,
    )


def wire_of(wanted: Wanted) -> str | None:
    """Return the type in which the request's arrays travel between hosts; None for their own type."""
    return wanted.wire if wanted.dtype == "float32" and wanted.op in LINEAR else None
