"""Compare all_reduce on unequal hosts: a grid with joined ranks, and a flat line.

    sudo .venv/bin/python benchmarks/studies/unequal_hosts.py [--jobs 6]
        [--lab '--hosts 4 --slots 4,4,3,1 --link 1gbit']

In the first kind of plan, extra ranks join the ranks of a grid. In the second, a flat line runs through all ranks. Each
job runs in its own lab (as root). For every size, the cheapest plan of each kind by the planner's price runs in
alternating turns of a quarter of a second. The verdict uses each job's ratio of medians. The exit code is 1 if joining
is slower by the interval.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TypedDict, cast

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # lets this script import from the repository root

from benchmarks.evidence.jobs.job import ROOT
from benchmarks.evidence.planner.rank import run
from benchmarks.evidence.support.claims import commit, machine

import multiring
from multiring._bench.cases import size_text
from multiring._bench.statistics import ratio_interval
from multiring._schedule import Collective
from multiring._settings import inherited_environment
from multiring.planner import Plan, Task, cheapest, ranked

LABS = ("--hosts 4 --slots 4,4,3,1 --link 1gbit", "--hosts 4 --slots 4,4,3,1")
SIZES = (256, 4 << 10, 64 << 10, 1 << 20, 8 << 20, 32 << 20)
TURNS, TIMED_S = 4, 0.25
SLOWER = 0.97  # a ratio whose interval ends below this is slower
JOB_S = 300.0
KINDS = ("flat", "joined")


class Told(TypedDict):
    """The report of a job on one size.

    Attributes:
        plans: The plan of each kind in words.
        seconds: The seconds per call in each turn, by kind.
        takes: The kind of the plan that the planner takes.
    """

    plans: dict[str, str]
    seconds: dict[str, list[float]]
    takes: str


def main() -> int:
    """Print a table for each lab; return 1 if joining was slower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=6, help="jobs for each lab (6)")
    parser.add_argument(
        "--lab", action="append", metavar="OPTIONS", help=f"labs to run instead of {' and '.join(LABS)}"
    )
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        return as_rank()
    print(f"# Hosts of unequal size, {time.strftime('%Y-%m-%d %H:%M')}\n")
    print(f"`{shlex.join(['python', *sys.argv])}` at commit {commit()}, {machine()}\n", flush=True)
    slower = [lab for lab in arguments.lab or LABS if not measured(lab, arguments.jobs)]
    return 1 if slower else 0


def measured(lab: str, jobs: int) -> bool:
    """Print the table of `lab`; return whether joining is slower for no size."""
    print(f"## {lab}\n\n| size | flat | joined | flat ms | joined ms | flat / joined | the planner takes |")
    print("|---|---|---|---|---|---|---|", flush=True)
    told = [job(lab) for _ in range(jobs)]
    holds = True
    for size in map(str, SIZES):
        medians = {kind: [statistics.median(each[size]["seconds"][kind]) for each in told] for kind in KINDS}
        ratio = ratio_interval(medians["flat"], medians["joined"])
        plans = told[-1][size]["plans"]
        taken = [each[size]["takes"] for each in told]
        holds &= ratio.high >= SLOWER or taken.count("joined") == 0
        cells = [f"{statistics.median(medians[kind]) * 1e3:.3g}" for kind in KINDS]
        cells += [f"{ratio.middle:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]", f"joined {taken.count('joined')}/{jobs}"]
        print("|", " | ".join([size_text(int(size)), *map(plans.__getitem__, KINDS), *cells]), "|", flush=True)
    print()
    return holds


def job(lab: str) -> dict[str, Told]:
    """Run one job in its own lab and return the report of its rank 0."""
    starter = [sys.executable, "-m", "multiring", "lab", *lab.split(), "--"]
    done = subprocess.run(  # noqa: S603 -- our own
        [*starter, sys.executable, __file__, "--rank"],
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
        env={**inherited_environment(), "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
    )
    lines = [line.partition("told ")[2] for line in done.stdout.splitlines() if "told " in line]
    if done.returncode or len(lines) != 1:
        raise RuntimeError(f"a job in {lab} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return cast("dict[str, Told]", json.loads(lines[0]))


def as_rank() -> int:
    """Measure both kinds alternately for each size; rank 0 prints the report."""
    group = multiring.init()
    told: dict[str, Told] = {}
    for size in SIZES:
        task = Task(collective=Collective.ALL_REDUCE, size_bytes=size)
        plans = ranked(task, group.topology)
        kinds = {"flat": next(each for each in plans if not joins(each)), "joined": next(filter(joins, plans))}
        array = group.allocate(size // 4, "float32")
        array[...] = group.rank
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for plan in kinds.values():
            run(group, task, plan, array, 2)
        for turn in range(TURNS):
            for kind in KINDS if turn % 2 == 0 else reversed(KINDS):
                one_s, _ = run(group, task, kinds[kind], array, 2)
                calls = np.array([max(3, round(TIMED_S / one_s))])
                group.all_reduce(calls, "min")
                seconds[kind].append(run(group, task, kinds[kind], array, int(calls[0]))[0])
                array[...] = group.rank
        told[str(size)] = Told(
            plans={kind: text_of(plan) for kind, plan in kinds.items()},
            seconds=seconds,
            takes="joined" if joins(cheapest(task, group.topology)) else "flat",
        )
    if group.rank == 0:
        print("told", json.dumps(told), flush=True)
    group.barrier()
    multiring.shutdown()
    return 0


def joins(plan: Plan) -> bool:
    """Return whether extra ranks join the ranks of a grid in the plan."""
    return bool(plan.schedule.frame.joined)


def text_of(plan: Plan) -> str:
    """Return a short description of a plan."""
    schedule = plan.schedule
    cut = "" if plan.segment_bytes is None else f", {size_text(plan.segment_bytes)}"
    return f"{schedule.algorithm} {' x '.join(map(str, schedule.grid))}{cut}"


if __name__ == "__main__":
    sys.exit(main())
