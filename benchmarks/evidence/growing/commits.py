"""Measure by how much a commit of 100 MiB delays the training.

    python benchmarks/evidence/growing/commits.py [--mebibytes 100] [--commits 20] [--ranks 2]

The ranks train on this host, with one thread each. Each has so many bytes of its own, of which `commit` keeps a copy on
the rank and one in a peer's memory. Between two commits are three steps of about 100 ms, which end with a sum over the
ranks. The delay of a commit is the time from the commit's beginning to the end of the three steps that follow, minus
the median of three steps without a commit; so it has what the transfer to the peer costs these steps. The whole job is
measured, on rank 0, and the first two commits are left out.
"""

import argparse
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.support.claims import commit, machine

from multiring._settings import inherited_environment

STEPS, STEP_S, LEFT_OUT, MOST_MS = 3, 0.1, 2, 60.0


def main() -> int:
    """Start the ranks, and print what rank 0 has measured; return 1 if a commit takes too long."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mebibytes", type=int, default=100, help="each rank's own state")
    parser.add_argument("--commits", type=int, default=20, help="how many commits to measure")
    parser.add_argument("--ranks", type=int, default=2, help="how many ranks")
    parser.add_argument("--in-rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_rank:
        train(arguments.mebibytes, arguments.commits)
        return 0
    print(
        f"# Commits, {time.strftime('%Y-%m-%d %H:%M')}\n\n`{' '.join(sys.argv)}` at commit {commit()}, {machine()}\n",
        flush=True,
    )
    words = [sys.executable, "-m", "multiring", "run", "-n", str(arguments.ranks), "--min-ranks", "1", *sys.argv]
    return subprocess.run(  # noqa: S603 -- our own program
        [*words, "--in-rank"], env=inherited_environment() | {"OMP_NUM_THREADS": "1"}, check=False
    ).returncode


def train(mebibytes: int, commits: int) -> None:
    """Train, and print the delays on rank 0."""
    import numpy as np  # noqa: PLC0415 -- after the number of threads is set

    import multiring.adapters as ma  # noqa: PLC0415
    from multiring.adapters import elastic  # noqa: PLC0415

    ma.init()
    state = elastic.ObjectState(
        bcast_object=ma.broadcast_object,
        get_rank=ma.rank,
        gather_object=ma.allgather_object,
        step=0,
        moments=elastic.OwnValue(np.ones(mebibytes * 2**17)),
    )
    matrix = np.random.default_rng(0).standard_normal((400, 400))
    products = 1
    while (took := timed(partial(multiplied, matrix, products))) < STEP_S:
        products = max(products + 1, int(products * STEP_S / max(took, 1e-6)))
    products = ma.broadcast_object(products)

    def steps() -> None:
        for _ in range(STEPS):
            multiplied(matrix, products)
            ma.allreduce(matrix)

    @elastic.run
    def measured(state: Any) -> None:
        plain, calls, delays, cpu = [], [], [], []
        for number in range(commits + LEFT_OUT):
            plain.append(timed(steps))
            began, used = time.perf_counter(), time.thread_time()
            state.commit()
            cpu.append(1e3 * (time.thread_time() - used))
            calls.append(time.perf_counter() - began)
            steps()
            delays.append(time.perf_counter() - began)
            time.sleep(0.1 if number < LEFT_OUT else 0.0)
        if ma.rank() == 0:
            usual = median(plain[LEFT_OUT:])
            late = sorted(1e3 * (each - usual) for each in delays[LEFT_OUT:])
            in_call = sorted(1e3 * each for each in calls[LEFT_OUT:])
            print(
                "| MiB a rank | ranks | commits | delay, median | longest | in commit itself, median | steps | load |"
            )
            print("|---|---|---|---|---|---|---|---|")
            told = [
                f"{median(late):.0f} ms",
                f"{late[-1]:.0f} ms",
                f"{median(in_call):.0f} ms",
                f"{1e3 * usual:.0f} ms",
            ]
            print("|", " | ".join(map(str, [mebibytes, ma.size(), len(late), *told, f"{os.getloadavg()[0]:.0f}"])), "|")
            print(f"\n{'holds' if median(late) <= MOST_MS else 'MISSED'}: at most {MOST_MS:.0f} ms")

    measured(state)
    ma.shutdown()


def multiplied(matrix: Any, count: int) -> None:
    """Compute so many products."""
    for _ in range(count):
        matrix @ matrix


def timed(work: Any) -> float:
    """Return how many seconds `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
