"""Measure what trials lose beside their training, and prune trials on several ranks a thousand times.

    python benchmarks/evidence/trials/main.py [--only fill,sizes,ask,prunes] [--short]

`fill`: 64 trials of durations 10:1 on 8 ranks, each on one; `sizes`: on 1, 2 and 4 ranks. What their ranks reach is
compared with greedy assignment in the same order, computed. `ask`: 300 trials of 10 s with ten reports, eight at a
time. `prunes`: 1,000 prunes of trials on 2 and 3 ranks of 5, in jobs of 100 trials, under a time limit. The
jobs that are done are in build/trials_prunes.jsonl, and a further run goes on after them.
"""

import json
import os
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

RANK = Path(__file__).with_name("rank.py")
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


def load() -> str:
    """Return this machine's load."""
    return f"load {os.getloadavg()[0]:.0f}"


CLAIMS = {
    "fill": lambda share: fills(64 // share, [1]),
    "sizes": lambda share: fills(64 // share, [1, 2, 4]),
    "ask": lambda share: asks(300 // share),
    "prunes": lambda share: prunes(1000 // share),
}

if __name__ == "__main__":
    sys.exit(report(CLAIMS, __doc__ or ""))
