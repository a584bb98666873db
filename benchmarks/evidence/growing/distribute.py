"""Kill, freeze and ask to leave random ranks of scripts with `distribute`, and compare them with one process.

    python benchmarks/evidence/growing/distribute.py [--seconds 1800] [--seed 0] [--results FILE]

Each job has 1 to 4 ranks on this host at first, and up to two more are added. They train two models in float64: one
with a loader of torch, one with a loader of multiring. In half of the jobs the ranks have shares of the batch by their
speeds, which differ. Processes are killed, frozen and asked to leave as in main.py. The job must end well. The losses
of all steps must equal, to 1e-10, those of one process, and in each epoch each sample must be in one committed step. No
committed step may be lost. The results file has a line for each job; a further run goes on with the next seed.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.growing.distribute_rank import BATCH, EPOCHS, STEPS, made, of_multiring, of_torch, step
from benchmarks.evidence.growing.main import DEADLINE_S, SIGNALS, counted, disturb, numbers_of, ranks_of
from benchmarks.evidence.shrinking.main import KILLED, end_of_output, is_late, results_of_jobs, run_job
from benchmarks.evidence.support.claims import commit, machine

from multiring.data import Loader

RANK = Path(__file__).with_name("distribute_rank.py")
PAUSE_S = 0.004  # of a sample, on the fastest ranks
ASKED = 143


def main() -> int:
    """Run jobs, and print a table; return 1 if a job was wrong."""
    torch.set_num_threads(1)
    truth = alone()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    done = results_of_jobs(parser, Path("build/distribute.jsonl"), lambda _, seed, engine, __: job(seed, engine, truth))
    print(
        f"# Scripts with distribute, {time.strftime('%Y-%m-%d %H:%M')}\n\n"
        f"`{' '.join(sys.argv)}` at commit {commit()}, {machine()}\n\n"
        "| jobs | wrong | killed | frozen | SIGTERM | newcomers let in | steps lost | load |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    wrong = sum(bool(row["faults"]) for row in done)
    counts = [sum(row[name] for row in done) for name in (*SIGNALS, "joins", "lost")]
    print("|", " | ".join(map(str, [len(done), wrong, *counts, f"{os.getloadavg()[0]:.0f}"])), "|")
    return 1 if wrong else 0


def alone() -> list[Any]:
    """Return the losses and the samples of each step in one process, without ranks."""
    one, two, told = made(), made(), []
    loader, fed = of_torch(), Loader(of_multiring(), BATCH)
    for _ in range(EPOCHS):
        for (points, goals, numbers), other in zip(loader, fed, strict=True):
            losses = [
                step(*one, points, goals),
                step(*two, *(torch.from_numpy(other[key]) for key in ("points", "goals"))),
            ]
            told.append(
                [[float(each) for each in losses], [sorted(numbers.tolist()), sorted(other["numbers"].tolist())]]
            )
    return told


def job(seed: int, engine: str, truth: list[Any]) -> dict[str, Any]:
    """Run a job; return what was done to it, and what was wrong."""
    random = Random(seed)  # noqa: S311 -- no secret
    size = random.randint(1, 4)
    most = size + random.randint(0, 2)
    shares = random.choice(("equal", "speed"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        variables = {"MULTIRING_ENGINE": engine, "MULTIRING_STALL_TIMEOUT_S": "30", "MULTIRING_STALL_WARN_S": "5"}
        words = [*ranks_of(size, most), str(RANK), name, shares, str(PAUSE_S)]
        ended = run_job(folder, words, variables, lambda process: disturb(process, folder, size, random), DEADLINE_S)
        if ended is None:
            told = end_of_output(folder)
            return {"shares": shares, "faults": ["it hangs", told], **numbers_of({}), "joins": 0, "lost": 0}
        (acts, last_s), code = ended
        lines = [line.split() for line in (folder / "log").read_text().splitlines()]
        faults = faults_in(folder, 0 if code in (KILLED, ASKED) and is_late(lines, last_s, STEPS) else code, truth)
        found = counted(lines, size)
        if found["lost"] > 1:
            faults.append(f"{found['lost']} committed steps were lost")
        if faults:
            faults.append(end_of_output(folder))
        del found["join_s"]
        return {"shares": shares, "faults": faults, **numbers_of(acts), **found}


def faults_in(folder: Path, code: int, truth: list[Any]) -> list[str]:
    """Return what is wrong with the job's ends."""
    faults = [] if code == 0 else [f"exit code {code}"]
    ends = {file.name: json.loads(file.read_text()) for file in sorted(folder.glob("end-*"))}
    if not ends:
        faults.append("no rank came to the end")
    for name, told in ends.items():
        if len(told) != STEPS:
            faults.append(f"{name}: {len(told)} steps")
        for number, ((losses, seen), (wanted, samples)) in enumerate(zip(told, truth, strict=False)):
            if seen != samples:
                faults.append(f"{name}: step {number} has the samples {seen}, want {samples}")
                break
            if max(abs(one - other) for one, other in zip(losses, wanted, strict=True)) > 1e-10:
                faults.append(f"{name}: step {number} has the losses {losses}, want {wanted}")
                break
    return faults


if __name__ == "__main__":
    sys.exit(main())
