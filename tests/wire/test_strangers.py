"""Whoever does not know the secret is refused at the tcp port, whatever it says, and the job is unharmed.

The long form, with 10,000 frames, is benchmarks/evidence.py.
"""

import contextlib
import random
import socket
import struct
import time
from collections.abc import Iterator

import numpy as np
from tests.wire.ranks import Here, run_ranks

FRAMES = 1000
MAGIC = b"MULTIRNG"
NONCE_AND_PROOF = 16 + 32  # bytes


def visit(port: int, count: int, seed: int) -> int:
    """Say `count` random and truncated frames at the port, each on its own connection; return how many got through."""
    return sum(gets_through(port, words) for words in frames(random.Random(seed), count))  # noqa: S311 -- noise


def gets_through(port: int, words: bytes) -> bool:
    """Return whether the port says more than what a caller needs to prove itself: a nonce and a proof."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line, contextlib.suppress(OSError):
        line.sendall(words)
        if len(words) % 3 == 0:
            line.shutdown(socket.SHUT_WR)
            while more := line.recv(4096):
                answer += more
    return len(answer) > NONCE_AND_PROOF


def frames(noise: random.Random, count: int) -> Iterator[bytes]:
    """Yield what a stranger may say: noise, hellos that are cut off, and right hellos with wrong proofs."""
    for number in range(count):
        hello = MAGIC + struct.pack("<III", 1, noise.randrange(4), noise.randrange(4)) + noise.randbytes(16)
        kinds = (
            noise.randbytes(noise.randrange(200)),
            hello[: noise.randrange(len(hello))],
            hello + noise.randbytes(noise.randrange(100)),
            MAGIC + noise.randbytes(noise.randrange(64)),
            noise.randbytes(64) * 20,
            hello.replace(b"\x01", b"\x02"),
        )
        yield kinds[number % len(kinds)]


def work_while_visited(here: Here) -> tuple[int, int, bool]:
    """Rank 2 plays the stranger, at the ports of the two others; they sum on, and meet it again afterwards."""
    group = here.join()
    ports = group.all_gather(np.array([listening_port()]))
    pair = group.subgroup([0, 1])
    total = np.ones(10_000)
    if pair is None:
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
            more[0] = not gone.done()
            pair.all_reduce(more, "max")
        gone.wait()
    group.all_reduce(total)
    return got_through, sums, bool((total == here.size).all())


def listening_port() -> int:
    """Return the port that this process listens at."""
    for number in range(3, 1000):
        try:
            found = socket.socket(fileno=number)
        except OSError:
            continue
        try:
            if found.family == socket.AF_INET and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return int(found.getsockname()[1])
        finally:
            found.detach()
    raise AssertionError("nobody listens")


def test_strangers_are_refused() -> None:
    by_rank = run_ranks(work_while_visited, 3, engine="tcp")
    assert [got_through for got_through, _, _ in by_rank] == [0, 0, 0]
    assert all(right for _, _, right in by_rank)
    assert min(sums for _, sums, _ in by_rank[:2]) > 1


def hold_the_door(here: Here) -> float:
    """Silent connections, more than there is room for, while ranks join: they must get in all the same."""
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
    part = group.subgroup([2, 0])  # connects afresh where these two are no neighbours yet
    if part is not None:
        part.barrier()
    return time.monotonic() - start


def test_silent_strangers_take_no_room() -> None:
    assert max(run_ranks(hold_the_door, 4, engine="tcp")) < 20
