"""Run a case of each family of benchmarks/evidence/launching/main.py: random jobs, compared with the bare program.

`make evidence` runs thousands of cases.
"""

from pathlib import Path

from benchmarks.evidence.launching.main import TOPIC
from benchmarks.evidence.support.cases import faults_of

SLOW_S = 8.0  # families with slower cases run by `make evidence` only


def test_random_jobs_end_as_the_bare_program_does(tmp_path: Path) -> None:
    families = [each for each in TOPIC.families if each.case_s < SLOW_S]
    assert families
    for number, family in enumerate(families):
        seed = 7_000 + number
        folder = tmp_path / f"{family.name}-{seed}"
        folder.mkdir()
        assert not list(faults_of(family, seed, folder)), f"{family.name}, seed {seed}"


def test_families_aim_at_programs_whose_faults_they_can_show() -> None:
    assert {aim for each in TOPIC.families for aim in each.aims} <= set(TOPIC.shows)
