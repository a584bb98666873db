"""join and barrier."""

import gc
from typing import Any

from multiring.errors import MultiringError
from multiring.frontend.errors import internal
from multiring.frontend.handles import submit
from multiring.frontend.process_sets import ProcessSet, global_process_set, members_of
from multiring.frontend.signatures import BARRIER, OPERATION
from multiring.runtime import Group, Handle
from multiring.runtime.group.handles import in_background


def join(device: int = -1) -> int:  # noqa: ARG001 -- Horovod's; there is host memory only
    """Take part in the others' operations, having no more data, until all ranks have joined; return the last one to.

    This rank contributes zeros to the others' allreduces by Sum and Average (which still divides by all ranks), and
    what changes nothing to those by Min, Max and Product. Its optimizers take part in the others' steps as well, with
    gradients, or changes, of zeros.

    Args:
        device: not used.

    Raises:
        HorovodInternalError: on every rank, from what cannot be done without this one: allgather, alltoall, broadcast,
            reducescatter, sparse tensors and Adasum; or a rank is gone.
    """
    members = members_of(global_process_set)
    if members.reducers:
        # Those of optimizers that are gone, but in a cycle of references, are to be gone on every rank.
        gc.collect()
    try:
        joined = members.named.join()
        reducers = [in_background(each.contribute_neutrally, "join") for each in members.reducers]
        last: int = joined.wait()
        for reducer in reducers:
            reducer.wait()
    except MultiringError as error:
        raise internal(error, "join") from error
    members.count_anew()
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank of the set has called it; other operations may still be in flight.

    Raises:
        ArgumentError: this rank is not in the set.
        HorovodInternalError: on every rank: one came with another operation, or is gone.
    """

    def start(group: Group, label: str) -> Handle:
        return group.barrier_async(label=label)

    def finish(_: Any) -> None:
        return None

    submit(members_of(process_set), None, ((OPERATION, BARRIER),), start, finish).wait()
