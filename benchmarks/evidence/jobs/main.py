"""Measure the reliability claims and print one table row per claim.

    python benchmarks/evidence/jobs/main.py [--only deaths,ranks] [--short]

Each row holds a claim and its measured figure. The exit code is 1 if any floor is missed. All jobs run under `multiring
run` on this machine. The printed table is kept in benchmarks/results/.
"""

import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import the tests' helpers

from benchmarks.evidence.jobs.job import Job, Word
from benchmarks.evidence.support.claims import Claim, report, shown
from tests.support.strangers import visit

from multiring._collectives import algorithms_of, build
from multiring._schedule import Collective, Frame, check

DEATH_S, GONE_S, JOIN_S, CHECK_S = 5.0, 10.0, 20.0, 2.0  # the time limits of the claims, in seconds
STAGES = ("init", "collective", "barrier", "shutdown")


def main() -> int:
    """Measure and print all claims; return the exit code."""
    return report(CLAIMS, __doc__ or "")


def deaths(share: int) -> Iterator[Claim]:
    """Kill ranks in every situation.

    The launcher must name the dead rank in time. No process, socket or shared memory may remain.
    """
    choice = random.Random(1)  # noqa: S311 -- which death comes next
    count = 200 // share
    failures, ended_s, left = [], [], []
    for number in range(count):
        stage, ranks = STAGES[number % 4], 2 + number // 4 % 2
        engine, workers = ("auto", "tcp")[number // 8 % 2], 2 * (number // 16 % 2)
        victim = choice.randrange(ranks)
        case = f"{stage}, rank {victim} of {ranks}, {engine}, {workers} workers"
        with Job(ranks, "die", stage, victim, workers, multiring_engine=engine) as job:
            seconds, fault = one_death(job, victim, choice.uniform(0, 0.05))
            ended_s.append(seconds)
            failures += [f"{case}: {fault}"] if fault else []
            left += [f"{case}: {each}" for each in job.leftovers(GONE_S)]
    yield Claim(
        text=f"{count} deaths of a rank: the launcher exits non-zero within {DEATH_S:g} s and names the rank",
        figure=shown(failures) or f"median {statistics.median(ended_s):.2f} s, longest {max(ended_s):.2f} s",
        holds=not failures,
    )
    yield Claim(
        text=f"{GONE_S:g} s later no process, no socket but TIME_WAIT, nothing in /dev/shm",
        figure=shown(left) or "nothing left",
        holds=not left,
    )


def one_death(job: Job, victim: int, delay_s: float) -> tuple[float, str]:
    """Kill a rank; return the seconds until the launcher exits, and any fault."""
    job.wait_for(bool, 60)
    time.sleep(delay_s)
    os.kill(job.heard[0]["pid"], signal.SIGKILL)
    killed = time.monotonic()
    try:
        code = job.launcher.wait(60)
    except subprocess.TimeoutExpired:
        return 60, f"the launcher still runs after 60 s\n{job.output[-2000:]}"
    seconds = time.monotonic() - killed
    named = f"rank {victim} (pid {job.heard[0]['pid']}) failed: " in job.output
    if code == 0 or not named or seconds > DEATH_S:
        return seconds, f"exit code {code} after {seconds:.2f} s, {'' if named else 'not '}named\n{job.output[-2000:]}"
    return seconds, ""


def launchers(share: int) -> Iterator[Claim]:
    """Kill the launcher; its ranks must exit soon afterwards."""
    choice = random.Random(2)  # noqa: S311 -- when the launcher dies
    count = 50 // share
    gone_s, left = [], []
    for number in range(count):
        with Job(3, "die", "collective", 0, 2 * (number % 2), multiring_engine=("auto", "tcp")[number // 2 % 2]) as job:
            job.wait_for(bool, 60)
            time.sleep(choice.uniform(0, 0.2))
            job.launcher.kill()
            job.launcher.wait()
            killed = time.monotonic()
            while job.processes() and time.monotonic() - killed < 60:
                time.sleep(0.02)
            gone_s.append(time.monotonic() - killed)
            left += job.leftovers(GONE_S)
    yield Claim(
        text=f"{count} deaths of the launcher (kill -9): every process of the job is gone within {DEATH_S:g} s",
        figure=f"median {statistics.median(gone_s):.2f} s, longest {max(gone_s):.2f} s",
        holds=max(gone_s) <= DEATH_S,
    )
    yield Claim(text=f"{GONE_S:g} s later nothing is left", figure=shown(left) or "nothing left", holds=not left)


def strangers(share: int) -> Iterator[Claim]:
    """Send random frames to the listening ports of a running job."""
    count = 10_000 // share
    with Job(3, "open", multiring_engine="tcp") as job:
        job.wait_for(lambda heard: len(heard) == 3, 60)
        ports = sorted(word["port"] for word in job.heard)
        start = time.monotonic()
        got_through = sum(visit(port, count // 3 + 1, seed) for seed, port in enumerate(ports))
        seconds = time.monotonic() - start
        job.tell("stop")
        job.wait_for(lambda heard: len(heard) == 6, 60)
        code = job.launcher.wait(30)
    done = [word for word in job.heard if "turns" in word]
    yield Claim(
        text=f"{count} random and truncated frames at the listening ports: refused, the job unharmed and right",
        figure=f"{got_through} got through in {seconds:.0f} s, {2 * done[0]['turns']} sums meanwhile, exit code {code}",
        holds=got_through == 0 and code == 0 and all(word["right"] for word in done),
    )


def ranks(share: int) -> Iterator[Claim]:
    """Start many ranks of a NumPy-only script on this machine."""
    opened = {}
    for count in (16, 36, 64):
        if share > 1 and count == 64:
            continue
        with Job(count, "join") as job:
            job.wait_for(lambda heard, count=count: len(heard) == count, 120)  # type: ignore[misc]
            code = job.launcher.wait(60)
        seconds = max(word["joined_s"] for word in job.heard) - job.start
        opened[count] = (max(word["descriptors"] for word in job.heard), tuple(job.heard[0]["grid"]))
        yield Claim(
            text=f"{count} ranks: from launch to the last return of init <= {JOIN_S:g} s, right sums",
            figure=f"{seconds:.1f} s, exit code {code}",
            holds=seconds <= JOIN_S and code == 0 and all(word["right"] for word in job.heard),
        )
    fewest, most = min(opened), max(opened)
    yield Claim(
        text="open descriptors a rank grow with the grid, not with the ranks",
        figure="; ".join(f"{count} ranks on {grid}: {number}" for count, (number, grid) in opened.items()),
        holds=opened[most][0] - opened[fewest][0] <= 2 * (len(opened[most][1]) - len(opened[fewest][1])) + 1,
    )


def sums(share: int) -> Iterator[Claim]:
    """Check that sums of random arrays are within the documented bound.

    All ranks and all runs must get the same bits.
    """
    count = 1000 // share
    for engine in ("auto", "tcp"):
        digests: list[Word] = []
        for _ in range(2):
            with Job(4, "sums", count, multiring_engine=engine) as job:
                job.wait_for(lambda heard: len(heard) == 4, 300)
                digests += job.heard
        same = len({word["digest"] for word in digests}) == 1
        yield Claim(
            text=f"{count} sums and averages of random float32 and bf16 within the bound, {engine} engine, 4 ranks",
            figure=f"all; bits {'the same' if same else 'DIFFER'} on 4 ranks in 2 runs",
            holds=same,
        )


def proof(_: int) -> Iterator[Claim]:
    """Measure how long the schedule of 1,024 ranks takes to build and to check."""
    frame = Frame(collective=Collective.ALL_REDUCE, grid=(32, 32), order=tuple(range(1024)))
    times = {}
    for algorithm in algorithms_of(frame.collective):  # Each algorithm runs once: `check` caches its result.
        start = time.perf_counter()
        check(build(algorithm, frame))
        times[algorithm] = time.perf_counter() - start
    yield Claim(
        text=f"build and check of all_reduce at 1,024 ranks on 32 x 32 <= {CHECK_S:g} s (aim 0.5 s)",
        figure=", ".join(f"{algorithm} {seconds:.2f} s" for algorithm, seconds in times.items()),
        holds=max(times.values()) <= CHECK_S,
    )


CLAIMS: dict[str, Callable[[int], Iterator[Claim]]] = {
    "proof": proof,
    "sums": sums,
    "ranks": ranks,
    "strangers": strangers,
    "launchers": launchers,
    "deaths": deaths,
}


if __name__ == "__main__":
    raise SystemExit(main())
