"""Random programs of collectives, on one host and between hosts: every rank's results equal NumPy's.

benchmarks/evidence/jobs/programs.py runs other programs for an hour.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.lab_rig import LabRun
from tests.support.programs import run
from tests.support.ranks import Here, run_ranks

ROOT = Path(__file__).parents[2]
FIRST, TURNS = 2, 2  # the third turn, and the fourth, which runs two programs in two threads
RAILS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
PLACES = [
    *(("shm", 4, 0), ("tcp", 3, 1), ("tcp", 3, 3), ("shm+tcp", 4, 2), ("shm+tcp", 5, 1)),
    *(("mpi", 2, 0), ("shm+mpi", 4, 0)),
]
LABS = [
    "--hosts 2 --slots 3 --link 1gbit --rail 1gbit",
    "--hosts 4 --slots 1 --link 1gbit --rail 250mbit --rail 500mbit",
    "--hosts 4 --slots 2 --rack 2 --uplink 1gbit --link 1gbit",
    "--hosts 3 --slots 3,1,2 --link 1gbit --rail 500mbit",
]


def run_here(here: Here, seed: int) -> int:
    return run(here.join(), seed, turns=TURNS, first=FIRST).steps


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_random_programs(place: tuple[str, int, int]) -> None:
    engine, ranks, rails = place
    settings: dict[str, Any] = {"rails": ",".join(RAILS[:rails])} if rails else {}
    steps = run_ranks(run_here, ranks, 100 + PLACES.index(place), engine=engine, deadline_s=240.0, **settings)
    assert min(steps) > 20


@pytest.mark.skipif(os.geteuid() != 0, reason="virtual hosts need root")
@pytest.mark.parametrize("lab", LABS)
def test_random_programs_between_hosts(lab: str) -> None:
    seed = str(200 + LABS.index(lab))
    program = (
        sys.executable,
        "-m",
        "tests.support.programs",
        "--seed",
        seed,
        *("--first", str(FIRST), "--turns", str(TURNS)),
    )
    job = LabRun(*lab.split(), *program, PYTHONPATH=str(ROOT))
    try:
        assert job.finish() == 0, job.err
    finally:
        job.close()
    assert f"seed {seed}: {TURNS} turns" in job.out
