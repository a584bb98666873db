"""Compare a small named asynchronous all_reduce with a futex ping-pong.

    python benchmarks/promises/named_latency.py [--turns 9] [--rounds 3000]

Two ranks of this machine reduce 64 bytes, with a new name each time. The ping-pong is two C processes that wake each
other, there and back. The two measurements alternate. The floor is 6 ping-pongs.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import multiring
from multiring._runtime.named.named import NamedOperations
from multiring.errors import Signature

FLOOR = 6.0  # the most ping-pongs that an operation may take
WARM_UP = 300
TERMS: Signature = (
    ("operation", "allreduce"),
    ("data type", "float32"),
    ("shape", "(16,)"),
    ("reduction operation", "sum"),
)


def work(rounds: int) -> None:
    """Run one rank; rank 0 prints the quartiles of an operation's microseconds."""
    group = multiring.init()
    named = NamedOperations(group)
    array = np.zeros(16, np.float32)
    took_ns = []
    for index in range(WARM_UP + rounds):
        start_ns = time.perf_counter_ns()
        named.submit(
            f"allreduce.noname.{index}", TERMS, lambda at, label: at.all_reduce_async(array, label=label)
        ).wait()
        took_ns.append(time.perf_counter_ns() - start_ns)
    if group.rank == 0:
        print(*(each / 1e3 for each in statistics.quantiles(took_ns[WARM_UP:], n=4)))
    named.close()
    multiring.shutdown()


def main() -> int:
    """Print the measurements; return 1 if the floor is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=3000, help="operations and ping-pongs in a turn")
    parser.add_argument("--work", action="store_true", help="run one rank")
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.rounds)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "futex_ping_pong"
        source = Path(__file__).with_name("futex_ping_pong.c")
        subprocess.run(["cc", "-O2", "-o", str(program), str(source)], check=True)  # noqa: S603, S607 -- our own
        pings_us, medians_us = [], []
        for _ in range(arguments.turns):
            pings_us.append(float(said_by([str(program), str(10 * arguments.rounds)])[0]) / 1e3)
            ranks = [sys.executable, "-m", "multiring", "run", "-n", "2", "--", sys.executable, __file__]
            medians_us.append(float(said_by([*ranks, "--work", "--rounds", str(arguments.rounds)])[1]))
    ping_us, named_us = statistics.median(pings_us), statistics.median(medians_us)
    ratio = statistics.median(named / ping for named, ping in zip(medians_us, pings_us, strict=True))
    print(f"futex ping-pong      {ping_us:7.1f} us  ({min(pings_us):.1f} to {max(pings_us):.1f})")
    print(
        f"named all_reduce     {named_us:7.1f} us  ({min(medians_us):.1f} to {max(medians_us):.1f}), medians of turns"
    )
    print(f"ping-pongs           {ratio:7.2f}     at most {FLOOR:g} wanted")
    return 0 if ratio <= FLOOR else 1


def said_by(command: list[str]) -> list[str]:
    """Return the words of the last line that `command` prints."""
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 -- our own
    return done.stdout.splitlines()[-1].split()


if __name__ == "__main__":
    sys.exit(main())
