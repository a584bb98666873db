"""Twenty seconds of benchmarks/evidence_keras.py: random Keras programs, held against one process without multiring."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
from benchmarks.evidence_job import ROOT


@pytest.mark.skipif(find_spec("keras") is None or find_spec("torch") is None, reason="Keras or torch is missing")
@pytest.mark.timeout(300)
def test_random_programs_are_those_of_one_process() -> None:
    families = "training-torch-2,callbacks-torch-2"
    program = [sys.executable, "benchmarks/evidence_keras.py", "--only", families, "--cases", "3", "--seed", "9000"]
    done = subprocess.run([*program, "--again"], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    for family in families.split(","):
        assert f"| {family} | 3 | 0 |" in done.stdout
