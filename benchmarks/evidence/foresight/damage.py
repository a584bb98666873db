"""Damage profiles, timelines, records, topologies, presets and published runs, and check that readers refuse them.

    python benchmarks/evidence/foresight/damage.py [--mutants 20000] [--seed 1]

Each file is changed in one place: a value is deleted, renamed, replaced, or there twice, or the file is cut. A reader
may accept the change or refuse it by an error in words. Any other exception is a failure, and so is a NaN, an infinite
or negative number, a boolean, a text or a repeated field that was accepted in place of a number. The exit code is 0 if
there was no failure.
"""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from tests.pure.test_damaged_files import readers
from tests.support.damage import complaint, damaged


def main() -> int:
    """Damage files of each kind, print a table and the failures, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=20_000, help="number of damaged files, of all kinds together")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    failures = 0
    print("| file | damaged | failures |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        known = readers(Path(folder))
        for name, reader in known.items():
            found: Counter[str] = Counter()
            count = -(-arguments.mutants // len(known))
            for each in damaged(reader, count, arguments.seed):
                found[complaint(reader, each)] += 1
            passed = found.pop("", 0)
            failures += found.total()
            print(f"| {name} | {passed + found.total()} | {found.total()} |")
            for words, times in found.most_common():
                print(f"{times} x {words}")
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
