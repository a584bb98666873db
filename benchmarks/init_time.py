"""How long `init` takes: joining a job, and the first operation, again and again in the same processes.

    multiring run -n 16 -- python benchmarks/init_time.py [--times 50]

Each time is the slowest rank's, from its call of `init` on; the ranks come out of the previous `shutdown` together. The
first is not counted: it has the imports that wait for use. `first operation` is a barrier and an all_reduce of 1 MiB of
ordinary memory right behind it, in which links are made; `again` the same operations a second time.
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
    """Join, operate twice, leave; return the seconds of each."""
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
