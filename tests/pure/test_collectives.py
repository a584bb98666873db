"""The table of algorithms, and the steps, messages and blocks of each, as docs/algorithms.md states them."""

import math

import pytest
from tests.support.schedules import all_moves, frame_on

from multiring._collectives import TABLE, algorithms_of, build
from multiring._schedule import SUMS, Accumulation, Collective, Kind, Moves
from multiring.errors import ScheduleError


def _sent(moves: Moves) -> tuple[int, int]:
    """Return the numbers of messages and of chunks that a rank sends."""
    sends = [move for move in moves.rows() if move.kind is Kind.SEND]
    return sum(len(move.peers) for move in sends), sum(move.span * len(move.peers) for move in sends)


def test_every_collective_has_an_algorithm() -> None:
    assert {collective for collective, _ in TABLE} == set(Collective)
    assert algorithms_of(Collective.BROADCAST) == ("direct", "tree")


def test_an_unknown_algorithm_lists_the_known_ones() -> None:
    with pytest.raises(
        ScheduleError, match="no algorithm 'tree' for all_reduce; known are direct, exchange, ring, direct_ring"
    ):
        build("tree", frame_on(Collective.ALL_REDUCE, (2,)))


@pytest.mark.parametrize("algorithm", ["ring", "direct_ring"])
@pytest.mark.parametrize("accumulation", [Accumulation.WIDE, Accumulation.ONCE])
def test_a_ring_refuses_to_accumulate_wide(algorithm: str, accumulation: Accumulation) -> None:
    for collective in SUMS:
        with pytest.raises(ScheduleError, match=f"cannot accumulate {accumulation.name.lower()}: use direct"):
            build(algorithm, frame_on(collective, (4,)), accumulation)


def test_what_sums_nothing_accumulates_nothing() -> None:
    for collective, algorithm in TABLE:
        if collective not in SUMS:
            schedule = build(algorithm, frame_on(collective, (4,)), Accumulation.WIDE)
            assert schedule.accumulation is Accumulation.SAME


@pytest.mark.parametrize("p", [1, 2, 3, 8, 13])
def test_a_ring_takes_twice_p_minus_one_steps_to_the_next_rank(p: int) -> None:
    for rank, moves in all_moves(build("ring", frame_on(Collective.ALL_REDUCE, (p,)))).items():
        assert _sent(moves) == (2 * (p - 1), 2 * (p - 1))
        assert set(moves.peers.tolist()) <= {(rank - 1) % p, rank, (rank + 1) % p}
        kinds = [move.kind for move in moves.rows()]
        assert kinds == [Kind.SEND, Kind.REDUCE] * (p - 1) + [Kind.SEND, Kind.COPY] * (p - 1)


@pytest.mark.parametrize("p", [2, 3, 8, 13])
def test_direct_reduces_once_from_all_ranks_in_their_order(p: int) -> None:
    for rank, moves in all_moves(build("direct", frame_on(Collective.ALL_REDUCE, (p,)))).items():
        assert _sent(moves) == (2 * (p - 1), 2 * (p - 1))
        (reduce,) = [move for move in moves.rows() if move.kind is Kind.REDUCE]
        assert reduce.peers == tuple(range(p))
        assert (reduce.dst, reduce.last) == (rank, True)


@pytest.mark.parametrize("grid", [(4,), (2, 3), (4, 3), (2, 3, 2), (3, 1, 2)], ids=str)
@pytest.mark.parametrize("algorithm", ["direct", "ring", "direct_ring"])
def test_a_grid_moves_the_flat_rings_bytes_in_fewer_messages(algorithm: str, grid: tuple[int, ...]) -> None:
    p = math.prod(grid)
    for moves in all_moves(build(algorithm, frame_on(Collective.ALL_REDUCE, grid))).values():
        assert _sent(moves) == (2 * sum(size - 1 for size in grid), 2 * (p - 1))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8, 13, 16, 17])
def test_a_tree_reaches_everyone_in_the_logarithm_of_p_hops(p: int) -> None:
    schedule = build("tree", frame_on(Collective.BROADCAST, (p,)))
    programs = {rank: list(moves.rows()) for rank, moves in all_moves(schedule).items()}
    rounds, have = 0, {schedule.root}
    # In each round, a rank with the data sends to its next unserved child.
    served = dict.fromkeys(programs, 0)
    while len(have) < p:
        rounds += 1
        for rank in sorted(have):
            children = [peer for move in programs[rank] if move.kind is Kind.SEND for peer in move.peers]
            if served[rank] < len(children):
                have.add(children[served[rank]])
                served[rank] += 1
    assert rounds == (p - 1).bit_length()
    copies = [move for moves in programs.values() for move in moves if move.kind is Kind.COPY]
    assert len(copies) == p - 1


def test_a_direct_broadcast_is_one_offer() -> None:
    schedule = build("direct", frame_on(Collective.BROADCAST, (5,)))
    programs = all_moves(schedule)
    assert [(len(moves), _sent(moves)[0]) for moves in programs.values()] == [(1, 4 * (r == 2)) for r in range(5)]


@pytest.mark.parametrize("p", [1, 2, 5, 8])
def test_an_exchange_sends_one_block_to_each_and_copies_its_own(p: int) -> None:
    for rank, moves in all_moves(build("direct", frame_on(Collective.ALL_TO_ALL, (p,)))).items():
        assert _sent(moves) == (p - 1, p - 1)
        assert [move.peers for move in moves.rows() if move.kind is Kind.COPY and move.src >= 0] == [(rank,)]


@pytest.mark.parametrize("p", [3, 8])
def test_direct_serves_each_receiver_by_one_sender_at_a_time(p: int) -> None:
    for collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER, Collective.ALL_TO_ALL):
        programs = all_moves(build("direct", frame_on(collective, (p,))))
        turns = [
            [peer for move in moves.rows() if move.kind is Kind.SEND for peer in move.peers]
            for moves in programs.values()
        ]
        assert all(len(set(receivers)) == p for receivers in zip(*turns, strict=True))


def test_an_exchange_lays_a_grid_out_as_one_axis() -> None:
    assert build("direct", frame_on(Collective.ALL_TO_ALL, (2, 3))).grid == (6,)
