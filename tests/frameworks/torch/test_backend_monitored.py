"""monitored_barrier names the missing ranks in torch's words on every other rank."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.joined import PATIENCE, join_torch
from tests.support.ranks import Here, run_ranks

import multiring.torch as mt
from multiring._runtime.failures.monitored_barrier import MonitoredBarrier

SHORT = timedelta(seconds=0.1)


def monitored(here: Here, rendezvous: str) -> None:
    """Run barriers that pass, barriers that ranks 1 and 2 miss, and another barrier."""
    world: Any = join_torch(here, rendezvous)
    world.monitored_barrier()
    mt.monitored_barrier(timeout=PATIENCE, wait_all_ranks=True)
    for wait_all_ranks, named in ((False, r"Rank 1 failed .* \(nor did rank 2\)"), (True, "Ranks 1, 2 failed")):
        # Rank 0 enters only after rank 3 has arrived, because rank 0 would not wait for rank 3.
        if here.rank == 3:
            reached = r"Rank 3 successfully reached monitoredBarrier, but received errors .* from rank 0: rank"
            with pytest.raises(dist.DistBackendError, match=reached):
                world.monitored_barrier(PATIENCE)
        elif here.rank == 0:
            number = world.part(MonitoredBarrier)._number + 1
            while world.part(MonitoredBarrier)._come.get(number) != {3}:
                time.sleep(0.005)
            with pytest.raises(dist.DistBackendError, match=f"Rank 0 timed out in monitoredBarrier: {named}"):
                world.monitored_barrier(SHORT, wait_all_ranks)
        dist.barrier()
        if here.rank in {1, 2}:
            text = rf"Rank {here.rank} came to monitoredBarrier too late: rank 0 had given up, as ranks 1, 2 failed"
            with pytest.raises(dist.DistBackendError, match=text):
                world.monitored_barrier(PATIENCE)
    if here.rank:
        with pytest.raises(dist.DistBackendError, match="rank 0, which did not come to it within 100 ms"):
            world.monitored_barrier(SHORT)
    dist.barrier()
    if not here.rank:
        world.monitored_barrier(SHORT)  # passes, because the other ranks came before they timed out
    world.monitored_barrier(PATIENCE)
    torch_refuses(here)
    in_a_subgroup(here)
    dist.destroy_process_group()
    with pytest.raises(dist.DistBackendError, match="was destroyed"):
        world.monitored_barrier(PATIENCE)


def torch_refuses(here: Here) -> None:  # noqa: ARG001 -- the checks' common signature
    """Only Gloo's groups pass torch's function, so mt.monitored_barrier exists."""
    with pytest.raises(ValueError, match="monitored_barrier is only implemented for GLOO backend"):
        dist.monitored_barrier()


def in_a_subgroup(here: Here) -> None:
    """Errors number ranks by the group; ranks outside the group do nothing."""
    group: Any = dist.new_group([1, 3])
    if here.rank == 1:
        with pytest.raises(dist.DistBackendError, match="Rank 1 failed to pass monitoredBarrier in 100 ms"):
            mt.monitored_barrier(group, SHORT)
    elif here.rank != 3:
        with pytest.warns(UserWarning, match="does not belong to"):
            mt.monitored_barrier(group, SHORT)
    dist.barrier()
    total = torch.ones(1)
    if here.rank in {1, 3}:
        dist.all_reduce(total, group=group)
        assert total == 2


def test_monitored(tmp_path: Path) -> None:
    run_ranks(monitored, 4, str(tmp_path / "meeting"))


def other_backends(here: Here, rendezvous: str) -> None:
    """For groups of other backends, mt.monitored_barrier calls torch's function."""
    join_torch(here, rendezvous, backend="gloo")
    mt.monitored_barrier(timeout=PATIENCE)
    dist.destroy_process_group()


def test_other_backends(tmp_path: Path) -> None:
    run_ranks(other_backends, 2, str(tmp_path / "meeting"))
