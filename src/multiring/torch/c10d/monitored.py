"""monitored_barrier: a barrier that names the ranks that have not reached it."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from multiring._runtime.failures.monitored_barrier import BarrierOutcome, MonitoredBarrier
from multiring.errors import StateError
from multiring.torch.c10d.errors import torch_error
from multiring.torch.c10d.group_state import GroupState


def monitored_barrier_of(state: GroupState, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:  # noqa: FBT001, FBT002 -- torch's
    """Wait until every rank has called this function. After a failure, the group can still be used.

    Args:
        state: the process group.
        timeout: the time that rank 0 of the group waits for the other ranks, and each of them for rank 0.
        wait_all_ranks: whether rank 0 waits for all ranks, even after one has failed, and names all missing ranks;
            otherwise it names the first one.

    Raises:
        DistBackendError: ranks are missing. Rank 0 and the ranks that reached the barrier raise it and name them by
            their number in the group. A rank that comes too late also raises it.
    """
    state.require_state("monitored_barrier")
    seconds = state.default_timeout_s if timeout is None else max(0.0, timeout.total_seconds())
    try:
        roll = state.part(MonitoredBarrier).call(seconds, waits_for_all=wait_all_ranks)
    except StateError as error:
        state.require_state("monitored_barrier")
        raise torch_error("monitored_barrier", error) from error
    if roll.missing:
        own = state.group.rank
        text = _told(roll, seconds, names_all=wait_all_ranks) if own == 0 else _heard(roll, own, seconds)
        raise dist.DistBackendError(f"[Rank {own}]: {text}")


def monitored_barrier(
    group: Any = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,  # noqa: FBT001, FBT002 -- torch's
) -> None:
    """Wait until every rank of a group has called this function.

    This is `torch.distributed.monitored_barrier`, which torch allows for Gloo groups only, for multiring's groups too.

    Args:
        group: the process group; by default the group of all ranks.
        timeout: the time to wait; by default the group's timeout.
        wait_all_ranks: whether to name all ranks that have not reached the barrier, or only the first.

    Raises:
        DistBackendError: ranks have not reached the barrier; the error names them.
    """
    found = dist.group.WORLD if group is None else group
    if isinstance(found, GroupState):
        monitored_barrier_of(found, timeout, wait_all_ranks)
    else:
        dist.monitored_barrier(group, timeout, wait_all_ranks)


# The phrases are those of torch's errors for Gloo, because programs look for them.


def _told(roll: BarrierOutcome, seconds: float, *, names_all: bool) -> str:
    first = roll.missing if names_all else roll.missing[:1]
    text = f"{_ranks(first)} failed to pass monitoredBarrier in {seconds * 1e3:.0f} ms"
    if not roll.lost:
        text = f"Rank 0 timed out in monitoredBarrier: {text}"
    if len(roll.missing) > len(first):
        text += f" (nor did {_ranks(roll.missing[1:]).lower()})"
    return text + "".join(f"; rank {rank}: {why}" for rank, why in roll.lost)


def _heard(roll: BarrierOutcome, own: int, seconds: float) -> str:
    if own in roll.missing and roll.was_decided:
        return (
            f"Rank {own} came to monitoredBarrier too late: rank 0 had given up, as {_ranks(roll.missing).lower()} "
            "failed to pass it"
        )
    reached = f"Rank {own} successfully reached monitoredBarrier, but received errors while waiting for send/recv from"
    if roll.was_decided:
        return f"{reached} rank 0: {_ranks(roll.missing).lower()} failed to pass it"
    why = "".join(f": {each}" for _, each in roll.lost) or f", which did not come to it within {seconds * 1e3:.0f} ms"
    return f"{reached} rank 0{why}"


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"{'Rank' if len(ranks) == 1 else 'Ranks'} {', '.join(map(str, ranks))}"
