"""A few cases of each family of benchmarks/evidence_torch.py: random programs held against one process."""

import subprocess
import sys

from benchmarks.evidence_job import ROOT


def test_random_programs_are_as_in_one_process() -> None:
    program = [sys.executable, "benchmarks/evidence_torch.py", "--cases", "2", "--seed", "7000", "--again"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "| 0 | 0 |" not in done.stdout, "each family has been tried"
