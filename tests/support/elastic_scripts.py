"""Scripts of elastic jobs: a program, what they say at their end, and jobs of three ranks that are replaced."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

# Each step adds the sum of rank + 1 over the ranks, so that the sizes of all steps say what the total must be.
SUMS = """
import json
from pathlib import Path
import numpy as np
import multiring.adapters as ma
from multiring._settings import Settings
from multiring.adapters import elastic

born = Settings.from_environment().intake or Settings.from_environment().rank or 0
ma.init()
state = elastic.ObjectState(
    bcast_object=ma.broadcast_object, get_rank=ma.rank, gather_object=ma.allgather_object, step=0, total=0.0, sizes=[]
)
committed = 0


@elastic.run
def train(state):
    global committed
    assert state.step >= committed, f"step {committed} was committed, and is lost"
    print("SIZE", ma.size(), state.step, flush=True)
    while True:
        told = np.asarray(ma.allreduce(np.array([ma.rank() + 1.0, float(Path("stop").exists())]), op="sum"))
        if told[1]:
            return
        state.total += told[0]
        state.sizes = [*state.sizes, ma.size()]
        state.step += 1
        state.commit()
        committed = state.step
        with open(f"log-{born}", "a") as file:
            file.write(f"{state.step} {ma.size()}\\n")


train(state)
wanted = sum(size * (size + 1) / 2 for size in state.sizes)
print("END", json.dumps([born, ma.rank(), bool(state.total == wanted), sorted(set(state.sizes))]), flush=True)
ma.shutdown()
"""


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
