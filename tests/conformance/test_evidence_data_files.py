"""Run a case of each family of benchmarks/evidence/data_files/main.py: random data sets, compared with other readers.

`make evidence` runs thousands of cases.
"""

import subprocess
import sys
from pathlib import Path

from benchmarks.evidence.data_files.main import TOPIC
from benchmarks.evidence.data_files.running import RUNNING
from benchmarks.evidence.jobs.job import ROOT
from benchmarks.evidence.support.cases import faults_of

SEED = 5_000
HERE = [each for each in TOPIC.families if not each.ranks and each not in RUNNING]


def test_random_data_sets_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert HERE
    for family in HERE:
        folder = tmp_path / f"{family.name}-{SEED}"
        folder.mkdir()
        assert not list(faults_of(family, SEED, folder)), f"{family.name}, seed {SEED}"


def test_random_damages_on_two_ranks_leave_the_mean_over_the_rest() -> None:
    program = [
        sys.executable,
        "benchmarks/evidence/data_files/main.py",
        "--only",
        "gradient",
        "--cases",
        "2",
        "--again",
    ]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
