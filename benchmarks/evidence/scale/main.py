"""Test a thousand ranks and more on one machine.

    python benchmarks/evidence/scale/main.py [--only lines,drawn,altered,memory]

The first three claims run no ranks: they prove schedules, which are plain values. Their times are processor times, so
other load does not count. The claim `memory` runs 64 ranks and measures the memory that they keep. The printed table is
kept in benchmarks/results/.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import process_time

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import benchmarks/evidence/jobs/main.py's report

from benchmarks.evidence.support.claims import Claim, report

from multiring._collectives import TABLE, build
from multiring._schedule import Collective, Frame, Moves, Pattern, Phase, Schedule, check
from multiring._settings import inherited_environment
from multiring.errors import ScheduleError

LINE, LINE_S = 1024, 2.0
LONG, DRAWN, LONG_S = 32_768, 512, 60.0
RANKS, SWAPPED_MIB, KEPT_MIB = 64, 64, 64


def lines(_: int) -> Iterator[Claim]:
    """Prove every algorithm on a flat line, comparing all ranks."""
    yield from _proofs(LINE, None, LINE_S)


def drawn(_: int) -> Iterator[Claim]:
    """Prove every algorithm on a long flat line, comparing a random sample of ranks."""
    yield from _proofs(LONG, np.random.default_rng(1).choice(LONG, DRAWN, replace=False).tolist(), LONG_S)


def _proofs(ranks: int, compared: list[int] | None, limit_s: float) -> Iterator[Claim]:
    who = "all" if compared is None else f"{len(compared)} drawn"
    for collective, algorithm in TABLE:
        schedule = build(algorithm, _line_of(collective, ranks))
        started = process_time()
        check(schedule, compared)
        took_s = process_time() - started
        yield Claim(
            text=f"{algorithm} {collective.value} on a flat line of {ranks} ranks, {who} compared, in {limit_s:g} s",
            figure=f"{took_s:.2f} s",
            holds=took_s <= limit_s,
        )


def altered(divide: int) -> Iterator[Claim]:
    """Alter one move of one sampled rank; `check` must refuse the schedule."""
    generator, tried, refused, longest_s = np.random.default_rng(2), 0, 0, 0.0
    for _ in range(max(1, 20 // divide)):
        algorithm = str(generator.choice(["ring", "direct", "exchange"]))
        schedule = build(algorithm, _line_of(Collective.ALL_REDUCE, LONG))
        compared = generator.choice(LONG, DRAWN, replace=False).tolist()
        wrong = _altered(schedule, int(generator.choice(compared)), generator)
        tried += 1
        started = process_time()
        try:
            check(wrong, compared)
        except ScheduleError:
            refused += 1
        longest_s = max(longest_s, process_time() - started)
    yield Claim(
        text=f"one altered move of one of {DRAWN} drawn ranks of {LONG} is refused, in {LONG_S:g} s",
        figure=f"{refused} of {tried}, {longest_s:.1f} s at most",
        holds=refused == tried and longest_s <= LONG_S,
    )


def memory(divide: int) -> Iterator[Claim]:
    """Run all_to_all with 64 MiB per rank on 64 ranks; check the memory they keep.

    The user's arrays do not count.
    """
    ranks = max(4, RANKS // divide)
    for engine, settings in (
        ("tcp", {"MULTIRING_ENGINE": "tcp"}),
        ("shm", {}),
        ("shm, without reading peers", {"MULTIRING_READ_PEERS": "0"}),
    ):
        script = [sys.executable, str(Path(__file__).with_name("rank.py")), str(SWAPPED_MIB)]
        done = subprocess.run(  # noqa: S603 -- our own
            [sys.executable, "-m", "multiring", "run", "-n", str(ranks), "--", *script],
            env={**inherited_environment(), **settings},
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
        found = re.search(r"kept (-?[0-9.]+) MiB", done.stdout)
        yield Claim(
            text=f"after an all_to_all of {SWAPPED_MIB} MiB a rank among {ranks} ranks ({engine}) under {KEPT_MIB} MiB"
            " beyond the user's",
            figure=f"{found[1]} MiB" if found else done.stderr[-200:],
            holds=found is not None and float(found[1]) < KEPT_MIB,
        )


def _altered(schedule: Schedule, at: int, generator: np.random.Generator) -> Schedule:
    number = int(generator.integers(len(schedule.phases)))
    pattern = schedule.phases[number].pattern
    kind = str(generator.choice(["drop", "double", "swap", "part", "peer"]))
    seed = generator.random()

    def program(p: int, i: int) -> Moves:
        moves = pattern.program(p, i)
        return _wrong(moves, kind, int(seed * (len(moves) - 1)), p) if i == at else moves

    phases = list(schedule.phases)
    phases[number] = Phase(0, Pattern(pattern.name, pattern.effect, partial(program)))
    return replace(schedule, phases=tuple(phases))


def _wrong(moves: Moves, kind: str, row: int, p: int) -> Moves:
    rows = np.arange(len(moves))
    if kind == "drop":
        return moves.take(np.delete(rows, row))
    if kind == "double":
        return moves.take(np.insert(rows, row, row))
    if kind == "swap":
        return moves.take(np.concatenate([rows[:row], [row + 1, row], rows[row + 2 :]]))
    if kind == "part":
        src, dst = moves.src.copy(), moves.dst.copy()
        src[row], dst[row] = (np.where(each[row] < 0, -1, (each[row] + 1) % p) for each in (src, dst))
        return replace(moves, src=src, dst=dst)
    peers = moves.peers.copy()
    peers[moves.peer_start[row]] = (peers[moves.peer_start[row]] + 1) % p
    return replace(moves, peers=peers)


def _line_of(collective: Collective, ranks: int) -> Frame:
    return Frame(collective=collective, grid=(ranks,), order=tuple(range(ranks)))


CLAIMS = {"lines": lines, "drawn": drawn, "altered": altered, "memory": memory}


if __name__ == "__main__":
    sys.exit(report(CLAIMS, __doc__ or ""))
