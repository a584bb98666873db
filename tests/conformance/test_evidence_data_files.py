"""Run benchmarks/evidence_data_files.py for 10 s: random data sets, compared with the libraries that wrote them."""

import subprocess
import sys
import time
from itertools import count
from pathlib import Path

from benchmarks.evidence_cases import faults_of
from benchmarks.evidence_data_files import TOPIC
from benchmarks.evidence_data_files_running import RUNNING
from benchmarks.evidence_job import ROOT

SECONDS = 10.0
HERE = [each for each in TOPIC.families if not each.ranks and each not in RUNNING]


def test_random_data_sets_are_read_as_they_were_written(tmp_path: Path) -> None:
    until = time.monotonic() + SECONDS
    tried = 0
    for seed in count(5_000):
        for family in HERE:
            folder = tmp_path / f"{family.name}-{seed}"
            folder.mkdir()
            assert not list(faults_of(family, seed, folder)), f"{family.name}, seed {seed}"
            tried += 1
        if time.monotonic() > until:
            break
    assert tried >= len(HERE), "some families were not tried"


def test_random_damages_on_two_ranks_leave_the_mean_over_the_rest() -> None:
    program = [sys.executable, "benchmarks/evidence_data_files.py", "--only", "gradient", "--cases", "2", "--again"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
