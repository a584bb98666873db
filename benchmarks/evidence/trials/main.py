"""Measure what trials lose beside their training, and prune trials on several ranks a thousand times.

    python benchmarks/evidence/trials/main.py [--only fill,sizes,ask,prunes,deaths,moves,copies,storages] [--short]

`fill`: 64 trials of durations 10:1 on 8 ranks, each on one; `sizes`: on 1, 2 and 4 ranks. What their ranks reach is
compared with greedy assignment in the same order, computed. `ask`: 300 trials of 10 s with ten reports, eight at a
time. `prunes`: 1,000 prunes of trials on 2 and 3 ranks of 5, in jobs of 100 trials, under a time limit. The
jobs that are done are in build/trials_prunes.jsonl, and a further run goes on after them. `deaths`: studies of
`multiring trials run` whose script fails at random steps, whose ranks are killed at random moments, and whose command
is ended by SIGINT, SIGTERM or SIGKILL and given again. `moves`: studies of `multiring.trials.run` whose ranks are
killed at random moments, first the one that holds the study. `copies`: a model and its optimizer of 100 MB that one
member of a population copies from the other, on one host. `storages`: studies in SQLite and PostgreSQL that
optuna-dashboard shows; it wants root, Debian's PostgreSQL, and `pip install pg8000 optuna-dashboard`.
"""

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.support.claims import Claim, report
from benchmarks.evidence.trials.moving import RANK, lives, moves, states_in
from benchmarks.evidence.trials.storages import storages

RANKS = 8
JOB_S = 1500.0
DONE = Path("build/trials_prunes.jsonl")


def study(ranks: int, case: str, *numbers: Any) -> Any:
    """Run a study as a job of its own; return the figures of its rank 0."""
    with tempfile.TemporaryDirectory() as name:
        output = Path(name) / "output.json"
        words = [sys.executable, "-m", "multiring", "run", "-n", str(ranks), str(RANK), case, str(output)]
        subprocess.run(  # noqa: S603 -- our own program
            [*words, json.dumps(numbers)], check=True, timeout=JOB_S, stdout=sys.stderr
        )
        return json.loads(output.read_text())


def greedy_s(durations: Sequence[float], ranks: Sequence[int], size: int) -> float:
    """Return the seconds that greedy assignment takes: in order, each trial as soon as enough ranks are free."""
    free = [0.0] * size  # when each rank is free
    start = 0.0
    for duration, count in zip(durations, ranks, strict=True):
        free.sort()
        start = max(start, free[count - 1])
        free[:count] = [start + duration] * count
    return max(free)


def fills(count: int, sizes: list[int]) -> Iterator[Claim]:
    """Compare the ranks' share of time in training with greedy assignment's."""
    found = study(RANKS, "fill", count, 10.0, sizes)
    best_s = greedy_s(found["durations"], found["ranks"], RANKS)
    took_s = max(end for _, end, _ in found["ends"])
    # The same work in both times: the shares of time in training are as their inverses.
    share = best_s / took_s
    work_s = sum(duration * count for duration, count in zip(found["durations"], found["ranks"], strict=True))
    yield Claim(
        text=f"{count} trials of durations 10:1 on {sizes} of {RANKS} ranks: rank-seconds in training of what greedy "
        "assignment in the same order reaches, 97 % (aim 99 %)",
        figure=f"{share:.2%}: {work_s / RANKS / took_s:.1%} of all rank-seconds against "
        f"{work_s / RANKS / best_s:.1%}; {took_s:.2f} s against {best_s:.2f} s; {load()}",
        holds=share >= 0.97 and set(found["states"]) == {"complete"},
    )


def asks(count: int) -> Iterator[Claim]:
    """Measure the time between trials and in reports."""
    seconds = 10.0
    spans = study(RANKS, "ask", count, seconds)["spans"]
    between_s = sum(after[0] - before[1] for each in spans for before, after in pairwise(each))
    reports_s = sum(asking_s for each in spans for *_, asking_s in each)
    all_s = sum(each[-1][1] - each[0][0] for each in spans)
    share = (between_s + reports_s) / all_s
    yield Claim(
        text=f"{count} trials of {seconds:g} s with ten reports, {RANKS} at a time, TPE and the median pruner: ask and "
        "report take at most 2 % of the ranks' time (aim 1 %)",
        figure=f"{share:.2%}: {between_s / count * 1e3:.1f} ms a trial between trials, "
        f"{reports_s / count / 10 * 1e3:.2f} ms a report with its question; {load()}",
        holds=share <= 0.02,
    )


def prunes(wanted: int) -> Iterator[Claim]:
    """Prune trials on 2 and 3 ranks."""
    DONE.parent.mkdir(exist_ok=True)
    done = [json.loads(line) for line in DONE.read_text().splitlines()] if DONE.exists() else []
    while (pruned := sum(each["pruned"] for each in done)) < wanted:
        began_s = time.monotonic()
        found = study(5, "prunes", 100, len(done))
        states = found["states"]
        done.append(
            {
                "seed": len(done),
                "pruned": sum(state == "pruned" for _, state in states),
                "on_3": sum(state == "pruned" and ranks == 3 for ranks, state in states),
                "wrong": [*found["wrong"], *(f"a trial {state}" for _, state in states if state == "failed")],
                "seconds": time.monotonic() - began_s,
                "load": os.getloadavg()[0],
            }
        )
        with DONE.open("a") as file:
            file.write(json.dumps(done[-1]) + "\n")
    wrong = [each for job in done for each in job["wrong"]]
    yield Claim(
        text=f"{wanted} prunes of trials on 2 and 3 of 5 ranks, with a collective before each question: no hang, no "
        "failure, no wrong sum",
        figure=f"{pruned} prunes, {sum(each['on_3'] for each in done)} of them on 3 ranks, in {len(done)} jobs of 100 "
        f"trials, the slowest of {max(each['seconds'] for each in done):.0f} s; {len(wrong)} wrong"
        f"{': ' + wrong[0] if wrong else ''}; {load()}",
        holds=not wrong,
    )


DYING = """
import argparse, os, random, signal, sys, time

words = argparse.ArgumentParser()
words.add_argument("--x", type=float)
words.add_argument("--trial", type=int)
given = words.parse_args()
with open("pids", "a") as file:
    file.write(f"{os.getpid()}\\n")
chance = random.Random(10 * given.trial + int(os.environ["MULTIRING_RANK"]))
dies_at = chance.randrange(5) if chance.random() < 0.25 else 5
for step in range(5):
    print(f"step {step}: loss {given.x + 1 / (step + 1)}")
    time.sleep(0.2 * chance.random())
    if step == dies_at:
        chance.choice([lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: os._exit(5), lambda: sys.exit("random")])()
"""
STUDY = """
trials = 14
ranks = 4
ranks_per_trial = "ranks"
words = ["--x", "{x}", "--trial", "{trial}"]
report = "step {step}: loss {value}"
storage = "study.db"
space = {x = {low = 0.0, high = 1.0}, ranks = [1, 2]}
pruner = {kind = "MedianPruner", n_startup_trials = 3}
sampler = {kind = "RandomSampler", seed = SEED}
"""


def deaths(count: int) -> Iterator[Claim]:
    """Run studies whose ranks and command die at random moments."""
    kills, ends, trials, wrong = 0, 0, 0, []
    for seed in range(count):
        chance = random.Random(seed)  # noqa: S311 -- no secret
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "train.py").write_text(DYING)
            (folder / "study.toml").write_text(STUDY.replace("SEED", str(seed)))
            while True:
                code, killed, ended = one_run(folder, chance, may_end=chance.random() < 0.5)
                kills, ends = kills + killed, ends + (ended is not None)
                if left := living_after(folder):
                    wrong.append(f"seed {seed}: {left} processes left after exit code {code}")
                if ended is None:
                    break
            found = states_in(folder)
            trials += len(found)
            wrong += [f"seed {seed}: {each}" for each in faults_in(found)]
    yield Claim(
        text=f"{count} studies of 14 trials on 1 or 2 ranks of 4, whose script and ranks die at random moments, and "
        "whose command is ended and given again: every trial has the right value, or a reason; reports are right; no "
        "process is left",
        figure=f"{trials} trials, {kills} ranks killed, {ends} commands ended, {len(wrong)} wrong"
        f"{': ' + wrong[0] if wrong else ''}; {load()}",
        holds=not wrong,
    )


def one_run(folder: Path, chance: random.Random, *, may_end: bool) -> tuple[int, int, int | None]:
    """Give the command once; return its exit code, how many ranks were killed, and the signal that it got."""
    words = [sys.executable, "-m", "multiring", "trials", "run", "study.toml", "--", sys.executable, "train.py"]
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log)  # noqa: S603 -- our own program
        until_s, killed, before = time.monotonic() + JOB_S, 0, len(pids(folder))
        while process.poll() is None and time.monotonic() < until_s:
            time.sleep(0.3 + chance.random())
            live = [each for each in pids(folder) if lives(each)]
            if live and chance.random() < 0.2:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(live), signal.SIGKILL)
                    killed += 1
            if may_end and len(pids(folder)) > before + 4:
                number = chance.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
                process.send_signal(number)
                return process.wait(JOB_S), killed, number
        return process.wait(1.0), killed, None


def pids(folder: Path) -> list[int]:
    """Return the processes of all ranks that have begun."""
    path = folder / "pids"
    return [int(each) for each in path.read_text().split()] if path.exists() else []


def living_after(folder: Path) -> int:
    """Return how many ranks live 20 s after the end of their command, or sooner none."""
    until_s = time.monotonic() + 20.0
    while (left := sum(map(lives, pids(folder)))) and time.monotonic() < until_s:
        time.sleep(0.1)
    return left


def faults_in(trials: Sequence[Any]) -> Iterator[str]:
    """Yield what is wrong with the trials of a study."""
    counted = 0
    for each in trials:
        state, reason = each.state.name, each.user_attrs.get("multiring:reason", "")
        counted += not reason.startswith("interrupted")
        if state == "COMPLETE":
            if abs(each.value - each.params["x"] - 0.2) > 1e-9 or len(each.intermediate_values) != 5:
                yield f"trial {each.number}: {each.value}, {each.intermediate_values}"
        elif state not in ("FAIL", "PRUNED") or (state == "FAIL" and not reason):
            yield f"trial {each.number}: {state} without a reason"
        for step, value in each.intermediate_values.items():
            if abs(value - each.params["x"] - 1 / (step + 1)) > 1e-9:
                yield f"trial {each.number}: {value} at step {step}"
    if counted != 14:
        yield f"{counted} of 14 trials"


def copies(rounds: int) -> Iterator[Claim]:
    """Measure a copy of 100 MB from member to member."""
    found = study(2, "copies", 100_000_000, rounds)
    seconds = sorted(found["seconds"])
    median_s = statistics.median(seconds)
    yield Claim(
        text="a model and its optimizer of 100 MB, copied from one member of a population to another on one host, "
        "loaded, and right: 0.5 s (aim 0.2 s)",
        figure=f"{median_s:.3f} s in the median of {len(seconds)}, {seconds[0]:.3f} to {seconds[-1]:.3f} s; "
        f"{len(found['wrong'])} wrong; {load()}",
        holds=median_s <= 0.5 and not found["wrong"],
    )


def load() -> str:
    """Return this machine's load."""
    return f"load {os.getloadavg()[0]:.0f}"


CLAIMS = {
    "fill": lambda share: fills(64 // share, [1]),
    "sizes": lambda share: fills(64 // share, [1, 2, 4]),
    "ask": lambda share: asks(300 // share),
    "prunes": lambda share: prunes(1000 // share),
    "deaths": lambda share: deaths(20 // share),
    "moves": lambda share: moves(60 // share, load),
    "storages": lambda share: storages(max(50, 60 // share), load),
    "copies": lambda share: copies(max(4, 30 // share)),
}

if __name__ == "__main__":
    sys.exit(report(CLAIMS, __doc__ or ""))
