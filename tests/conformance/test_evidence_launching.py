"""Run benchmarks/evidence/launching/main.py for 20 s: random jobs, compared with the program run without multiring."""

import time
from itertools import cycle
from pathlib import Path

from benchmarks.evidence.launching.main import TOPIC
from benchmarks.evidence.support.cases import faults_of

SECONDS = 20.0
SLOW_S = 8.0  # families with slower cases run by `make evidence` only


def test_random_jobs_end_as_the_bare_program_does(tmp_path: Path) -> None:
    families = [each for each in TOPIC.families if each.case_s < SLOW_S]
    until = time.monotonic() + SECONDS
    tried = 0
    for number, family in enumerate(cycle(families)):
        if time.monotonic() > until and number >= len(families):
            break
        seed = 7_000 + number
        folder = tmp_path / f"{family.name}-{seed}"
        folder.mkdir()
        assert not list(faults_of(family, seed, folder)), f"{family.name}, seed {seed}"
        tried += 1
    assert tried >= len(families), "some families were not tried"


def test_families_aim_at_programs_whose_faults_they_can_show() -> None:
    assert {aim for each in TOPIC.families for aim in each.aims} <= set(TOPIC.shows)
