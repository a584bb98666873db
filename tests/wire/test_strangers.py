"""The tcp port rejects every client without the secret, and the job is unharmed.

The long form, with 10,000 frames, is benchmarks/evidence/jobs/main.py.
"""

import socket
import time

import numpy as np
from tests.support.ranks import Here, run_ranks
from tests.support.strangers import listening_port, visit

FRAMES = 1000


def work_while_visited(here: Here) -> tuple[int, int, bool]:
    """Let rank 2 play a client without the secret at the ports of the other ranks, which keep summing."""
    group = here.join()
    ports = group.all_gather(np.array([listening_port()]))
    pair = group.subgroup([0, 1])
    total = np.ones(10_000)
    if pair is None:
        for rank in (0, 1):
            group.recv(np.zeros(1), rank)  # the other ranks are at work
        got_through = sum(visit(int(port), FRAMES // 2, seed) for seed, port in enumerate(ports[:2]))
        group.send(np.zeros(1), 0)
        group.send(np.zeros(1), 1)
        sums = 0
    else:
        got_through = sums = 0
        gone = group.recv_async(np.zeros(1), 2)
        more = np.ones(1)
        while more[0]:
            pair.all_reduce(total, "average")
            sums += 1
            if sums == 1:
                group.send(np.zeros(1), 2)
            more[0] = not gone.done()
            pair.all_reduce(more, "max")
        gone.wait()
    group.all_reduce(total)
    return got_through, sums, bool((total == here.size).all())


def test_strangers_are_refused() -> None:
    by_rank = run_ranks(work_while_visited, 3, engine="tcp")
    assert [got_through for got_through, _, _ in by_rank] == [0, 0, 0]
    assert all(right for _, _, right in by_rank)
    assert min(sums for _, sums, _ in by_rank[:2]) > 1


def hold_the_door(here: Here) -> float:
    """Open more silent connections than a rank accepts while ranks join; the ranks must still connect."""
    if here.rank == 2:
        time.sleep(0.3)
    start = time.monotonic()
    group = here.join()
    if here.rank == 0:
        port = listening_port()
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
        for line in silent[::2]:
            line.close()
    group.barrier()
    part = group.subgroup([2, 0])  # needs a new connection unless the two ranks are neighbours
    if part is not None:
        part.barrier()
    return time.monotonic() - start


def test_silent_strangers_take_no_room() -> None:
    assert max(run_ranks(hold_the_door, 4, engine="tcp")) < 20
