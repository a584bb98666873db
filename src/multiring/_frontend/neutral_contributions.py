"""The contributions of a rank that has joined to the other ranks' operations."""

import math
from functools import partial

from multiring._frontend.dtype_conversion import dtype_conversion, neutral_array
from multiring._frontend.follow_ups import DEVICE_PATH, FollowUps, NeutralFollowUp
from multiring._frontend.reduce_ops import chosen_op
from multiring._frontend.signatures import (
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
    numbers_in,
)
from multiring._runtime import Group, Handle
from multiring._runtime.named.named import Start
from multiring.errors import Signature, UnsupportedError


def neutral_contribution(signature: Signature, follow_ups: FollowUps) -> Start:
    """Return a function that contributes to an operation without changing its result.

    `signature` describes the operation of the set of `follow_ups`. The function contributes zeros to a sum and an
    average, and the neutral element to a minimum, a maximum and a product. An average is still divided by the number
    of all ranks.

    Raises:
        UnsupportedError: the operation has no neutral contribution.
    """
    known = dict(signature)
    operation = known[OPERATION]
    if operation == BARRIER:
        return lambda group, label: group.barrier_async(label=label)
    if operation not in {ALLREDUCE, GROUPED_ALLREDUCE} or known[REDUCTION] == "adasum":
        raise UnsupportedError(f"{operation} is not supported with Join at this time.")
    wire = None if known[WIRE] == "None" else known[WIRE]

    def start(group: Group, label: str) -> Handle:
        _, postscale = numbers_in(known[SCALES])
        conversion = dtype_conversion(known[DATA_TYPE], chosen_op(known[REDUCTION]), postscale, group.size)
        if operation == GROUPED_ALLREDUCE:
            shape = [int(known[ELEMENTS])]
        else:
            shape = [int(each) for each in numbers_in(known[SHAPE])] + list(conversion.more)
        array = neutral_array(conversion, math.prod(shape)).reshape(shape)
        return group.all_reduce_async(array, conversion.op, wire=wire, label=label)

    def agree(group: Group, label: str) -> Handle:
        work = NeutralFollowUp(partial(start, follow_ups.staged, label))
        return follow_ups.agree(group, label, work, is_tracked=False, is_ahead=False)

    return agree if DEVICE_PATH in known else start
