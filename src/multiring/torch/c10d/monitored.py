"""monitored_barrier: a barrier that names the ranks that have not come."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from multiring.errors import StateError
from multiring.runtime.failures.monitored_barrier import BarrierOutcome, MonitoredBarrier
from multiring.torch.c10d.errors import torch_error
from multiring.torch.c10d.group_state import GroupState


def monitored_barrier_of(state: GroupState, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:  # noqa: FBT001, FBT002 -- torch's
    """Return once every rank has called it. Where it fails, operations of the group go on as before.

    Args:
        state: of the group.
        timeout: how long rank 0 of the group waits for the others, and each of them for rank 0.
        wait_all_ranks: whether rank 0 names all ranks that have not come, and waits for the others where one is
            gone; else the first.

    Raises:
        DistBackendError: on rank 0, which names who is missing, as numbered in the group; on those that came, which
            do too; and on one that comes too late.
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
    """As `torch.distributed.monitored_barrier`, which torch lets Gloo's groups pass only: for multiring's too.

    Args:
        group: by default that of all ranks.
        timeout: by default the group's.
        wait_all_ranks: whether all ranks that have not come are named, or the first.

    Raises:
        DistBackendError: ranks have not come; it names them.
    """
    found = dist.group.WORLD if group is None else group
    if isinstance(found, GroupState):
        monitored_barrier_of(found, timeout, wait_all_ranks)
    else:
        dist.monitored_barrier(group, timeout, wait_all_ranks)


# The phrases are those of torch's for Gloo, which programs look for.


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
