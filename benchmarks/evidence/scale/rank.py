"""Print the memory that all_to_all leaves on the rank that keeps the most.

    multiring run -n RANKS -- python benchmarks/evidence/scale/rank.py MIB

Rank 0 prints the result.
"""

import sys
from pathlib import Path

import numpy as np

import multiring


def proportional_mib() -> float:
    """Return this process's proportional memory (PSS) in MiB."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))


def main() -> None:
    """Exchange MIB per rank with all ranks; print the memory growth beyond the result."""
    group = multiring.init()
    array = np.ones((int(sys.argv[1]) << 18) // group.size * group.size, np.float32)
    group.barrier()
    before = proportional_mib()
    swapped = group.all_to_all(array)
    group.barrier()
    kept = np.array([proportional_mib() - before - swapped.nbytes / (1 << 20)])
    group.all_reduce(kept, op="max")
    if group.rank == 0:
        print(f"kept {kept[0]:.1f} MiB")
    multiring.shutdown()


if __name__ == "__main__":
    main()
