"""Control messages: short messages between ranks outside any operation."""

import queue
import time

import numpy as np
import pytest
from tests.support.ranks import CONFORMING, Here, run_ranks

from multiring._native import NOTE_BYTES, ControlMessage, ControlMessageKind
from multiring._runtime.failures.control_thread import Control
from multiring._runtime.job.job import current
from multiring.errors import ArgumentError, StateError

GROUP = 77
TAGS = 120


class Listener:
    """A listener that stores the control messages it gets."""

    def __init__(self) -> None:
        self.heard: queue.Queue[ControlMessage] = queue.Queue()
        self.lost: queue.Queue[tuple[int, bool]] = queue.Queue()

    def hear(self, notice: ControlMessage) -> None:
        self.heard.put(notice)

    def lose(self, rank: int, *, died: bool, why: str) -> None:
        assert why
        self.lost.put((rank, died))

    def has_come(self, name: str) -> bool:
        return name == "here"

    def end(self) -> None:
        pass


def control_here() -> Control:
    control = current().control
    assert control is not None
    return control


def payload(rank: int, tag: int) -> bytes:
    return bytes([rank, tag]) * (NOTE_BYTES // 2 if tag % 40 == 0 else tag)


def write_to_everybody(here: Here) -> bool:
    """Send control messages to all other ranks during other work; they must arrive in order."""
    group = here.join()
    listener, control = Listener(), control_here()
    control.add(GROUP, listener)
    current().context.link_with(list(range(here.size)))
    group.barrier()
    others = [rank for rank in range(here.size) if rank != here.rank]
    total = np.ones(100_000)
    for tag in range(TAGS):
        for rank in others:
            while True:
                try:
                    assert control.send(rank, GROUP, tag, payload(here.rank, tag))
                    break
                except StateError:  # the send queue is full
                    time.sleep(0.001)
        if tag % 30 == 0:
            group.all_reduce(total, "average")
    next_tag = dict.fromkeys(others, 0)
    for _ in range(TAGS * len(others)):
        notice = listener.heard.get(timeout=240)
        assert (notice.kind, notice.group, notice.tag) == (ControlMessageKind.MESSAGE, GROUP, next_tag[notice.rank])
        assert notice.payload == payload(notice.rank, notice.tag)
        next_tag[notice.rank] += 1
    for wrong in (here.rank, here.size, -1):
        with pytest.raises(ArgumentError, match=f"a control message to rank {wrong}"):
            control.send(wrong, GROUP, 0, b"")
    with pytest.raises(ArgumentError, match="want at most 65536"):
        control.send(others[0], GROUP, 0, bytes(NOTE_BYTES + 1))
    control.remove(GROUP)
    group.barrier()
    return bool((total == 1).all())


@pytest.mark.parametrize("engine", CONFORMING)
def test_notices_arrive_in_order(engine: str) -> None:
    assert all(run_ranks(write_to_everybody, 3, engine=engine))


def hear_of_an_end(here: Here) -> tuple[int, bool] | None:
    group = here.join()
    listener, control = Listener(), control_here()
    control.add(GROUP, listener)
    group.barrier()
    if here.rank == 1:
        return None
    lost = listener.lost.get(timeout=240)
    assert not control.send(1, GROUP, 0, b"to nobody")
    return lost


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_an_end_is_heard_of(engine: str) -> None:
    assert run_ranks(hear_of_an_end, 2, engine=engine) == [(1, False), None]
