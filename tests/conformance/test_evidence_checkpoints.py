"""A few cases of the checkpoint evidence programs, and every crash point of a save."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# The first program also draws random kills, writers and readers; the second one enumerates those cases.
RUNS = {
    "evidence_checkpoints.py": ("values,strangers,names,states,trainings", 2),
    "evidence_checkpoints_crashes.py": ("crash points", 3),
}
ONE_OF_EACH = ("crash pairs", "disk faults", "second writers", "stopped readers", "power cuts")


def show_no_fault(program: str, families: str, cases: int) -> None:
    words = [sys.executable, str(BENCHMARKS / program), "--only", families, "--cases", str(cases), "--again"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in families.split(","):
        assert f"| {name} | {cases} | 0 |" in done.stdout


@pytest.mark.parametrize("program", RUNS)
def test_some_cases_of_each_show_no_fault(program: str) -> None:
    show_no_fault(program, *RUNS[program])


def test_pairs_disks_writers_readers_and_power_cuts_from_one_start() -> None:
    show_no_fault("evidence_checkpoints_crashes.py", ",".join(ONE_OF_EACH), 1)
