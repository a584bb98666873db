"""Ranks that wait for each other in different groups get an error within seconds; it names the lines of the calls."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import Here, run_ranks

import multiring
from multiring._runtime.failures.standoffs import Standoffs
from multiring._runtime.group.handles import Waiter
from multiring._runtime.group.point_to_point import AnySourceMatching
from multiring._runtime.named.named import NamedOperations
from multiring.errors import MultiringError, StallError

# A twentieth of the users' default: a warning after 0.2 s, an error after 0.5 s.
SURE_S = 0.5
SETTINGS: dict[str, Any] = {"stall_warn_s": 3.0, "stall_timeout_s": 60.0}


class Warnings(logging.Handler):
    """A handler that stores log messages and their times in seconds since its creation."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.after_s: list[float] = []
        self._began_s = time.monotonic()
        logging.getLogger("multiring").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self.after_s.append(time.monotonic() - self._began_s)


def operations(group: multiring.Group) -> dict[str, Any]:
    array = np.ones(4)
    return {
        "all_reduce": lambda: group.all_reduce(array),
        "all_gather_async": lambda: group.all_gather_async(array).wait(),
        "broadcast": lambda: group.broadcast(array),
        "barrier": group.barrier,
        "large": lambda: group.all_reduce(np.ones(1 << 20)),
    }


def submit(named: NamedOperations, name: str) -> Any:
    return named.submit(name, (), lambda group, label: group.all_reduce_async(np.ones(4), label=label))


@pytest.mark.parametrize(
    ("only", "ranks", "engine"),
    [
        ("all_reduce", 5, "shm"),
        ("all_reduce", 2, "tcp"),
        ("all_gather_async", 2, "shm"),
        ("barrier", 5, "tcp"),
        ("named", 4, "shm+tcp"),
        ("negotiated", 3, "shm"),
    ],
)
def test_a_call_that_one_rank_makes_alone_is_an_error(only: str, ranks: int, engine: str) -> None:
    texts = run_ranks(call_alone, ranks, only, engine=engine)
    culprit = ranks // 2
    for rank, (text, warned, seconds) in enumerate(texts):
        assert text.startswith("StallError: "), texts
        assert seconds < 20.0
        if rank == culprit or "from rank" in text:  # a rank in the circle has all the details in its own error
            assert f"rank {culprit} is at test_standoffs.py:" in text, text
            assert "in make_the_call_alone (call())" in text, text
            assert "and waits for " in text
        if rank == culprit:
            assert "in train (operations(group)[usual]())" in text, text
        assert all(str(culprit) in each for each in warned)
    # Some ranks of a circle are warned before the error.
    assert any(warned for _, warned, _ in texts), texts


def call_alone(here: Here, only: str) -> tuple[str, list[str], float]:
    group = here.join(**SETTINGS)
    other = group.subgroup(range(here.size))
    named = NamedOperations(group)
    assert other is not None
    if only == "negotiated":  # the ranks must first agree on an order
        for handle in [submit(named, name) for name in ("ab" if here.rank else "ba")]:
            handle.wait()
    group.barrier()
    logged = Warnings()
    began_s = time.monotonic()
    call = operations(other)[only] if only in operations(other) else lambda: submit(named, "loss").wait()
    try:
        if here.rank == here.size // 2:
            make_the_call_alone(call)
        train(group, "large" if only == "named" else "all_reduce")
    except MultiringError as error:
        time.sleep(1)  # the others may need a moment longer
        return f"{type(error).__name__}: {error}", logged.texts, time.monotonic() - began_s
    return "nothing", logged.texts, 0.0


def make_the_call_alone(call: Callable[[], Any]) -> None:
    call()


def train(group: multiring.Group, usual: str) -> None:
    for _ in range(1000):
        operations(group)[usual]()


def test_three_sets_in_a_circle() -> None:
    """No two of the three ranks wait for each other; only all three form a circle."""
    for text in run_ranks(go_round, 3):
        assert text.startswith("StallError"), text
        assert all(f"rank {rank} is at test_standoffs.py" in text for rank in range(3))


def go_round(here: Here) -> str:
    group = here.join(**SETTINGS)
    pairs = [group.subgroup([first, (first + 1) % 3]) for first in range(3)]
    pair = pairs[here.rank]
    assert pair is not None
    with pytest.raises(StallError) as raised:
        pair.barrier()
    return f"{type(raised.value).__name__}: {raised.value}"


def test_a_second_thread_makes_the_call() -> None:
    """A second thread makes the missing call, so the ranks warn but raise no error."""
    found = run_ranks(call_in_a_thread, 2)
    assert [total for total, _ in found] == [2.0, 2.0]
    for _, texts in found:
        assert len(texts) == 1
        assert "in wait_in_both" in texts[0]


def call_in_a_thread(here: Here) -> tuple[float, list[str]]:
    group = here.join(**SETTINGS)
    other = group.subgroup(range(2))
    assert other is not None
    group.barrier()
    logged = Warnings()
    return wait_in_both(here, group, other), logged.texts


def wait_in_both(here: Here, group: multiring.Group, other: multiring.Group) -> float:
    array = np.ones(1)
    if here.rank == 0:
        other.all_reduce(array)
        group.barrier()
        return float(array[0])

    def late() -> None:
        time.sleep(4 * SURE_S)
        other.all_reduce(array)

    thread = threading.Thread(target=late)
    thread.start()
    group.barrier()
    thread.join()
    return float(array[0])


def test_a_rank_that_only_computes_is_not_accused() -> None:
    assert run_ranks(compute, 3, engine="shm+tcp") == [[], [], []]


def compute(here: Here) -> list[str]:
    group = here.join(stall_warn_s=6.0)  # a wait of one second then leads to two inquiries
    logged = Warnings()
    group.barrier()
    if here.rank == 1:
        until_s = time.monotonic() + 2.0
        while time.monotonic() < until_s:
            pass
    group.barrier()
    if here.rank == 0:
        time.sleep(2.0)
    group.all_reduce(np.ones(3))
    return logged.texts


def test_a_call_in_flight_is_no_call_that_was_not_made() -> None:
    """Rank 1 waits for rank 0 in one group and has already posted the call for which rank 0 waits; rank 2 is late."""
    assert run_ranks(wait_for_the_late, 3) == [[], [], []]


def wait_for_the_late(here: Here) -> list[str]:
    group = here.join(stall_warn_s=6.0)
    other = group.subgroup(range(3))
    assert other is not None
    logged = Warnings()
    if here.rank == 2:
        time.sleep(2.0)
    handle = group.all_reduce_async(np.ones(3))
    if here.rank == 1:
        other.barrier()
        handle.wait()
    else:
        handle.wait()
        other.barrier()
    return logged.texts


class Control:
    """A control channel that records inquiries and allows none to the rank itself."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def add(self, address: int, listener: object) -> None:
        """Discard the listener: no inquiry is answered."""

    def send(self, rank: int, *_: object) -> bool:
        assert rank != 1
        self.asked.append(rank)
        return True


class Blamed(Waiter):
    """The wait of rank 1 after the other ranks have given up on it."""

    title = "barrier"
    key = ("operation", 1, 1)
    standoffs: Standoffs

    def stalled_on(self) -> tuple[list[int], float]:
        return [0, 1, 2], 9.0

    def wait(self) -> None:
        self.standoffs.seek(self)


def test_a_rank_that_others_gave_up_on_does_not_ask_itself() -> None:
    blamed, control = Blamed(), Control()
    blamed.standoffs = Standoffs(control, 1, SURE_S)  # type: ignore[arg-type]
    blamed.wait()
    assert control.asked == [0, 2]


@pytest.mark.parametrize(
    ("kind", "ranks", "engine"), [("recv", 2, "shm"), ("recv", 4, "tcp"), ("any source", 2, "shm")]
)
def test_a_receive_that_faces_a_collective(kind: str, ranks: int, engine: str) -> None:
    """A rank waits for a message from a rank that waits for the first one in a collective."""
    texts = run_ranks(receive_or_reduce, ranks, kind, engine=engine)
    receiver = ranks - 1
    for rank, (text, seconds) in enumerate(texts):
        assert text.startswith("StallError: "), texts
        assert seconds < 20.0
        if rank in {0, receiver}:
            assert f"rank {receiver} is at test_standoffs.py:" in text, text
            assert f"and waits for message from {'rank 0' if kind == 'recv' else 'any rank'}" in text, text
            assert "rank 0 is at test_standoffs.py:" in text, text


def receive_or_reduce(here: Here, kind: str) -> tuple[str, float]:
    group = here.join(**SETTINGS)
    matching = AnySourceMatching(group)
    group.barrier()
    began_s = time.monotonic()
    try:
        if here.rank < here.size - 1:
            group.all_reduce(np.ones(4))
        elif kind == "recv":
            group.recv(np.ones(4), 0)
        else:
            matching.recv(np.ones(4)).wait()
    except MultiringError as error:
        time.sleep(1)  # the others may need a moment longer
        return f"{type(error).__name__}: {error}", time.monotonic() - began_s
    return "nothing", 0.0


def test_messages_in_a_circle() -> None:
    for text in run_ranks(receive_round, 3):
        assert text.startswith("StallError"), text
        assert all(f"rank {rank} is at test_standoffs.py" in text for rank in range(3)), text


def receive_round(here: Here) -> str:
    group = here.join(**SETTINGS)
    group.barrier()
    with pytest.raises(StallError) as raised:
        group.recv(np.ones(4), (here.rank + 1) % 3)
    return f"{type(raised.value).__name__}: {raised.value}"


def test_every_rank_that_waits_is_in_the_verdict() -> None:
    """Ranks post two names at random moments; the error lists all waiting ranks, sorted by rank."""
    for seed, texts in enumerate(zip(*run_ranks(wait_for_two_names, 4), strict=True)):
        camps = camps_of(seed)
        told = [
            f"{ranks_in_words(camp)} {'waits' if len(camp) == 1 else 'wait'} for operation '{name}{seed}', to which "
            f"{ranks_in_words(rest)} {'has' if len(rest) == 1 else 'have'} not come"
            for name, camp, rest in (("P", camps[0], camps[1]), ("Q", camps[1], camps[0]))
        ]
        told.sort(key=lambda each: [int(digit) for digit in each.partition(" wait")[0] if digit.isdigit()])
        for rank, text in enumerate(texts):
            own = f"{'P' if rank in camps[0] else 'Q'}{seed}"
            want = f"operation '{own}': the ranks wait for each other: {'; '.join(told)}; inputs are intact"
            assert text == want


def camps_of(seed: int) -> tuple[list[int], list[int]]:
    first = [rank for rank in range(4) if (0b0101, 0b0001, 0b1110, 0b0110, 0b1100, 0b1011)[seed % 6] >> rank & 1]
    return first, [rank for rank in range(4) if rank not in first]


def ranks_in_words(ranks: list[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def wait_for_two_names(here: Here) -> list[str]:
    group = here.join(**SETTINGS)
    named = NamedOperations(group)
    found = []
    for seed in range(6):
        submit(named, f"together {seed}").wait()
        time.sleep(0.07 * ((here.rank * 7 + seed * 5) % 4))
        with pytest.raises(StallError) as raised:
            submit(named, f"{'P' if here.rank in camps_of(seed)[0] else 'Q'}{seed}").wait()
        found.append(str(raised.value))
    return found
