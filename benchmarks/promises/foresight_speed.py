"""Measure how long predictions of large clusters take, each in a cold process on one core.

    python benchmarks/promises/foresight_speed.py [--case NAME]

Each case is a fresh process that imports, builds the cluster and the schedule, and predicts. The table has the elapsed
time and the processor time of that process, and for cases with a rate, the ranks per second of processor time. On a
machine with other work, only the processor time has a meaning.
"""

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import cpu_count

from multiring._collectives import build
from multiring._schedule import Collective, Frame, Way
from multiring._simulator import seconds_of_ranks
from multiring._topology import Link, Topology
from multiring.planner import Task, cheapest

_MIB = 1 << 20
_EDR = Link(latency_s=2e-6, overhead_s=2e-6, bandwidth_bytes_per_s=12.5e9, reduce_bytes_per_s=1e10)
_NVLINK = Link(latency_s=2e-6, overhead_s=1e-6, bandwidth_bytes_per_s=25e9, reduce_bytes_per_s=1e11)


@dataclass(frozen=True, slots=True)
class _Case:
    """A case, its number of ranks, and its floor and aim: in seconds, or in ranks a second."""

    run: Callable[[], None]
    ranks: int
    floor: float
    aim: float
    is_rate: bool = False


def _summit() -> None:
    """Choose the plans of seven different buckets on 4,560 hosts of 6 ranks with two rails."""
    hosts = tuple(tuple(range(6 * host, 6 * host + 6)) for host in range(4560))
    topology = Topology(hosts, shm=_NVLINK, rails=(_EDR, _EDR))
    for mib in (1, 25, 26, 27, 28, 29, 31):
        cheapest(Task(collective=Collective.ALL_REDUCE, size_bytes=mib * _MIB), topology)


def _plan() -> None:
    """Run `multiring plan` for 4,560 ranks."""
    command = [sys.executable, "-m", "multiring", "plan", "--hosts", "760", "--slots", "6", "--link", "200gbit"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 -- this program itself


_UNEQUAL = (4, 4, 4, 4, 7, 8, 8)  # rings along these axes have 64 messages a rank


def _unequal() -> None:
    """Simulate hosts of four ranks whose links all differ: one axis inside hosts, six between hosts."""
    ranks = math.prod(_UNEQUAL)
    schedule = build("ring", Frame(collective=Collective.ALL_REDUCE, grid=_UNEQUAL, order=tuple(range(ranks))))
    inside = Way(link=_NVLINK, port=0)
    ways = []
    for host in range(ranks // 4):
        link = replace(_EDR, bandwidth_bytes_per_s=12.5e9 * (0.98 + 0.04 * (host * 0.618 % 1)))
        ways += [(inside, *[Way(link=link, port=axis) for axis in range(1, 7)])] * 4
    seconds_of_ranks(schedule, 100 * _MIB, ways)


_SHARED = (4, 4, 4, 4, 3, 3)  # rings along these axes have 32 messages a rank for each segment


def _shared() -> None:
    """Simulate hosts of four ranks that queue for their host's link, with two segments."""
    ranks = math.prod(_SHARED)
    schedule = build("ring", Frame(collective=Collective.ALL_REDUCE, grid=_SHARED, order=tuple(range(ranks))))
    hosts = ranks // 4
    inside = Way(link=_NVLINK, port=0)
    ways = []
    for host in range(hosts):
        between = Way(link=_EDR, port=1, leaves=(host,), enters=(hosts + host,))
        ways += [(inside, *[between] * 5)] * 4
    seconds_of_ranks(schedule, 100 * _MIB, ways, 2, [12.5e9] * (2 * hosts))


_SWEEPS = {
    "summit": ("resnet50", "12,96,384,1536,6144,12288,18432,21504,24576,27360"),
    "horovod": ("vgg16", "4,8,16,32,64,128,256,320,384,512"),
}


def _sweep(cluster: str) -> None:
    """Predict ten numbers of ranks with five batches, four wire types and five limits of buckets."""
    model, counts = _SWEEPS[cluster]
    settings = (
        f"ranks={counts}",
        "batch=32,64,128,256,512",
        "wire=none,fp16,bf16,int8",
        "bucket=4MiB,8MiB,16MiB,25MiB,50MiB",
    )
    command = [sys.executable, "-m", "multiring", "simulate", "--topology", cluster, "--model", model, "--rate", "350"]
    command += [word for setting in settings for word in ("--sweep", setting)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 -- this program itself


CASES = {
    "summit": _Case(_summit, 27_360, 5, 0.5),
    "plan": _Case(_plan, 4_560, 2, 0.5),
    "sweep": _Case(partial(_sweep, "horovod"), 512, 30, 10),
    "sweep of Summit": _Case(partial(_sweep, "summit"), 27_360, 30, 10),
    "unequal": _Case(_unequal, math.prod(_UNEQUAL), 100_000, 1_000_000, is_rate=True),
    "shared": _Case(_shared, math.prod(_SHARED), 2_000, 5_000, is_rate=True),
}


def measure(name: str) -> tuple[float, float]:
    """Return the elapsed seconds and the processor seconds of a cold process that runs a case."""
    begun = time.perf_counter()
    process = subprocess.Popen([sys.executable, __file__, "--case", name], preexec_fn=_on_one_core)  # noqa: PLW1509, S603 -- no thread here, and this file itself
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{name} failed with {process.returncode}")
    return time.perf_counter() - begun, used.ru_utime + used.ru_stime


def _on_one_core() -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])


def main() -> None:
    """Run one case, or measure all of them and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="run this case in this process, and measure nothing")
    case = parser.parse_args().case
    if case is not None:
        CASES[case].run()
        return
    print(f"{cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print("| case | ranks | elapsed s | processor s | ranks / s | floor | aim |\n|---|---|---|---|---|---|---|")
    for name, each in CASES.items():
        elapsed_s, used_s = measure(name)
        rate = f"{each.ranks / used_s:,.0f}" if each.is_rate else "-"
        unit = "/s" if each.is_rate else " s"
        print(
            f"| {name} | {each.ranks:,} | {elapsed_s:.2f} | {used_s:.2f} | {rate} | "
            f"{each.floor:,g}{unit} | {each.aim:,g}{unit} |"
        )


if __name__ == "__main__":
    main()
