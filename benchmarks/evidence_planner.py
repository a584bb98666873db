"""Plans in labs of many kinds: is the chosen one as good as the best measured, and which algorithm won where."""

import json
import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.evidence import Claim, shown
from benchmarks.evidence_job import ROOT, LabJob

RANK = Path(__file__).with_name("evidence_planner_rank.py")
# What was measured, with the constants that the probe found: another price can be held against it without a machine.
RECORDS = ROOT / "build" / "evidence_planner.jsonl"
WITHIN, GAIN = 1.05, 1.10
KIB, MIB = 2**10, 2**20
SMALL, MIDDLE, LARGE = 4 * KIB, 512 * KIB, 16 * MIB
JOB_S = 600.0
# Where nothing limits them links are as fast as processors are free, which differs from job to job.
UNLIMITED_JOBS = 3
# Lab -> sizes: 30 configurations of hosts, slots, rates, racks, rails and sizes.
LABS: dict[str, tuple[int, ...]] = {
    "--hosts 4 --slots 2 --link 1gbit": (SMALL, MIDDLE, LARGE),
    "--hosts 2 --slots 4 --link 1gbit": (SMALL, MIDDLE, LARGE),
    "--hosts 4 --slots 1 --link 1gbit": (SMALL, MIDDLE, LARGE),
    "--hosts 8 --slots 1 --link 250mbit": (SMALL, MIDDLE, 4 * MIB),
    "--hosts 3 --slots 2 --link 100mbit": (SMALL, MIDDLE, 2 * MIB),
    "--hosts 2 --slots 1": (SMALL, MIDDLE, LARGE),
    "--hosts 4 --slots 2": (SMALL, MIDDLE, LARGE),
    "--hosts 8 --slots 1 --link 1gbit --rack 2 --uplink 500mbit": (SMALL, MIDDLE, LARGE),
    "--hosts 4 --slots 2 --link 1gbit --rack 2 --uplink 250mbit": (MIDDLE, 4 * MIB),
    "--hosts 4 --slots 1 --link 1gbit --rail 250mbit": (MIDDLE, LARGE),
    "--hosts 2 --slots 2 --link 500mbit --rail 500mbit": (MIDDLE, LARGE),
}


@dataclass(frozen=True, slots=True)
class Tried:
    """One plan, as measured: what a call took in each turn. In the same turn all plans were measured, one by one."""

    algorithm: str
    grid: tuple[int, ...]
    shares: tuple[int, ...]
    segment_bytes: int | None
    predicted_s: float
    turns: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median turn."""
        return statistics.median(self.turns)

    def over(self, other: "Tried") -> list[float]:
        """Return how many times as long as `other` this took, in each of the turns that both have."""
        return [mine / theirs for mine, theirs in zip(self.turns, other.turns, strict=False)]

    @property
    def plan(self) -> "Tried":
        """The same in all jobs."""
        return replace(self, predicted_s=0.0, turns=())

    def __str__(self) -> str:
        cut = "whole" if self.segment_bytes is None else f"{self.segment_bytes // KIB} KiB"
        channels = f", channels {':'.join(map(str, self.shares))}" if len(self.shares) > 1 else ""
        return f"{self.algorithm} on {' x '.join(map(str, self.grid))}{channels}, {cut}"


@dataclass(frozen=True, slots=True)
class Configuration:
    """What jobs in one lab measured for one size; each job's chosen plan comes first."""

    lab: str
    size_bytes: int
    jobs: tuple[tuple[Tried, ...], ...]

    def __str__(self) -> str:
        size = f"{self.size_bytes // MIB} MiB" if self.size_bytes >= MIB else f"{self.size_bytes // KIB} KiB"
        return f"{self.lab}, {size}"

    @property
    def chosen(self) -> list[Tried]:
        """What the planner takes, in each job."""
        return [job[0] for job in self.jobs]

    @property
    def plans(self) -> set[Tried]:
        """What most jobs have measured."""
        counts = Counter(tried.plan for job in self.jobs for tried in job)
        return {plan for plan, count in counts.items() if 2 * count > len(self.jobs)}

    def behind(self, plan: Tried) -> float:
        """Return how many times as long as `plan` the chosen one took: the median over all jobs' turns."""
        return statistics.median(
            ratio for job in self.jobs for tried in job if tried.plan == plan for ratio in job[0].over(tried)
        )

    @property
    def best(self) -> Tried:
        """The plan that was fastest, held against the chosen one turn by turn; the chosen one if none was faster."""
        return max([self.chosen[0].plan, *sorted(self.plans, key=str)], key=self.behind_or_level)

    def behind_or_level(self, plan: Tried) -> float:
        """As `behind`; 1 for a plan that few have measured."""
        return self.behind(plan) if plan in self.plans else 1.0

    def seconds(self, plan: Tried) -> float:
        """Return the median of the jobs' median turns of `plan`."""
        return statistics.median(tried.seconds for job in self.jobs for tried in job if tried.plan == plan)

    @property
    def gains(self) -> tuple[float, float] | None:
        """By how much the best grid of several axes beats the ring through all ranks: predicted, and measured.

        None: there are not both.
        """
        predicted, measured = [], []
        for job in self.jobs:
            flat = [tried for tried in job if tried.algorithm == "ring" and len(tried.grid) == 1]
            multi = [tried for tried in job if len(tried.grid) > 1]
            if not flat or not multi:
                return None
            one, several = (min(each, key=lambda tried: tried.predicted_s) for each in (flat, multi))
            predicted.append(one.predicted_s / several.predicted_s)
            measured += one.over(several)
        return statistics.median(predicted), statistics.median(measured)


def planner(share: int, *, limited: bool) -> Iterator[Claim]:
    """Yield a claim for each configuration of links with a limit, or without one, and what they amount to together."""
    found: list[Configuration] = []
    labs = {lab: sizes for lab, sizes in LABS.items() if ("--link" in lab) == limited}
    jobs = 1 if limited else max(1, UNLIMITED_JOBS // share)
    for lab, sizes in list(labs.items())[:: min(share, len(labs))]:
        heard: dict[int, list[tuple[Tried, ...]]] = {size: [] for size in sizes}
        for _ in range(jobs):
            for size, plans in measured(lab, sizes):
                heard[size].append(plans)
        for size, tried in heard.items():
            if len(tried) < jobs:
                text = f"plans in {lab} of {size} bytes are measured"
                yield Claim(text=text, figure=f"{len(tried)} of {jobs} jobs got so far", holds=False)
            if tried:
                found.append(Configuration(lab, size, tuple(tried)))
                yield assessed(found[-1])
    yield from together(found)


def assessed(each: Configuration) -> Claim:
    """Return the claim that the chosen plan is as good as the best."""
    ratio = each.behind_or_level(each.best)
    counts = Counter(str(tried) for tried in each.chosen)
    names = ", ".join(f"{name} ({count} x)" if len(counts) > 1 else name for name, count in counts.most_common())
    taken, predicted = (
        statistics.median(getattr(tried, name) for tried in each.chosen) for name in ("seconds", "predicted_s")
    )
    return Claim(
        text=f"{each}: of {len(each.plans)} plans the chosen one is within {WITHIN - 1:.0%} of the best",
        figure=f"{ratio:.3f}: {names} {taken * 1e3:.3g} ms (predicted {predicted * 1e3:.3g}); "
        f"best {each.best} {each.seconds(each.best) * 1e3:.3g} ms",
        holds=ratio <= WITHIN,
    )


def measured(lab: str, sizes: tuple[int, ...]) -> list[tuple[int, tuple[Tried, ...]]]:
    """Return the sizes that one job has measured, as far as it got, each with its plans."""
    with LabJob(lab, RANK, "plans", ",".join(map(str, sizes))) as job:
        with suppress(TimeoutError):
            job.wait_for(lambda heard: len(heard) == len(sizes), JOB_S)
        heard = list(job.heard)
    with RECORDS.open("a") as records:
        for word in heard:
            records.write(json.dumps({"lab": lab, **word}) + "\n")
    return [(word["size"], tuple(map(tried_of, word["plans"]))) for word in heard]


def tried_of(word: dict[str, Any]) -> Tried:
    """Return a plan as its rank told of it."""
    grid, shares = tuple(word["grid"]), tuple(word["shares"])
    return Tried(word["algorithm"], grid, shares, word["segment_bytes"], word["predicted_s"], tuple(word["seconds"]))


def together(found: list[Configuration]) -> Iterator[Claim]:
    """Yield how multi-ring is beside the flat ring, and who won how often."""
    gains = [(each.gains[1], f"{each}: {each.gains[1]:.2f} x") for each in found if each.gains and each.gains[0] > GAIN]
    slower = [text for gain, text in gains if gain <= 1]
    yield Claim(
        text=f"multi-ring beats the flat ring wherever a gain above {GAIN - 1:.0%} was predicted ({len(gains)} times)",
        figure=shown(slower) or (f"{min(gains)[0]:.2f} to {max(gains)[0]:.2f} x" if gains else "nowhere predicted"),
        holds=not slower and bool(gains),
    )
    wins = Counter(f"{each.best.algorithm} on {len(each.best.grid)} axes" for each in found)
    yield Claim(
        text=f"which algorithm won, of {len(found)} configurations",
        figure=", ".join(f"{name} {count}" for name, count in wins.most_common()),
        holds=True,
    )
