"""Some cases of each family of the evidence of checkpoints: values, folders of others, kills, writers, readers."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_three_cases_of_each_show_no_fault() -> None:
    program = ROOT / "benchmarks" / "evidence_checkpoints.py"
    done = subprocess.run(
        [sys.executable, str(program), "--cases", "3", "--again"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| readers | 3 | 0 |" in done.stdout
