"""Measure how long rank 0 takes to tell many ranks where to meet by munge (as root).

    sudo .venv/bin/python benchmarks/studies/munge_callers.py [--ranks 128,512,2048]

The ranks are threads that call MungeExchange as `init` does, on one host with a real munged. All of them ask at
once. On a cluster, the ranks' own commands would run on their hosts, so the CPU time of rank 0 is given apart.
"""

import argparse
import json
import os
import resource
import sys
import threading
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # lets this script import from the repository root

from multiring._exchanges.munge import MungeExchange

ROOT = Path(__file__).parents[2]
STEP, TEXT = "a step of this study", "x" * 200
PROCESSES = 16
LONGEST_S = 280.0


def serve(pipe: Connection) -> None:
    """Be rank 0 until the other end says that all ranks know, and send the CPU seconds."""
    exchange = MungeExchange(STEP, ("localhost",), None)
    exchange.publish(TEXT)
    pipe.send("listens")
    pipe.recv()
    exchange.close()
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    pipe.send(sum(each.ru_utime + each.ru_stime for each in usages))


def ask(pipe: Connection, ranks: int) -> None:
    """Be `ranks` other ranks, and send how many seconds each has waited."""
    waited: list[float] = []

    def fetch() -> None:
        began = time.monotonic()
        exchange = MungeExchange(STEP, ("localhost",), None)
        while time.monotonic() - began < LONGEST_S:
            if exchange.fetch(1.0) == TEXT:
                waited.append(time.monotonic() - began)
                return

    threads = [threading.Thread(target=fetch) for _ in range(ranks)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    pipe.send(waited)


def measure(ranks: int) -> dict[str, float]:
    """Return the times of one start."""
    context = get_context("fork")
    mine, other = context.Pipe()
    server = context.Process(target=serve, args=(other,))
    server.start()
    mine.recv()
    began = time.monotonic()
    askers = []
    for number in range(PROCESSES):
        here, there = context.Pipe()
        count = ranks // PROCESSES + (number < ranks % PROCESSES)
        process = context.Process(target=ask, args=(there, count))
        process.start()
        askers.append((process, here))
    waited = [each for _, here in askers for each in here.recv()]
    wall_s = time.monotonic() - began
    mine.send("done")
    cpu_s = mine.recv()
    for process in [server, *(each for each, _ in askers)]:
        process.join()
    missing = ranks - len(waited)
    return {"ranks": ranks, "missing": missing, "last_s": wall_s, "rank_0_cpu_ms_per_rank": 1e3 * cpu_s / ranks}


def main() -> int:
    """Measure and print; 1 if a rank was not told."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", default="128,512,2048")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # on a host with munged
    options = parser.parse_args()
    if options.inside:
        for ranks in options.ranks.split(","):
            print(json.dumps({**measure(int(ranks)), "load": os.getloadavg()[0]}), flush=True)
        return 0
    from tests.support.slurm_cluster import SlurmCluster  # noqa: PLC0415 -- only outside

    with SlurmCluster(1) as cluster:
        program = str(Path(__file__).resolve())
        told = cluster.run("python", program, "--inside", "--ranks", options.ranks, timeout_s=1800.0)
    print(told, end="")
    return int(any(json.loads(line)["missing"] for line in told.splitlines()))


if __name__ == "__main__":
    sys.exit(main())
