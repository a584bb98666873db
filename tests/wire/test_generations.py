"""A new generation with one rank fewer: every part of the runtime gets the new membership and keeps its connections."""

import numpy as np
import pytest
from tests.support.ranks import Here, run_ranks

import multiring
from multiring._frontend import lifecycle
from multiring._frontend.object_collectives import allgather_object, broadcast_object
from multiring._frontend.process_sets import global_process_set
from multiring._runtime.job.job import current, move_on
from multiring.errors import PeerLostError, StateError


def go_on_without_one(here: Here, lost: int) -> None:
    first = here.join()
    assert allgather_object(here.rank) == list(range(here.size))
    first.barrier()
    if here.rank == lost:
        return
    members = current().membership
    world = move_on(members.without({lost}))
    left = [rank for rank in range(here.size) if rank != lost]
    assert world is current()
    assert multiring.world() is world.group
    assert multiring.init() is world.group  # the loss belongs to the former generation
    assert (multiring.rank(), multiring.size()) == (left.index(here.rank), here.size - 1)
    assert (lifecycle.rank(), lifecycle.size()) == (multiring.rank(), multiring.size())
    assert multiring.local_size() == len(world.membership.local_ranks)
    assert world.group.ranks == tuple(range(here.size - 1))
    array = np.array([10.0 ** multiring.rank()])
    world.group.all_reduce(array)
    assert array[0] == sum(10.0**rank for rank in range(here.size - 1))
    # Horovod's operations number their roots by the new generation.
    assert global_process_set.size() == here.size - 1
    assert allgather_object(here.rank) == left
    assert broadcast_object(here.rank, root_rank=here.size - 2) == left[-1]
    pair = world.group.subgroup([1, 0])
    assert pair is None or pair.ranks == (1, 0)
    # Groups of the previous generation still have its members, one of which is lost.
    with pytest.raises(PeerLostError, match=f"rank {lost}"):
        first.barrier()
    with pytest.raises(StateError, match=r"generation 1: want one after the job's generation 1"):
        move_on(members.without({lost}))


@pytest.mark.parametrize(("engine", "ranks", "lost"), [("shm", 3, 0), ("shm", 3, 2), ("tcp", 3, 1), ("shm+tcp", 4, 0)])
def test_a_job_goes_on_without_a_rank(engine: str, ranks: int, lost: int) -> None:
    run_ranks(go_on_without_one, ranks, lost, engine=engine)


def ask_for_a_failed_job(here: Here) -> None:
    group = here.join()
    group.barrier()
    if here.rank == 0:
        with pytest.raises(PeerLostError):
            group.barrier()
        with pytest.raises(
            StateError, match=r"has lost rank 1, so its group cannot be used: call multiring.shutdown\(\)"
        ) as told:
            multiring.init()
        assert isinstance(told.value.__cause__, PeerLostError)  # a launcher sees that another rank failed first


def test_init_does_not_return_the_group_of_a_failed_job() -> None:
    run_ranks(ask_for_a_failed_job, 2)
