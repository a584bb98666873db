"""Change correct schedules in every way, and check that the proofs of schedules refuse each change.

    .venv/bin/python benchmarks/evidence/schedules/main.py [--only small,...] [--short | --divide N]

tests/pure/test_check.py tries a part of these changes. The exit code is 1 if a wrong schedule was accepted.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.support.claims import Claim, report, shown
from tests.support import mutations
from tests.support.schedules import frame_on

from multiring._collectives import TABLE, build
from multiring._schedule import Collective

SMALL = [(2,), (3,), (4,), (2, 2), (2, 3)]
LARGE = [(17,), (4, 4), (2, 3, 2)]
DRAWS = 60  # mutants of each of two ranks
ROUNDS = 1000


def small(share: int) -> Iterator[Claim]:
    """Yield the claim that every change of one move of a small schedule is refused."""
    for collective, algorithm in TABLE:
        found = [
            f"{grid}: {each}"
            for grid in SMALL
            for each in mutations.of_small(build(algorithm, frame_on(collective, grid)), share)
        ]
        yield Claim(
            text=f"{algorithm} {collective.value}: every change is refused", figure=shown(found), holds=not found
        )


def large(share: int) -> Iterator[Claim]:
    """Yield the claim that random changes of larger schedules are refused."""
    generator = np.random.default_rng()
    for collective, algorithm in TABLE:
        found = []
        for grid in LARGE:
            schedule = build(algorithm, frame_on(collective, grid, shuffled=True, shares=(2, 1)))
            found += [f"{grid}: {each}" for each in mutations.of_large(schedule, generator, max(2, DRAWS // share))]
        text = f"{algorithm} {collective.value}: random changes on 12 to 17 ranks are refused"
        yield Claim(text=text, figure=shown(found), holds=not found)


def patterns(share: int) -> Iterator[Claim]:
    """Yield the claim that the rule of composition refuses every change of one move of a pattern."""
    for collective, algorithm in TABLE:
        found = mutations.of_patterns(build(algorithm, frame_on(collective, (3,))), share)
        text = f"{algorithm} {collective.value}: the rule refuses every change of a pattern"
        yield Claim(text=text, figure=shown(found), holds=not found)


def orders(share: int) -> Iterator[Claim]:
    """Yield the claim that a program with another order of moves is refused, or right in every race."""
    generator = np.random.default_rng()
    for algorithm in ("direct", "ring", "direct_ring"):
        for grid in ((3,), (2, 2), (2, 3)):
            schedule = build(algorithm, frame_on(Collective.ALL_REDUCE, grid))
            outcomes = mutations.races(schedule, generator, max(60, ROUNDS // share))
            text = f"{algorithm} on {grid}: moves in another order are refused, or right in every race"
            figure = ", ".join(f"{count} {name}" for name, count in outcomes.items())
            yield Claim(text=text, figure=figure, holds=not outcomes["accepted and wrong"])


CLAIMS = {"small": small, "large": large, "patterns": patterns, "orders": orders}

if __name__ == "__main__":
    sys.exit(report(CLAIMS, __doc__ or ""))
