"""Wrong schedules: every change of a move, random changes, and moves in another order, against both proofs.

tests/pure/test_check.py tries a part of them, and benchmarks/evidence/schedules/main.py tries all.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from tests.support.schedules import all_moves, counts_for

from multiring._schedule import Collective, Kind, Move, Moves, Phase, Schedule, check, check_moves
from multiring.errors import ScheduleError


def mutants_of(moves: list[Move], ranks: int, chunks: int) -> list[tuple[str, list[Move]]]:
    """Return every program that differs from `moves` in one move: dropped, doubled, or with one wrong field."""
    found = []
    for index, move in enumerate(moves):
        head, tail = moves[:index], moves[index + 1 :]
        found.append((f"drop {index}", head + tail))
        found.append((f"double {index}", [*head, move, move, *tail]))
        found += [(f"{index}: {move} becomes {wrong}", [*head, wrong, *tail]) for wrong in _wrong(move, ranks, chunks)]
    return found


def _wrong(move: Move, ranks: int, chunks: int) -> list[Move]:
    wrong = [move._replace(kind=kind) for kind in Kind if kind is not move.kind]
    wrong += [move._replace(src=chunk) for chunk in range(-1, chunks) if chunk != move.src]
    wrong += [move._replace(dst=chunk) for chunk in range(-1, chunks) if chunk != move.dst]
    wrong += [move._replace(span=span) for span in (move.span - 1, move.span + 1)]
    wrong += [move._replace(last=not move.last), move._replace(channel=move.channel + 1)]
    for at, peer in enumerate(move.peers):
        others = [(*move.peers[:at], other, *move.peers[at + 1 :]) for other in range(ranks) if other != peer]
        others.append(move.peers[:at] + move.peers[at + 1 :])
        others.append((*move.peers, peer))
        wrong += [move._replace(peers=peers) for peers in others]
    return wrong


def _is_the_same_read(collective: Collective, program: list[Move], mutant: list[Move]) -> bool:
    """Return whether the mutant only reads copied data from another place with the same bytes.

    An all_gather may send its own block from INPUT. An exchange may combine its own operand from OUTPUT, but must not
    send it from there. Between two axes it may do both with the partial sum. No move has written either place since
    the copy, so these are the only other correct programs.
    """
    pairs = [(before, after) for before, after in zip(program, mutant, strict=False) if before != after]
    kinds = {Kind.SEND} if collective is Collective.ALL_GATHER else {Kind.REDUCE, Kind.SEND}
    copies = [move for move in program if move.kind is Kind.COPY and move.src >= 0]
    return (
        len(program) == len(mutant)
        and len(pairs) == 1
        and pairs[0][0].kind in kinds
        and any(pairs[0] == (pairs[0][0]._replace(src=copy.dst), pairs[0][0]._replace(src=copy.src)) for copy in copies)
    )


def survivors(schedule: Schedule, rank: int, mutants: list[tuple[str, list[Move]]]) -> list[str]:
    """Return the names of wrong mutants that the proof of all moves accepts."""
    programs, found = all_moves(schedule), []
    original = list(programs[rank].rows())
    for name, mutant in mutants:
        try:
            check_moves(schedule, {**programs, rank: Moves.of(mutant)})
        except ScheduleError:
            continue
        if not _is_the_same_read(schedule.collective, original, mutant):
            found.append(name)
    return found


def of_small(schedule: Schedule, step: int) -> list[str]:
    """Return the accepted mutants of the first and last rank, of which each `step`-th is tried."""
    found, chunks = [], len(schedule.extents_of(0, counts_for(schedule)[0]).count)
    for rank in (0, schedule.ranks - 1):
        mutants = mutants_of(list(schedule.moves_of(rank).rows()), schedule.ranks, chunks)
        found += survivors(schedule, rank, mutants[rank % step :: step])
    return found


def of_large(schedule: Schedule, generator: np.random.Generator, draws: int) -> list[str]:
    """Return the accepted mutants of two random ranks, of which `draws` random ones are tried for each rank."""
    found, chunks = [], len(schedule.extents_of(0, counts_for(schedule)[0]).count)
    for rank in generator.integers(0, schedule.ranks, 2).tolist():
        mutants = mutants_of(list(schedule.moves_of(rank).rows()), schedule.ranks, chunks)
        found += survivors(schedule, rank, [mutants[at] for at in generator.choice(len(mutants), draws)])
    return found


def _mutated(program: Callable[[int, int], Moves], at: int, mutant: list[Move], p: int, i: int) -> Moves:
    return Moves.of(mutant) if i == at and p == 3 else program(p, i)


def of_patterns(schedule: Schedule, step: int) -> list[str]:
    """Return the mutants of the patterns of a line of 3 that the rule accepts.

    Each `step`-th mutant of the coordinates 0 and 2 is tried, from a different one on.
    """
    found = []
    for number, phase in enumerate(schedule.phases):
        for start, at in enumerate((0, 2)):
            program = list(phase.pattern.program(3, at).rows())
            for name, mutant in mutants_of(program, ranks=3, chunks=3)[start % step :: step]:
                wrong = replace(phase.pattern, program=partial(_mutated, phase.pattern.program, at, mutant))
                phases = list(schedule.phases)
                phases[number] = Phase(0, wrong)
                try:
                    check(replace(schedule, phases=tuple(phases)))
                except ScheduleError:
                    continue
                found.append(name)
    return found


def _race(programs: dict[int, list[Move]], chunks: int, generator: np.random.Generator) -> list[list[int]] | None:
    """Run an all_reduce in a random order that reads offered memory as late as possible; return None on a deadlock.

    This oracle shares no code with the proof. Rank r's contribution to chunk c is (c + 1) 64^r.
    """
    memory = {rank: [(chunk + 1) * 64**rank for chunk in range(chunks)] for rank in programs}
    offers: dict[tuple[int, int], list[tuple[int, int]]] = {}
    done = dict.fromkeys(programs, 0)
    while any(done[rank] < len(program) for rank, program in programs.items()):
        able = [rank for rank, program in programs.items() if done[rank] < len(program)]
        able = [
            rank
            for rank in able
            if programs[rank][done[rank]].kind is Kind.SEND
            or all(peer == rank or offers.get((peer, rank)) for peer in programs[rank][done[rank]].peers)
        ]
        if not able:
            return None
        rank = int(generator.choice(able))
        move = programs[rank][done[rank]]
        done[rank] += 1
        if move.kind is Kind.SEND:
            for peer in move.peers:
                offers.setdefault((rank, peer), []).append((move.src, move.span))
            continue
        total = np.zeros(move.span, object)
        for peer in move.peers:
            first, span = (move.src, move.span) if peer == rank else offers[peer, rank].pop(0)
            total = total + np.array(memory[peer][first : first + span], object)
        memory[rank][move.dst : move.dst + move.span] = total.tolist()
    return [memory[rank] for rank in sorted(memory)]


def races(schedule: Schedule, generator: np.random.Generator, rounds: int) -> dict[str, int]:
    """Move one move of an all_reduce elsewhere, `rounds` times. Count the verdicts, and those that races contradict."""
    p = schedule.ranks
    right = [[(chunk + 1) * sum(64**rank for rank in range(p)) for chunk in range(p)]] * p
    original = {rank: list(moves.rows()) for rank, moves in all_moves(schedule).items()}
    assert _race(original, p, generator) == right
    outcomes = {"accepted": 0, "refused": 0, "caught in the act": 0, "accepted and wrong": 0}
    for _ in range(rounds):
        rank = int(generator.integers(p))
        program = list(original[rank])
        program.insert(int(generator.integers(len(program))), program.pop(int(generator.integers(len(program)))))
        programs = {**original, rank: program}
        wrong = any(_race(programs, p, generator) != right for _ in range(6))
        try:
            check_moves(schedule, {each: Moves.of(moves) for each, moves in programs.items()})
        except ScheduleError:
            outcomes["refused"] += 1
            outcomes["caught in the act"] += wrong
        else:
            outcomes["accepted"] += 1
            outcomes["accepted and wrong"] += wrong
    return outcomes
