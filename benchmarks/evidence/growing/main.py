"""Kill, freeze and ask to leave random ranks of jobs in which newcomers replace lost ranks.

    python benchmarks/evidence/growing/main.py [--seconds 1800] [--seed 0] [--results FILE]

Each job has 1 to 4 ranks on this host at first, and up to two more are added. They train with NumPy, or in a third of
the jobs with torch. Processes are killed at random times, also newcomers while they wait or come in, some are frozen,
and some get SIGTERM; one rank of the start is spared, so that somebody has the state. The job must end well. Its
weights must equal, to 1e-10, those of the same steps in one process, with as many ranks at each step. No committed step
may be lost. The results file has a line for each job; a further run goes on with the next seed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.shrinking.main import (
    KILLED,
    RANK,
    end_of_output,
    is_late,
    results_of_jobs,
    run_job,
    send,
    trained,
)
from benchmarks.evidence.support.claims import commit, machine

STEPS, DEADLINE_S = 240, 300.0
PAUSES_S = (0.0, 0.02, 0.2, 0.5, 1.0, 2.0)
MOST_ACTS = 8
SIGNALS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP, "asked": signal.SIGTERM}


def main() -> int:
    """Run jobs, and print a table; return 1 if a job was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    done = results_of_jobs(parser, Path("build/growing.jsonl"), lambda _, *words: job(*words))
    gaps = sorted(each for row in done for each in row["join_s"])
    print(
        f"# Ranks that come and go, {time.strftime('%Y-%m-%d %H:%M')}\n\n"
        f"`{' '.join(sys.argv)}` at commit {commit()}, {machine()}\n"
    )
    print(
        "| jobs | wrong | killed | frozen | SIGTERM | newcomers let in | steps lost "
        "| steps stop for a newcomer, median | longest | load |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    wrong = sum(bool(row["faults"]) for row in done)
    counts = [sum(row[name] for row in done) for name in (*SIGNALS, "joins", "lost")]
    told = [f"{gaps[len(gaps) // 2]:.2f} s", f"{gaps[-1]:.2f} s"] if gaps else ["-", "-"]
    print("|", " | ".join(map(str, [len(done), wrong, *counts, *told, f"{os.getloadavg()[0]:.0f}"])), "|")
    return 1 if wrong else 0


def job(seed: int, engine: str, kind: str) -> dict[str, Any]:
    """Run a job; return what was done to it, and what was wrong."""
    random = Random(seed)  # noqa: S311 -- no secret
    size = random.randint(1, 4)
    most = size + random.randint(0, 2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Ranks that import torch set their optimizers up at different times.
        steps, pause_s, stall_s = (STEPS, 0.04, "4") if kind == "numpy" else (2 * STEPS, 0.1, "30")
        variables = {"MULTIRING_ENGINE": engine, "MULTIRING_STALL_TIMEOUT_S": stall_s, "MULTIRING_STALL_WARN_S": "2"}
        words = [*ranks_of(size, most), str(RANK), name, str(steps), str(pause_s), kind]
        ended = run_job(folder, words, variables, lambda process: disturb(process, folder, size, random), DEADLINE_S)
        if ended is None:
            told = end_of_output(folder)
            return {"faults": ["it hangs", told], **numbers_of({}), "joins": 0, "lost": 0, "join_s": []}
        (acts, last_s), code = ended
        lines = [line.split() for line in (folder / "log").read_text().splitlines()]
        faults = faults_in(folder, steps, 0 if code == KILLED and is_late(lines, last_s, steps) else code)
        if faults:
            faults.append(end_of_output(folder))
        return {"faults": faults, **numbers_of(acts), **counted(lines, size)}


def ranks_of(size: int, most: int) -> list[str]:
    """Return the words for a job that begins with `size` ranks, goes on with one, and takes newcomers up to `most`."""
    return ["-n", str(size), "--min-ranks", "1", "--max-ranks", str(most)]


def numbers_of(acts: Mapping[int, int]) -> dict[str, int]:
    """Return how many processes got which signal."""
    return {name: acts.get(number, 0) for name, number in SIGNALS.items()}


def disturb(process: subprocess.Popen[bytes], folder: Path, size: int, random: Random) -> tuple[dict[int, int], float]:
    """Kill and freeze processes, but the spared one; return how many got each signal, and when the last did."""
    until_s = time.monotonic() + DEADLINE_S
    while not all((folder / f"in-{rank}").exists() for rank in range(size)):
        if process.poll() is not None or time.monotonic() > until_s:
            return {}, 0.0
        time.sleep(0.01)
    spared = random.randrange(size)
    lost: set[int] = set()
    thaw: tuple[int, float] | None = None
    counts, last_s = Counter[int](), 0.0
    for _ in range(MOST_ACTS):
        time.sleep(random.choice(PAUSES_S))
        if process.poll() is not None:
            break
        there = sorted(int(each.name.partition("-")[2]) for each in folder.glob("pid-*") if "." not in each.name)
        alive = [each for each in there if each != spared and each not in lost]
        if not alive:
            continue
        victim = random.choice(alive)
        freezes = random.random() < 0.2 and thaw is None and len(alive) > 1
        pid = int((folder / f"pid-{victim}").read_text())
        leaves = not freezes and random.random() < 0.3
        number = signal.SIGSTOP if freezes else signal.SIGTERM if leaves else signal.SIGKILL
        if send(pid, number):
            counts[number] += 1
            last_s = time.time()
        if freezes:
            thaw = pid, time.monotonic() + random.choice((0.5, 3.0, 8.0, 20.0))
        lost.add(victim)
    if thaw is not None:
        time.sleep(max(0.0, thaw[1] - time.monotonic()))
        send(thaw[0], signal.SIGCONT)
    return counts, last_s


def faults_in(folder: Path, steps: int, code: int) -> list[str]:
    """Return what is wrong with the job's ends."""
    ends = [json.loads(file.read_text()) for file in sorted(folder.glob("end-*"))]
    faults = [] if code == 0 else [f"exit code {code}"]
    if not ends:
        faults.append("no rank came to the end")
    for sizes, weights in ends:
        if sizes != ends[0][0] or len(sizes) != steps:
            faults.append(f"numbers of ranks {sizes}")
        elif np.abs(np.array(weights) - trained(sizes)).max() > 1e-10:
            faults.append(f"weights {weights}")
    return faults


def counted(lines: Sequence[Sequence[str]], size: int) -> dict[str, Any]:
    """Return the numbers of newcomers and lost steps, and how long the steps stopped for each newcomer."""
    commits = sorted((float(at), int(step)) for at, _, kind, step, _ in lines if kind == "commit")
    begins = [(float(at), int(born), int(step)) for at, born, kind, step, _ in lines if kind == "begin"]
    came = {born: at for at, born, _ in reversed(begins) if born >= size}
    lost = [max((done for when, done in commits if when < at), default=0) - step for at, _, step in begins]
    return {"joins": len(came), "lost": max([0, *lost]), "join_s": [_gap(commits, at) for at in came.values()]}


def _gap(commits: Sequence[tuple[float, int]], at: float) -> float:
    before = max((when for when, _ in commits if when <= at), default=at)
    return min((when for when, _ in commits if when > at), default=at) - before


if __name__ == "__main__":
    sys.exit(main())
