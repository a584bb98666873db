"""Measure plans as one rank of a job.

    python rank.py FOLDER plans SIZE,...

For each size, rank 0 sends a report to FOLDER/words. It holds the chosen plan and the other candidates, each with its
time in every turn and the share of the machine's cores that was idle meanwhile.
"""

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil  # type: ignore[import-untyped] # it has no annotations
from benchmarks.evidence.jobs.rank import tell

import multiring
from multiring._probe import probe
from multiring._schedule import Collective
from multiring._topology import Topology, text_of
from multiring.planner import Plan, Task, cheapest, ranked, repriced

TURNS = 3
AGAIN_TURNS, RIVALS = 6, 8  # Plans that were faster than the chosen plan, or nearly as fast, get more turns.
NEARLY = 1.02
TIMED_S = 0.3  # the time to measure one plan in one turn, by its predicted time
LEAST_CALLS, MOST_CALLS = 2, 200
DRAIN_S = 1.0


def main() -> None:
    """Probe the topology, then measure the plans for each size."""
    folder, _, sizes = sys.argv[1:]
    group = multiring.init()
    topology = probe(group).topology
    for size in sizes.split(","):
        task = Task(collective=Collective.ALL_REDUCE, size_bytes=int(size))
        chosen = cheapest(task, topology)
        plans = [chosen, *contenders(task, topology, chosen)]
        turns = measure(group, task, plans)
        if group.rank == 0:
            words = [word_of(*each) for each in zip(plans, turns, strict=True)]
            tell(Path(folder), size=int(size), topology=text_of(topology), plans=words)
    group.barrier()


def contenders(task: Task, topology: Topology, chosen: Plan) -> list[Plan]:
    """Return the plans to compare with `chosen`: the best predicted one of each kind.

    A kind is an algorithm, a grid and a set of shares. For the kind of `chosen`, return all segment lengths, even if
    the planner does not cut the array.
    """
    there_are = ranked(task, replace(topology, takes_turns=False))
    plans = [replace(plan, predicted_seconds=repriced(task, plan, topology)) for plan in there_are]
    own = kind_of(chosen)
    seen: set[tuple[object, ...]] = {own}
    kept = []
    for plan in sorted(plans, key=lambda plan: plan.predicted_seconds):
        kind = kind_of(plan)
        if kind not in seen or (kind == own and plan.segment_bytes != chosen.segment_bytes):
            kept.append(plan)
        seen.add(kind)
    return kept


def kind_of(plan: Plan) -> tuple[object, ...]:
    """Return the properties that distinguish plans, apart from their segments."""
    return plan.schedule.algorithm, plan.schedule.grid, plan.schedule.shares


def measure(group: multiring.Group, task: Task, plans: list[Plan]) -> list[list[tuple[float, float]]]:
    """Return what `run` measured of each plan, for each turn.

    Every other turn runs in reverse order. The fastest of many plans is partly the luckiest, so the chosen plan and its
    rivals get additional turns.
    """
    array = group.allocate(task.size_bytes // 4, "float32")
    array[...] = 0
    run(group, task, plans[0], array, max(1, round(DRAIN_S / plans[0].predicted_seconds)))
    turns: list[list[tuple[float, float]]] = [[] for _ in plans]
    among = list(range(len(plans)))
    for turn in range(TURNS + AGAIN_TURNS):
        if turn == TURNS:
            medians = [statistics.median(took for took, _ in each) for each in turns]
            faster = [index for index in among[1:] if medians[index] < NEARLY * medians[0]]
            among = [0, *sorted(faster, key=medians.__getitem__)[:RIVALS]]
            if len(among) == 1:
                break
        for index in among if turn % 2 == 0 else reversed(among):
            calls = min(max(round(TIMED_S / plans[index].predicted_seconds), LEAST_CALLS), MOST_CALLS)
            turns[index].append(run(group, task, plans[index], array, calls))
    return turns


def run(
    group: multiring.Group,
    task: Task,
    plan: Plan,
    array: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]",
    calls: int,
) -> tuple[float, float]:
    """Return the seconds of a call of `plan` on the slowest rank, and the share of the machine's cores that was idle.

    Both are means over `calls` calls, after an untimed call.
    """
    group.pin(task, plan)
    group.all_reduce(array)
    group.barrier()
    psutil.cpu_times_percent()  # from now
    begin = time.perf_counter()
    for _ in range(calls):
        group.all_reduce(array)
    taken = np.array([(time.perf_counter() - begin) / calls])
    idle = psutil.cpu_times_percent().idle / 100
    group.all_reduce(taken, "max")
    return float(taken[0]), idle


def word_of(plan: Plan, turns: list[tuple[float, float]]) -> dict[str, object]:
    """Return a plan and what was measured of it as a JSON object."""
    schedule = plan.schedule
    return {
        "algorithm": schedule.algorithm,
        "grid": schedule.grid,
        "shares": schedule.shares,
        "segment_bytes": plan.segment_bytes,
        "predicted_s": plan.predicted_seconds,
        "seconds": [took for took, _ in turns],
        "idle": [idle for _, idle in turns],
    }


if __name__ == "__main__":
    main()
