"""all_gather and all_to_all with uneven rows: a single operation if rows are even, correct results in any case."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import ENGINES, Here, run_ranks

import multiring
from multiring import Group
from multiring.errors import ArgumentError, MismatchError, MultiringError

Array = Any
RowsOf = Callable[[int], int]  # rank -> rows


def part(rank: int, rows: int, dtype: str = "float32") -> Array:
    return np.arange(rows * 3).reshape(rows, 3).astype(dtype) + 50 * rank


def gathered(rows: RowsOf, size: int, dtype: str = "float32") -> Array:
    return np.concatenate([part(rank, rows(rank), dtype) for rank in range(size)])


def splits_of(rank: int, rows: RowsOf, size: int) -> list[int]:
    """Return the rows that `rank` sends to each other rank; they are equal if `rows` is constant."""
    return [rows((rank + to) % size) for to in range(size)]


def exchanged(rank: int, rows: RowsOf, size: int) -> Array:
    found = []
    for sender in range(size):
        sent = splits_of(sender, rows, size)
        start = sum(sent[:rank])
        found.append(part(sender, sum(sent))[start : start + sent[rank]])
    return np.concatenate(found)


def names() -> list[str]:
    """Return the names of the operations since the last call."""
    return [event.name for event in multiring.drain_events() if event.kind == "operation"]


def even(_: int) -> int:
    return 4


def more(_: int) -> int:
    return 1000


def growing(rank: int) -> int:
    return 2 + rank


def one_has_none(rank: int) -> int:
    return 5 * (rank != 0)


PATTERNS: dict[str, tuple[RowsOf, ...]] = {
    "even": (even, more, even),
    "uneven": (growing, one_has_none, growing),
    "alternating": (even, growing, even, growing, even, even),
    "none": (lambda _: 0, even, lambda _: 0),
}
# Number of operations a call takes. After an uneven call, ranks count rows first until rows are even again.
AT_ONCE, COUNTED, SURPRISED = 1, 2, 3
OPERATIONS = {
    "even": (AT_ONCE, AT_ONCE, AT_ONCE),
    "uneven": (SURPRISED, COUNTED, COUNTED),
    "alternating": (AT_ONCE, SURPRISED, COUNTED, SURPRISED, COUNTED, AT_ONCE),
    "none": (AT_ONCE, AT_ONCE, AT_ONCE),
}


def follow(here: Here) -> dict[tuple[str, str], list[list[str]]]:
    """Run every pattern with both collectives, each in its own group; return the operations of each call."""
    world = here.join()
    taken: dict[tuple[str, str], list[list[str]]] = {}
    for pattern, collective in itertools.product(PATTERNS, ("all_gather", "all_to_all")):
        group = world.subgroup(range(here.size))
        assert group is not None
        names()
        for rows in PATTERNS[pattern]:
            if collective == "all_gather":
                result = group.all_gather(part(here.rank, rows(here.rank)))
                want = gathered(rows, here.size)
            else:
                sent = splits_of(here.rank, rows, here.size)
                result = group.all_to_all(part(here.rank, sum(sent)), splits=sent)
                want = exchanged(here.rank, rows, here.size)
            np.testing.assert_array_equal(result, want, strict=True)
            taken.setdefault((pattern, collective), []).append(names())
    return taken


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_operations_that_a_call_takes(engine: str, ranks: int) -> None:
    by_rank = run_ranks(follow, ranks, engine=engine)
    for (pattern, collective), calls in by_rank[0].items():
        one_way = {AT_ONCE: [collective], COUNTED: ["counts", collective]}
        # Ranks with uneven splits of their own count from the start, so they make no wrong assumption.
        surprise = ["counts", collective] if collective == "all_to_all" else [collective, "counts", collective]
        want = [{**one_way, SURPRISED: surprise}[AT_ONCE if ranks == 1 else each] for each in OPERATIONS[pattern]]
        assert calls == want, (pattern, collective)
    assert all(taken == by_rank[0] for taken in by_rank)


@pytest.mark.parametrize("path", [{"lower": False}, {"read_peers": False}])
def test_every_way_through_a_host(path: dict[str, Any]) -> None:
    assert run_ranks(follow, 3, **path) == run_ranks(follow, 3)


def too_large_if_even(here: Here) -> list[str]:
    """Gather rows whose assumed even size exceeds the segment, while the actual sizes fit."""
    group = here.join(segment_bytes=64 << 20)
    rows = (12 << 20) if here.rank == 0 else (4 << 20) + here.rank
    mine = np.full(rows, here.rank, np.uint8)
    names()
    result = group.all_gather(mine)
    assert [int((result == rank).sum()) for rank in range(here.size)] == [12 << 20, *((4 << 20) + k for k in (1, 2, 3))]
    return names()


def test_what_is_assumed_need_not_fit() -> None:
    assert run_ranks(too_large_if_even, 4) == [["all_gather", "counts", "all_gather"]] * 4


def only_some_expect_it(here: Here) -> list[list[str]]:
    """Let ranks differ in their expectation: some assume even rows, some count, some have uneven splits."""
    group = here.join()
    size, own = here.size, here.rank
    taken = []
    names()
    # Even splits with different row counts; then uneven splits on one rank only.
    rows = own + 1
    result = group.all_to_all(part(own, rows * size))
    want = [part(sender, (sender + 1) * size)[(sender + 1) * own :][: sender + 1] for sender in range(size)]
    np.testing.assert_array_equal(result, np.concatenate(want))
    taken.append(names())
    group.all_to_all(part(own, size))  # all rows are even: ranks stop counting
    names()
    sent = [2, *[1] * (size - 2), 0] if own == 0 else [1] * size
    result = group.all_to_all(part(own, size), splits=sent)
    assert len(result) == size - 1 + [2, *[1] * (size - 2), 0][own]
    taken.append(names())
    # `out` fits the actual total. Assumed even rows would need another size, except by chance on rank 0.
    counts = [3, *range(1, size - 1), 3 * size - 3 - sum(range(1, size - 1))]
    out = np.zeros((sum(counts), 3), np.float32)
    assert group.all_gather(part(own, counts[own]), out=out) is out
    np.testing.assert_array_equal(out, gathered(counts.__getitem__, size))
    taken.append(names())
    # Each combination of type and shape has its own history.
    group.all_gather(part(own, 2, "int8"))
    group.all_gather(np.ones((2, 5), np.float32))
    taken.append(names())
    return taken


@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_need_not_expect_the_same(engine: str) -> None:
    by_rank = run_ranks(only_some_expect_it, 3, engine=engine)
    for rank, (rows, splits, out, others) in enumerate(by_rank):
        assert rows == ["all_to_all", "counts", "all_to_all"]
        assert splits == ["counts" if rank == 0 else "all_to_all", "counts", "all_to_all"]
        assert out == ["all_gather" if rank == 0 else "counts", "counts", "all_gather"]
        assert others == ["all_gather"] * 2


def told_by(call: Callable[[], Any]) -> str:
    with pytest.raises(MultiringError) as raised:
        call()
    return f"{type(raised.value).__name__}: {raised.value}"


def go_wrong(here: Here) -> list[str]:
    """Make mistakes while the others assume even rows, count, or find uneven rows; the group must stay usable."""
    group = here.join()
    odd = here.rank == 1
    told = []
    for expected in (even, growing, growing):
        rows = expected(here.rank)
        mine = part(here.rank, rows)
        before = mine.copy()
        told.append(told_by(lambda mine=mine: group.all_gather([1.0] if odd else mine)))  # type: ignore[misc]
        told.append(told_by(lambda mine=mine: group.all_gather(mine.astype("int8") if odd else mine)))  # type: ignore[misc]
        told.append(told_by(lambda mine=mine: group.all_gather(mine, out=mine[:1].copy() if odd else None)))  # type: ignore[misc]
        told.append(told_by(lambda mine=mine: group.barrier() if odd else group.all_gather(mine)))  # type: ignore[misc]
        np.testing.assert_array_equal(mine, before)
        np.testing.assert_array_equal(group.all_gather(mine), gathered(expected, here.size))
    everyone = np.zeros((1, 3), np.float32)
    told.append(told_by(lambda: group.all_gather(part(here.rank, 4), out=everyone)))
    group.barrier()
    return told


@pytest.mark.parametrize("engine", ENGINES)
def test_mistakes_hang_nobody(engine: str) -> None:
    for rank, told in enumerate(run_ranks(go_wrong, 3, engine=engine)):
        for no_array, other_type, small, barrier in zip(*[iter(told[:12])] * 4, strict=True):
            fact = "list is no array; want NumPy, DLPack or the buffer protocol"
            assert fact in no_array
            assert no_array.startswith(ArgumentError.__name__ if rank == 1 else MismatchError.__name__), no_array
            camps = "rank 1: all_gather of int8 rows of 3; ranks 0, 2: all_gather of float32 rows of 3; inputs are"
            assert camps in other_type
            assert "out of shape (1, 3), float32: want shape (" in small
            assert small.startswith(ArgumentError.__name__ if rank == 1 else MismatchError.__name__), small
            assert "rank 1: barrier; ranks 0, 2: all_gather of float32 rows of 3; inputs are intact" in barrier
        assert told[12] == "ArgumentError: out of shape (1, 3), float32: want shape (12, 3), float32, row-major"


def many_in_flight(here: Here) -> None:
    """Start even and uneven operations at once, so that ranks learn of uneven rows at different times."""
    group = here.join()
    patterns = [even, growing, growing, even, one_has_none, even, even, growing] * 3
    handles = [group.all_gather_async(part(here.rank, rows(here.rank))) for rows in patterns]
    handles += [
        group.all_to_all_async(part(here.rank, sum(sent)), splits=sent)
        for sent in (splits_of(here.rank, rows, here.size) for rows in patterns)
    ]
    for handle, rows in zip(handles, patterns, strict=False):
        np.testing.assert_array_equal(handle.wait(), gathered(rows, here.size))
    for handle, rows in zip(handles[len(patterns) :], patterns, strict=True):
        np.testing.assert_array_equal(handle.wait(), exchanged(here.rank, rows, here.size))
    assert all(handle.done() for handle in handles)


@pytest.mark.parametrize("engine", ENGINES)
def test_many_in_flight(engine: str) -> None:
    run_ranks(many_in_flight, 3, engine=engine)


def nobody_waits(here: Here) -> None:
    """Start an uneven operation, and let one rank not wait for it; the other rank must not depend on that wait."""
    group = here.join()
    handle = group.all_gather_async(part(here.rank, growing(here.rank)))
    if here.rank == 0:
        np.testing.assert_array_equal(handle.wait(), gathered(growing, here.size))
        group.send(np.ones(1), 1)
    else:
        group.recv(np.ones(1), 0)
        assert handle.wait(240) is not None


def test_an_uneven_one_goes_on_without_being_waited_for() -> None:
    run_ranks(nobody_waits, 2)


def in_place(here: Here) -> tuple[list[int], str]:
    """Gather in place; return the bytes of each move, and the error for a wrong place."""
    group = here.join(log_moves=True)
    for rows, in_arena in itertools.product((even, growing, more), (True, False)):
        want = gathered(rows, here.size)
        out = group.allocate(want.shape, "float32") if in_arena else np.empty_like(want)
        start = sum(rows(rank) for rank in range(here.rank))
        own = out[start : start + rows(here.rank)]
        out[:] = -1
        own[:] = part(here.rank, rows(here.rank))
        assert group.all_gather(own, out=out) is out
        np.testing.assert_array_equal(out, want)
    moved = [entry.size_bytes for entry in group._calls.latest.log]
    memory = np.ones((1 + len(out), 3), np.float32)
    told = told_by(lambda: group.all_gather(memory[1 + start : 1001 + start], out=memory[:-1]))
    assert (memory == 1).all()
    return moved, told


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_in_place(engine: str, ranks: int) -> None:
    for moved, told in run_ranks(in_place, ranks, engine=engine):
        assert moved[0] == 0  # the rank's own part was not copied
        assert all(size > 0 for size in moved[1:])
        assert told.startswith("ArgumentError: out shares memory with the array")


def nothing_in_a_row(here: Here) -> None:
    """Gather rows without elements, whose number cannot be computed from their bytes."""
    group: Group = here.join()
    assert group.all_gather(np.ones((2 + here.rank, 0))).shape == (sum(2 + rank for rank in range(here.size)), 0)
    assert group.all_gather(np.ones((2, 0))).shape == (2 * here.size, 0)


def test_rows_of_nothing_are_counted_too() -> None:
    run_ranks(nothing_in_a_row, 3)
