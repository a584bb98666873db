"""A short run of benchmarks/evidence/data/faults.py: killed and failing processes leave no wrong data."""

import subprocess
import sys
from pathlib import Path

EVIDENCE = Path(__file__).parents[2] / "benchmarks" / "evidence" / "data" / "faults.py"


def test_what_fails_or_is_killed_leaves_nothing_wrong() -> None:
    command = [sys.executable, str(EVIDENCE), "--divide", "100"]
    done = subprocess.run(
        [*command, "--only", "kills,calls,bits"], capture_output=True, text=True, timeout=300, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("| holds", "| MISSED"))]
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(lines) == 10, done.stdout
