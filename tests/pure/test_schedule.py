"""The values of a schedule: frames, moves, layouts, extents, digests."""

from dataclasses import FrozenInstanceError, replace
from itertools import pairwise
from subprocess import run
from sys import executable, path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.schedules import counts_for, every_schedule, frame_on

from multiring._collectives import TABLE, build
from multiring._schedule import (
    NOWHERE,
    Accumulation,
    Collective,
    Counts,
    Frame,
    Kind,
    Move,
    Moves,
    Phase,
    Schedule,
    Space,
    Splits,
    Wire,
)
from multiring.errors import ScheduleError

# --- frames ---


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"grid": ()}, r"grid=\(\): want at least one axis"),
        ({"grid": (2, 0)}, r"grid=\(2, 0\): want at least one axis, each of at least one rank"),
        ({"order": (0, 1, 2)}, r"order=\(0, 1, 2\): want each of the 4 ranks"),
        ({"order": (0, 1, 2, 2)}, "want each of the 4 ranks"),
        ({"root": 4}, "root=4: want a rank below 4"),
        ({"root": -1}, "root=-1: want a rank below 4"),
        ({"root": 1}, "root=1: want a rank below 4, and 0 unless this is a broadcast"),
        ({"shares": ()}, r"shares=\(\): want a positive integer for every channel"),
        ({"shares": (1, 0)}, r"shares=\(1, 0\): want a positive integer"),
        ({"shares": (0.5,)}, r"shares=\(0.5,\): want a positive integer"),
    ],
)
def test_a_bad_frame_is_named(change: dict[str, object], match: str) -> None:
    good: dict[str, object] = {"collective": Collective.ALL_REDUCE, "grid": (2, 2), "order": (0, 1, 2, 3)}
    Frame(**good)  # type: ignore[arg-type]  # built from what the table says
    with pytest.raises(ScheduleError, match=match):
        Frame(**{**good, **change})  # type: ignore[arg-type]  # some of it wrong on purpose


def test_blocks_are_owned_along_the_axes() -> None:
    frame = Frame(collective=Collective.ALL_REDUCE, grid=(2, 3), order=(10 - 5, 1, 2, 3, 4, 0))
    # Positions 0..5 have coordinates (0,0) (1,0) (0,1) (1,1) (0,2) (1,2). Blocks follow (0,0) (0,1) (0,2) (1,0) ...
    assert frame.owners().tolist() == [5, 2, 4, 1, 3, 0]
    assert frame.coordinates_of(3) == (1, 1)
    assert frame.line_of(3, axis=0).tolist() == [2, 3]
    assert frame.line_of(3, axis=1).tolist() == [1, 3, 0]


@pytest.mark.parametrize("rank", [-1, 6])
def test_there_is_no_such_rank(rank: int) -> None:
    schedule = build("ring", frame_on(Collective.ALL_REDUCE, (2, 3)))
    with pytest.raises(ScheduleError, match=f"rank={rank}: want 0 to 5"):
        schedule.moves_of(rank)
    with pytest.raises(ScheduleError, match=f"rank={rank}: want 0 to 5"):
        schedule.extents_of(rank, 10)


# --- moves ---

ROWS = st.builds(
    Move,
    kind=st.sampled_from(Kind),
    channel=st.integers(0, 3),
    src=st.integers(-1, 9),
    dst=st.integers(-1, 9),
    span=st.integers(1, 4),
    last=st.booleans(),
    peers=st.lists(st.integers(0, 9), max_size=4).map(tuple),
)


@given(st.lists(ROWS, max_size=8), st.data())
def test_moves_hold_rows_and_give_them_back(rows: list[Move], data: st.DataObject) -> None:
    moves = Moves.of(rows)
    assert list(moves.rows()) == rows
    assert len(moves) == len(rows)
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=9) if rows else st.just([]))
    assert list(moves.take(np.array(picked, np.intp)).rows()) == [rows[at] for at in picked]
    assert list(Moves.concatenate([moves, Moves.of([]), moves]).rows()) == rows + rows
    assert list(Moves.concatenate([]).rows()) == []


def test_moves_have_the_types_the_executor_reads_and_cannot_be_written() -> None:
    for schedule in every_schedule((2, 3)):
        moves = schedule.moves_of(4)
        types = {name: getattr(moves, name).dtype.str[1:] for name in Moves.__slots__}
        assert types == {
            "kind": "u1",
            "channel": "u2",
            "src": "i4",
            "dst": "i4",
            "span": "i4",
            "last": "b1",
            "peer_start": "i4",
            "peers": "i4",
            "wire": "u1",
        }
        with pytest.raises(ValueError, match="read-only"):
            moves.src[:] = 0
        with pytest.raises(FrozenInstanceError):
            moves.src = moves.dst  # type: ignore[misc]  # what must not work


def test_the_numbers_of_kinds_and_spaces_are_the_executors() -> None:
    assert [(kind.name, int(kind)) for kind in Kind] == [("SEND", 0), ("COPY", 1), ("REDUCE", 2)]
    assert [(space.name, int(space)) for space in Space] == [("INPUT", 0), ("OUTPUT", 1), ("SCRATCH", 2)]
    assert [(each.name, int(each)) for each in Accumulation] == [("SAME", 0), ("WIDE", 1), ("ONCE", 2)]
    assert [(each.name, int(each)) for each in Wire] == [("NONE", 0), ("FP16", 1), ("BF16", 2), ("INT8", 3)]
    assert NOWHERE == -1


# --- extents ---


def _spans_of_space(schedule: Schedule, rank: int, counts: Counts, space: Space) -> list[tuple[int, int]]:
    extents = schedule.extents_of(rank, counts)
    mine = extents.space == space
    return sorted(zip(extents.offset[mine].tolist(), extents.count[mine].tolist(), strict=True))


@given(elements=st.integers(0, 5000), p=st.integers(1, 9), shares=st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_an_even_split_covers_the_buffer_at_whole_vectors(elements: int, p: int, shares: list[int]) -> None:
    schedule = build("ring", frame_on(Collective.ALL_REDUCE, (p,), shares=tuple(shares)))
    spans = _spans_of_space(schedule, 0, elements, Space.OUTPUT)
    assert sum(count for _, count in spans) == elements
    assert all(start + count == following for (start, count), (following, _) in pairwise(spans))
    assert all(start % 16 == 0 for start, count in spans if count)
    # Every piece is within two grains of its exact share.
    exact = sorted(elements * share / sum(shares) / p for share in shares for _ in range(p))
    assert all(abs(a - b) <= 32 + 16 for a, b in zip(sorted(count for _, count in spans), exact, strict=True))


def test_shares_divide_the_buffer_among_channels() -> None:
    schedule = build("direct", frame_on(Collective.BROADCAST, (2,), shares=(3, 1)))
    assert _spans_of_space(schedule, 1, 1600, Space.OUTPUT) == [(0, 1200), (1200, 400)]
    schedule = build("direct", frame_on(Collective.ALL_GATHER, (2,), shares=(3, 1)))
    # Every rank's block is split among the channels, and the pieces of a block are adjacent.
    assert _spans_of_space(schedule, 1, [64, 640], Space.INPUT) == [(0, 480), (480, 160)]
    assert _spans_of_space(schedule, 1, [64, 640], Space.OUTPUT) == [(0, 48), (48, 16), (64, 480), (544, 160)]


def test_blocks_of_a_user_lie_by_rank_whatever_the_grid() -> None:
    counts = [7, 0, 20, 3, 5, 11]
    schedule = build("ring", frame_on(Collective.ALL_GATHER, (2, 3), shuffled=True))
    blocks = [(0, 7), (7, 0), (7, 20), (27, 3), (30, 5), (35, 11)]
    for rank in range(6):
        extents = schedule.extents_of(rank, counts)
        of_block = dict(
            zip(schedule.frame.owners().tolist(), zip(extents.offset[1:], extents.count[1:], strict=True), strict=True)
        )
        assert [of_block[owner] for owner in range(6)] == blocks
        assert (int(extents.offset[0]), int(extents.count[0])) == (0, counts[rank])


def test_scratch_is_as_large_as_what_is_written_there() -> None:
    counts = [10, 20, 30, 40]
    for algorithm, grid, want in [
        ("direct", (4,), 0),  # reduced straight into OUTPUT
        ("ring", (4,), 30 + 40),  # partial sums, without the rank's own block and the block that it only forwards
        ("direct", (2, 2), 20 + 40),  # rank 1 keeps blocks 1 and 3 after the first axis
    ]:
        schedule = build(algorithm, frame_on(Collective.REDUCE_SCATTER, grid))
        extents = schedule.extents_of(1, counts)
        assert extents.scratch_count == want
        used = extents.space == Space.SCRATCH
        assert extents.count[used].sum() == want
        assert all(schedule.extents_of(1, each).scratch_count == 0 for each in ([0] * 4,))


@pytest.mark.parametrize("grid", [(1,), (5,), (2, 3), (2, 1, 2)], ids=str)
def test_moves_stay_within_extents(grid: tuple[int, ...]) -> None:
    for schedule in every_schedule(grid):
        for rank in range(schedule.ranks):
            moves, extents = schedule.moves_of(rank), schedule.extents_of(rank, counts_for(schedule)[rank])
            for first in (moves.src, moves.dst):
                rows = first != NOWHERE
                assert (first[rows] + moves.span[rows] <= len(extents.count)).all()


@pytest.mark.parametrize(
    ("collective", "counts", "match"),
    [
        (Collective.ALL_REDUCE, [5, 5], "all_reduce wants one number of elements"),
        (Collective.ALL_REDUCE, -1, "counts=-1"),
        (Collective.BROADCAST, Splits([1, 1], [1, 1]), "broadcast wants one number"),
        (Collective.ALL_GATHER, 5, "all_gather wants the elements of every rank's block"),
        (Collective.REDUCE_SCATTER, Splits([1, 1], [1, 1]), "reduce_scatter wants the elements of every rank's block"),
        (Collective.ALL_GATHER, [5], r"counts=\[5\]: want 2 numbers"),
        (Collective.ALL_GATHER, [5, -5], r"counts=\[5, -5\]: want 2 numbers of elements >= 0"),
        (Collective.ALL_TO_ALL, [5, 5], r"all_to_all wants Splits\(send, receive\)"),
        (Collective.ALL_TO_ALL, Splits([1, 1], [1]), r"counts=\[1\]: want 2 numbers"),
    ],
)
def test_counts_of_another_form_are_named(collective: Collective, counts: Counts, match: str) -> None:
    schedule = build("direct", frame_on(collective, (2,)))
    with pytest.raises(ScheduleError, match=match):
        schedule.extents_of(0, counts)


# --- schedules ---


def test_a_phase_needs_its_axis() -> None:
    schedule = build("ring", frame_on(Collective.ALL_REDUCE, (2, 3)))
    for axis in (-1, 2):
        with pytest.raises(ScheduleError, match=f"ring_reduce_scatter along axis {axis}: grid"):
            replace(schedule, phases=(Phase(axis, schedule.phases[0].pattern),))


def _identities() -> dict[str, str]:
    schedules = [schedule for grid in ((6,), (2, 3), (3, 2), (1, 6)) for schedule in every_schedule(grid)]
    schedules += [build("tree", replace(frame_on(Collective.BROADCAST, (6,)), root=root)) for root in (0, 1)]
    return {f"{s} {s.order} {s.shares} {s.accumulation}": s.digest().hex() for s in schedules}


def test_digests_tell_schedules_apart() -> None:
    identities = _identities()
    assert len(set(identities.values())) == len(identities)
    assert all(len(bytes.fromhex(digest)) == 16 for digest in identities.values())


def test_digests_are_the_same_in_every_process_and_version() -> None:
    # Fixed values, because ranks compare digests across processes and checkpoints store them.
    frame = Frame(collective=Collective.ALL_REDUCE, grid=(2, 3), order=(0, 1, 2, 3, 4, 5))
    assert build("direct", frame).digest().hex() == "522583e0eaa113de7fa258861462c177"
    assert build("ring", frame).digest().hex() == "fa554adc3c1926b12778f2f3ce00bd5b"
    program = "from tests.pure.test_schedule import _identities; print(sorted(_identities().items()))"
    done = run([executable, "-c", program], check=True, capture_output=True, text=True, env=_other_hash_seed())
    assert done.stdout.strip() == str(sorted(_identities().items()))


def _other_hash_seed() -> dict[str, str]:
    return {"PYTHONHASHSEED": "12345", "PYTHONPATH": ":".join(path)}


def test_a_schedule_says_what_it_does() -> None:
    frame = frame_on(Collective.BROADCAST, (2, 3), shares=(2, 1))
    schedule = build("tree", frame)
    assert schedule.describe().splitlines() == [
        "tree broadcast on 2 x 3 ranks, root 3, channels 2:1",
        "  axis 2: tree_broadcast on 2 lines of 3 ranks",
        "  axis 1: tree_broadcast on 3 lines of 2 ranks",
    ]
    wide = build("direct", frame_on(Collective.ALL_REDUCE, (4,)), Accumulation.WIDE)
    assert str(wide) == "direct all_reduce on 4 ranks, wide accumulation"


def test_one_rank_needs_no_messages() -> None:
    for collective, algorithm in TABLE:
        for grid in ((1,), (1, 1)):
            moves = list(build(algorithm, frame_on(collective, grid)).moves_of(0).rows())
            in_place = collective in {Collective.ALL_REDUCE, Collective.BROADCAST}
            assert moves == ([] if in_place else [Move(Kind.COPY, 0, 0, 1, 1, False, (0,))])
