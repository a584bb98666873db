"""Run a case of each family of benchmarks/evidence/launching/main.py: random jobs, compared with the bare program.

`make evidence` runs thousands of cases.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.evidence.launching import input as random_input
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


def test_the_mpi_of_the_users_cache_is_found_where_xdg_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class StartedError(Exception):
        """The case has come to the launch."""

    def ran(*_: object, variables: dict[str, str], **__: object) -> Any:
        raise StartedError(variables["PATH"])

    monkeypatch.delenv("MULTIRING_BENCH_PEERS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(random_input, "ran", ran)
    assert not list(random_input.host_lines(np.random.default_rng(0), tmp_path))
    place = tmp_path / "multiring" / "peers" / "mpich" / "bin" / "mpiexec"
    place.parent.mkdir(parents=True)
    place.touch()
    with pytest.raises(StartedError, match=f"^{place.parent}:"):
        list(random_input.host_lines(np.random.default_rng(0), tmp_path))
