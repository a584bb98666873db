"""The operations join and barrier."""

import gc
from typing import Any

from multiring._frontend.errors import internal
from multiring._frontend.handles import submit
from multiring._frontend.process_sets import ProcessSet, global_process_set, members_of
from multiring._frontend.signatures import BARRIER, OPERATION
from multiring._runtime import Group, Handle
from multiring._runtime.group.handles import in_background
from multiring.errors import MultiringError


def join(device: int = -1) -> int:  # noqa: ARG001 -- Horovod's parameter; multiring has no devices here
    """Announce that this rank has no more data, and wait until all ranks have joined.

    During the wait, this rank contributes neutral elements to the other ranks' allreduces: zeros for Sum and Average,
    and values that change nothing for Min, Max and Product. Average still divides by the number of all ranks. The
    rank's optimizers also contribute zeros, as gradients or changes, to the other ranks' steps.

    Args:
        device: not used.

    Returns:
        The rank that joined last.

    Raises:
        CollectiveError: on every rank: another rank called an operation that a joined rank cannot take part in,
            such as allgather, alltoall, broadcast, reducescatter, Adasum or one with sparse tensors; or a rank is gone.
    """
    members = members_of(global_process_set)
    if members.reducers:
        # Dead optimizers may survive in reference cycles. Their reducers must be gone on every rank.
        gc.collect()
    members.line.drain()
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
    """Wait until every rank of the set has called this function.

    Other operations may still be in flight afterwards.

    Raises:
        ArgumentError: this rank is not in the set.
        CollectiveError: on every rank: a rank called another operation instead, or is gone.
    """

    def start(group: Group, label: str) -> Handle:
        return group.barrier_async(label=label)

    def finish(_: Any) -> None:
        return None

    submit(members_of(process_set), None, ((OPERATION, BARRIER),), start, finish).wait()
