"""Twenty seconds of the evidence of checkpoints: random values, folders of others, kills, writers and readers."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_twenty_seconds_show_no_fault() -> None:
    program = ROOT / "benchmarks" / "evidence_checkpoints.py"
    done = subprocess.run(
        [sys.executable, str(program), "--seconds", "20", "--again"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| values |" in done.stdout
