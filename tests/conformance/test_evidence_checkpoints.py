"""A few cases of the checkpoint evidence programs, and every crash point of a save."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# The first program also draws random kills, writers and readers; the second one enumerates those cases.
RUNS = {
    "evidence/checkpoints/main.py": "values,strangers,names,states,trainings",
    "evidence/checkpoints/crashes.py": (
        "crash points,crash pairs,disk faults,second writers,stopped readers,power cuts"
    ),
}


@pytest.mark.parametrize("program", RUNS)
def test_a_case_of_each_shows_no_fault(program: str) -> None:
    words = [sys.executable, str(BENCHMARKS / program), "--only", RUNS[program], "--cases", "1", "--again"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in RUNS[program].split(","):
        assert f"| {name} | 1 | 0 |" in done.stdout
