"""Receives from any source: each gets one message, in the order in which both sides posted."""

import signal
import time
from typing import Any

import numpy as np
import pytest
from tests.support.faults import kill
from tests.support.ranks import ENGINES, Here, report_of, run_ranks

import multiring
from multiring._runtime.group.point_to_point import AnySourceMatching
from multiring.errors import MismatchError, MultiringError, PeerLostError, StallError, StateError


def box_of(here: Here, **settings: Any) -> tuple[multiring.Group, AnySourceMatching]:
    group = here.join(**settings)
    return group, AnySourceMatching(group)


def letter(sender: int, tag: int, number: int) -> Any:
    return np.array([sender, tag, number], np.int64)


def from_anyone(here: Here) -> list[tuple[int, int, int]]:
    """Let all ranks send to all others under two tags. Receivers select by tag; a sender's messages stay in order."""
    group, box = box_of(here)
    others = [rank for rank in range(here.size) if rank != here.rank]
    # Half of the receives are posted before any send, the other half after all sends.
    arrays = [np.zeros(3, np.int64) for _ in range(2 * 3 * len(others))]
    tags = [0, 9] * (len(arrays) // 2)
    received = [box.recv(array, None, tag) for array, tag in list(zip(arrays, tags, strict=True))[: len(arrays) // 2]]
    sent = [box.send(letter(here.rank, tag, number), to, tag) for number in range(3) for tag in (9, 0) for to in others]
    group.barrier()
    received += [box.recv(array, None, tag) for array, tag in list(zip(arrays, tags, strict=True))[len(arrays) // 2 :]]
    for handle in [*received, *sent]:
        handle.wait()
    got = [tuple(array.tolist()) for array in arrays]
    for handle, (sender, tag, _), wanted in zip(received, got, tags, strict=True):
        assert (handle.source, handle.tag, tag) == (sender, wanted, wanted)
    for tag in (0, 9):
        for other in others:
            assert [number for sender, under, number in got if (sender, under) == (other, tag)] == [0, 1, 2]
    box.close()
    return sorted(got)


@pytest.mark.parametrize("engine", ENGINES)
def test_from_anyone(engine: str) -> None:
    results = run_ranks(from_anyone, 4, engine=engine)
    for rank, got in enumerate(results):
        assert got == sorted((s, tag, n) for s in range(4) if s != rank for tag in (0, 9) for n in range(3))


def in_posted_order(here: Here) -> list[tuple[int, int]]:
    """Check the order of matching.

    A receive from one source does not overtake an earlier receive from any source, unless their tags differ.
    """
    group, box = box_of(here)
    found: list[tuple[int, int]] = []
    if here.rank == 0:
        arrays = np.zeros((4, 3), np.int64)
        anyone, second, other_tag = box.recv(arrays[0]), box.recv(arrays[1], 1), box.recv(arrays[2], 2, tag=5)
        group.barrier()
        other_tag.wait()
        for handle in (second, anyone):
            handle.wait()
        box.recv(arrays[3], 1).wait()  # no receive from any source is open, so this one matches directly
        found = [(int(array[0]), int(array[2])) for array in arrays]
    else:
        group.barrier()
        if here.rank == 1:
            for number in range(3):
                box.send(letter(1, 0, number), 0).wait()
        else:
            box.send(letter(2, 5, 0), 0, tag=5).wait()
    group.barrier()
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_in_posted_order(engine: str) -> None:
    assert run_ranks(in_posted_order, 3, engine=engine)[0] == [(1, 0), (1, 1), (2, 0), (1, 2)]


def to_oneself(here: Here) -> None:
    """Let a rank send to itself. The message is copied at once, and any matching receive may get it."""
    _, box = box_of(here)
    array, copies = np.arange(5.0), np.zeros((3, 5))
    early = box.recv(copies[0], here.rank, tag=1)
    assert not early.done()
    with pytest.raises(TimeoutError, match=r"still in flight after 0\.01 s"):
        early.wait(0.01)
    for _ in range(3):
        assert box.send(array, here.rank, tag=1).done()
        array += 1
    early.wait()
    anyone = box.recv(copies[1], None, tag=1)
    anyone.wait()
    assert anyone.source == here.rank
    box.recv(copies[2], here.rank, tag=1).wait()
    np.testing.assert_array_equal(copies, np.arange(5.0) + np.arange(3.0)[:, None])
    box.send(array, here.rank)
    with pytest.raises(MismatchError, match=r"sent as float64 of shape \(5,\), received as float64 of shape \(4,\)"):
        box.recv(np.zeros(4), here.rank).wait()


@pytest.mark.parametrize("ranks", [1, 2])
def test_to_oneself(ranks: int) -> None:
    run_ranks(to_oneself, ranks)


def after_all_left(here: Here) -> None:
    """Receive a message to itself after all other ranks have left."""
    group, box = box_of(here)
    group.barrier()
    if here.rank == 1:
        return
    array, copy = np.arange(5.0), np.zeros(5)
    deadline = time.monotonic() + 240
    while not group.calls.services.context.losses() and time.monotonic() < deadline:
        time.sleep(0.01)
    box.send(array, here.rank).wait()
    box.recv(copy, None).wait()
    np.testing.assert_array_equal(copy, array)
    with pytest.raises(PeerLostError, match="message from any rank to rank 0, tag 0: rank 1 left"):
        box.recv(copy, None).wait()
    box.send(array + 1, here.rank).wait()
    box.recv(copy, here.rank).wait()  # the rejected receive does not take this message
    np.testing.assert_array_equal(copy, array + 1)


def test_after_all_left() -> None:
    run_ranks(after_all_left, 2)


def a_late_mailbox(here: Here) -> int:
    """Post a receive before the other ranks create their `AnySourceMatching`; it completes afterwards."""
    group = here.join()
    got = np.zeros(3, np.int64)
    if here.rank == 0:
        handle = AnySourceMatching(group).recv(got)
        time.sleep(0.2)
        group.barrier()
        handle.wait()
    else:
        group.barrier()
        AnySourceMatching(group).send(letter(here.rank, 0, 0), 0).wait()
    group.barrier()
    return int(got[0])


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_a_late_mailbox(engine: str) -> None:
    assert run_ranks(a_late_mailbox, 2, engine=engine)[0] == 1


def nobody_sends(here: Here) -> None:
    """Post receives from any source without a sender: they end by a stall, a close or a shutdown."""
    group, box = box_of(here)
    box._patience = 0.05, 0.2
    with pytest.raises(StallError, match=r"message from any rank to rank \d, tag 3: no rank has sent it for"):
        box.recv(np.zeros(1), None, 3).wait()
    handle = box.recv(np.zeros(1), None, 4)
    box.close()
    with pytest.raises(StateError, match="this group was closed"):
        handle.wait()
    group.barrier()
    late = AnySourceMatching(group).recv(np.zeros(1))
    multiring.shutdown()
    with pytest.raises((StateError, PeerLostError), match=r"multiring was shut down|rank \d left"):
        late.wait()


def test_nobody_sends() -> None:
    run_ranks(nobody_sends, 2)


def a_death(here: Here, names_source: bool) -> str:  # noqa: FBT001 -- of the test
    """Wait for a message of rank 1, which dies; return the error."""
    _, box = box_of(here)
    here.reach("waiting")
    try:
        if here.rank != 2:
            box.recv(np.zeros(1), None, 1) if names_source else None
            box.recv(np.zeros(1), 2 if names_source else None, 1).wait(240)
        else:
            time.sleep(30)
    except MultiringError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("names_source", [False, True])
def test_a_death(names_source: bool) -> None:  # noqa: FBT001 -- a parameter
    report = report_of(a_death, 3, names_source, faults=[kill(2).at("waiting").after(0.1)])
    assert report.outcomes[2].exit_code == -signal.SIGKILL
    for outcome in report.outcomes[:2]:
        assert outcome.error is None
        assert outcome.value.startswith("PeerLostError: ")
        assert "rank 2 died" in outcome.value
