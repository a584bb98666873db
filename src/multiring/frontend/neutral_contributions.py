"""What a rank that has joined contributes to the others' operations."""

from multiring.errors import Terms, UnsupportedError
from multiring.frontend.reduce_ops import chosen_op
from multiring.frontend.signatures import (
    ALLREDUCE,
    BARRIER,
    DATA_TYPE,
    ELEMENTS,
    GROUPED_ALLREDUCE,
    OPERATION,
    REDUCTION,
    SCALES,
    SHAPE,
    WIRE,
    dtype_of,
    numbers_in,
)
from multiring.runtime import Group, Handle
from multiring.runtime.named.named import Start
from multiring.torch.dtype_conversion import neutral, wire_form
from multiring.torch.interop import buffer_from


def stand_in(terms: Terms) -> Start:
    """Return what starts this rank's part in an operation of these terms: what changes no result of the others.

    That is zeros for a sum and an average, which is still divided by all ranks, and the neutral element for a minimum,
    a maximum and a product.

    Raises:
        UnsupportedError: an operation that has no such part.
    """
    known = dict(terms)
    operation = known[OPERATION]
    if operation == BARRIER:
        return lambda group, label: group.barrier_async(label=label)
    if operation not in {ALLREDUCE, GROUPED_ALLREDUCE} or known[REDUCTION] == "adasum":
        raise UnsupportedError(f"{operation} is not supported with Join at this time.")
    wire = None if known[WIRE] == "None" else known[WIRE]

    def start(group: Group, label: str) -> Handle:
        _, postscale = numbers_in(known[SCALES])
        form = wire_form(dtype_of(known[DATA_TYPE]), chosen_op(known[REDUCTION]), postscale, group.size)
        if operation == GROUPED_ALLREDUCE:
            shape = [int(known[ELEMENTS])]
        else:
            shape = [int(each) for each in numbers_in(known[SHAPE])] + [2] * form.is_complex
        count = 1
        for each in shape:
            count *= each
        return group.all_reduce_async(buffer_from(neutral(form, count).view(shape)), form.op, wire=wire, label=label)

    return start
