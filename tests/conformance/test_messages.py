"""Tests of send and recv: matching by sender and tag, in any order, in both directions at once."""

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.cases import OVER_A_WINDOW
from tests.support.ranks import CONFORMING, ENGINES, Here, run_ranks

SIZES = (0, 1, 1000, OVER_A_WINDOW // 4)


def letter(sender: int, receiver: int, tag: int, number: int, count: int) -> NDArray[np.float32]:
    return np.random.default_rng([sender, receiver, tag, number]).standard_normal(count).astype(np.float32)


def everyone_writes_to_everyone(here: Here) -> int:
    """Post all sends and receives of all tags in a different order on each rank, and check each message."""
    group = here.join()
    peers = [rank for rank in range(here.size) if rank != here.rank]
    plan = [(peer, tag, number, count) for peer in peers for tag in (0, 7) for number, count in enumerate(SIZES)]
    # The n-th send of a tag matches its n-th receive, so only the order between tags and peers is free.
    plan.sort(key=lambda each: (each[2], (each[0] + each[1] + here.rank) % here.size))
    handles: list[Any] = []
    got = {}
    for side in (("send", "recv"), ("recv", "send"))[here.rank % 2]:
        for peer, tag, number, count in plan:
            if side == "send":
                handles.append(group.send_async(letter(here.rank, peer, tag, number, count), peer, tag))
            else:
                got[peer, tag, number] = np.empty(count, np.float32)
                handles.append(group.recv_async(got[peer, tag, number], peer, tag))
    for handle in reversed(handles):
        handle.wait()
    for (peer, tag, number), array in got.items():
        np.testing.assert_array_equal(array, letter(peer, here.rank, tag, number, array.size))
    return len(got)


@pytest.mark.parametrize(("engine", "ranks"), [*itertools.product(ENGINES, (2, 4)), ("mpi", 4)])
def test_everyone_writes_to_everyone(engine: str, ranks: int) -> None:
    assert run_ranks(everyone_writes_to_everyone, ranks, engine=engine) == [(ranks - 1) * 2 * len(SIZES)] * ranks


def blocking_ring(here: Here) -> float:
    """Pass a number around the ring with blocking calls; barriers in between must not interfere."""
    group = here.join()
    box = np.zeros(1)
    for turn in range(20):
        if here.rank == 0:
            group.send(box + 1, 1)
            group.recv(box, here.size - 1)
        else:
            group.recv(box, here.rank - 1)
            group.send(box + 1, (here.rank + 1) % here.size)
        if turn % 5 == 0:
            group.barrier()
    return float(box[0])


@pytest.mark.parametrize("engine", CONFORMING)
def test_blocking_ring(engine: str) -> None:
    assert run_ranks(blocking_ring, 3, engine=engine)[0] == 60


def messages_amid_collectives(here: Here) -> bool:
    """Keep an unmatched receive in flight while collectives run."""
    group = here.join()
    late = np.zeros(3)
    handle = group.recv_async(late, 1 - here.rank, tag=5)
    total = np.ones(1000, np.float32)
    for _ in itertools.repeat(None, 10):
        group.all_reduce(total)
    assert not handle.done()
    group.barrier()
    group.send(np.full(3, here.rank + 1.0), 1 - here.rank, tag=5)
    handle.wait()
    return bool((late == 2 - here.rank).all() and (total == 2.0**10).all())


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_messages_amid_collectives(engine: str) -> None:
    assert run_ranks(messages_amid_collectives, 2, engine=engine) == [True, True]
