"""Scripts of elastic jobs: what they say at their end, and jobs of three ranks that are replaced."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def ends_in(output: str) -> list[Any]:
    """Return what the ranks have printed behind END, in JSON."""
    return [json.loads(line.partition("END ")[2]) for line in output.splitlines() if "END " in line]


def ends_of_three(folder: Path, program: str, acts: dict[str, int]) -> tuple[list[Any], str]:
    """Run a program on three ranks, of which one must stay and lost ones are replaced.

    Args:
        folder: where the program is written to and runs.
        program: its text; `acts` is its first argument, as JSON.
        acts: what is done to whom, as the program understands it.

    Returns:
        What the ranks say at their end, and what the job has written to stderr.
    """
    script = folder / "program.py"
    script.write_text(program)
    launch = ["-m", "multiring", "run", "-n", "3", "--min-ranks", "1", "--max-ranks", "3"]
    done = subprocess.run(
        [sys.executable, *launch, str(script), json.dumps(acts)],
        capture_output=True,
        text=True,
        check=False,
        timeout=450,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return ends_in(done.stdout), done.stderr
