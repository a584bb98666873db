"""Measure the time of `init` and of the first operation.

    multiring run -n 16 -- python benchmarks/init_time.py [--times 50]

The same processes join and leave jobs repeatedly. Each time is that of the slowest rank, from its call of `init`; the
ranks leave the previous `shutdown` together. The first cycle does not count, because it includes late imports. `first
operation` is a barrier and an all_reduce of 1 MiB of ordinary memory right after `init`; it makes the connections.
`again` is the same pair of operations once more.
"""

import argparse
import statistics
import sys
import time

import numpy as np

import multiring


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=50)
    times = parser.parse_args().times
    rows = [cycle() for _ in range(times + 1)][1:]
    group = multiring.init()
    slowest = np.array(rows)
    group.all_reduce(slowest, "max")
    if group.rank == 0:
        print(f"{group.size} ranks, {times} times: median, longest of the slowest rank")
        for name, column in zip(("init", "first operation", "again", "shutdown"), slowest.T, strict=True):
            print(f"  {name:<16}{statistics.median(column) * 1e3:8.2f} ms{max(column) * 1e3:10.2f} ms")
    multiring.shutdown()
    return 0


def cycle() -> tuple[float, float, float, float]:
    """Join a job, operate twice and leave; return the seconds of each part."""
    moments = [time.perf_counter()]
    group = multiring.init()
    moments.append(time.perf_counter())
    for _ in range(2):
        data = np.ones(1 << 18, np.float32)
        group.barrier()
        group.all_reduce(data)
        assert (data == group.size).all()
        moments.append(time.perf_counter())
    multiring.shutdown()
    moments.append(time.perf_counter())
    first, second, third, fourth = np.diff(moments)
    return first, second, third, fourth


if __name__ == "__main__":
    sys.exit(main())
