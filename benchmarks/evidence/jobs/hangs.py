"""Cause ten kinds of hangs and mismatches in a stream of named operations.

    python benchmarks/evidence/jobs/hangs.py [--seeds 20] [--kinds order,skipped]

Every rank must name the culprit and the operation. The time limit depends on the kind. It is MULTIRING_STALL_WARN_S
plus a margin if the ranks wait for each other. It is MULTIRING_STALL_TIMEOUT_S plus a margin if one rank is silent. A
rank that exits or disagrees must be named at once.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import the tests' cases

from benchmarks.evidence.support.claims import commit, machine
from tests.support.hangs import DEADLOCKS, DISAGREEMENTS, KINDS, TIMEOUT_S, WARN_S, Case, check

A_LITTLE_S = 1.5


def main() -> int:
    """Print a line for each kind; return 1 if a culprit was named wrong or too late."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=20, help="cases of each kind")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"some of {','.join(KINDS)}")
    arguments = parser.parse_args()
    print(f"# Hangs named, {time.strftime('%Y-%m-%d %H:%M')}\n")
    print(f"`{' '.join(['python', *sys.argv])}` at commit {commit()}, {machine()}\n")
    print("| kind | named right on every rank | longest | allowed |\n|---|---|---|---|", flush=True)
    everything = True
    for kind in arguments.kinds.split(","):
        right, longest_s, allowed_s = 0, 0.0, allowed(kind)
        for seed in range(arguments.seeds):
            try:
                took_s = check(Case.of(kind, seed))
            except AssertionError as error:
                print(f"\nseed {seed}: {error}\n", flush=True)
                continue
            right += took_s <= allowed_s
            longest_s = max(longest_s, took_s)
        print(f"| {kind} | {right} of {arguments.seeds} | {longest_s:.2f} s | {allowed_s:.1f} s |", flush=True)
        everything &= right == arguments.seeds
    return 0 if everything else 1


def allowed(kind: str) -> float:
    """Return the time limit in seconds for every rank to name the culprit."""
    if kind in DISAGREEMENTS or kind in ("killed", "ended"):
        return A_LITTLE_S
    return (WARN_S if kind in DEADLOCKS else TIMEOUT_S) + A_LITTLE_S


if __name__ == "__main__":
    sys.exit(main())
