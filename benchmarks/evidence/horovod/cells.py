"""Run all cells of the Horovod tables of torch and TensorFlow.

    python benchmarks/evidence/horovod/cells.py [--adapters torch,tensorflow] [--ranks 1,2,3,4] [--only PATTERN]

The exit code is 1 if a cell fails.
"""

import argparse
import importlib
import re
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import the tests' tables

from tests.support.ranks import run_ranks

TABLES = {"torch": "tests.support.cells", "tensorflow": "tests.support.tensorflow_cells"}
DEADLINE_S = 900.0
IMPATIENT: dict[str, Any] = {
    "stall_warn_s": 10.0,
    "stall_timeout_s": 20.0,
}  # short time-outs, so that a hanging cell is reported and does not delay the others


def main() -> int:
    """For each number of ranks, print the passed cells and the faults of the others."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--adapters", default=",".join(TABLES), help="adapters to test, separated by commas")
    parser.add_argument("--ranks", default="1,2,3,4", help="numbers of ranks, separated by commas")
    parser.add_argument("--only", default="", help="regular expression that selects cells by their line")
    arguments = parser.parse_args()
    missed = 0
    for adapter in arguments.adapters.split(","):
        table = importlib.import_module(TABLES[adapter])
        for ranks in map(int, arguments.ranks.split(",")):
            chosen = [cell for cell in table.cells_of(ranks) if re.search(arguments.only, str(cell))]
            start = time.monotonic()
            failed = failures(table, ranks, chosen)
            missed += len(failed)
            for cell, text in failed.items():
                print(f"  {cell}: {text}")
            done = len(chosen) - len(failed)
            elapsed_s = time.monotonic() - start
            print(f"{adapter}, {ranks} ranks: {done} of {len(chosen)} cells, in {elapsed_s:.0f} s", flush=True)
    return 1 if missed else 0


def failures(table: Any, ranks: int, chosen: list[Any]) -> dict[str, str]:
    """Return the fault of each failed cell, from the lowest rank that saw it."""
    found: dict[str, str] = {}
    for rank, wrong in enumerate(run_ranks(table.run_cells, ranks, chosen, deadline_s=DEADLINE_S, **IMPATIENT)):
        for text in wrong:
            cell, _, why = text.partition(": ")
            found.setdefault(cell, f"rank {rank}: {why}")
    return found


if __name__ == "__main__":
    sys.exit(main())
