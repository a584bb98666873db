"""Compare the chosen plan with the fastest measured plan in labs of many kinds.

The claims also count which algorithm was the fastest.
"""

import json
import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.evidence.jobs.job import ROOT, LabJob
from benchmarks.evidence.support.claims import Claim, shown

RANK = Path(__file__).with_name("rank.py")
# The measurements and the probe's constants. With this file, another cost model can be checked without a machine.
RECORDS = ROOT / "build" / "evidence_planner.jsonl"
WITHIN, GAIN = 1.05, 1.10
KIB, MIB = 2**10, 2**20
SMALL, MIDDLE, LARGE = 4 * KIB, 512 * KIB, 16 * MIB
JOB_S = 600.0
# Without a rate limit, the speed of a link depends on the processors' free time. It differs from job to job, so
# several jobs run.
UNLIMITED_JOBS = 3
# Each lab with its sizes in bytes: 30 configurations of hosts, slots, rates, racks, rails and sizes.
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
    """A measured plan: the seconds of a call in each turn.

    Each turn measures all plans, one after the other.
    """

    algorithm: str
    grid: tuple[int, ...]
    shares: tuple[int, ...]
    segment_bytes: int | None
    predicted_s: float
    turns: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median of the turns, in seconds."""
        return statistics.median(self.turns)

    def over(self, other: "Tried") -> list[float]:
        """Return this plan's time divided by `other`'s, for each turn that both have."""
        return [mine / theirs for mine, theirs in zip(self.turns, other.turns, strict=False)]

    @property
    def plan(self) -> "Tried":
        """The plan without its times, so that plans of different jobs compare equal."""
        return replace(self, predicted_s=0.0, turns=())

    def __str__(self) -> str:
        cut = "whole" if self.segment_bytes is None else f"{self.segment_bytes // KIB} KiB"
        channels = f", channels {':'.join(map(str, self.shares))}" if len(self.shares) > 1 else ""
        return f"{self.algorithm} on {' x '.join(map(str, self.grid))}{channels}, {cut}"


@dataclass(frozen=True, slots=True)
class Configuration:
    """The measurements of one size by the jobs in one lab.

    The chosen plan comes first in each job.
    """

    lab: str
    size_bytes: int
    jobs: tuple[tuple[Tried, ...], ...]

    def __str__(self) -> str:
        size = f"{self.size_bytes // MIB} MiB" if self.size_bytes >= MIB else f"{self.size_bytes // KIB} KiB"
        return f"{self.lab}, {size}"

    @property
    def chosen(self) -> list[Tried]:
        """The plan that the planner chose in each job."""
        return [job[0] for job in self.jobs]

    @property
    def plans(self) -> set[Tried]:
        """The plans that more than half of the jobs measured."""
        counts = Counter(tried.plan for job in self.jobs for tried in job)
        return {plan for plan, count in counts.items() if 2 * count > len(self.jobs)}

    def behind(self, plan: Tried) -> float:
        """Return the chosen plan's time divided by `plan`'s, as the median over all turns."""
        return statistics.median(
            ratio for job in self.jobs for tried in job if tried.plan == plan for ratio in job[0].over(tried)
        )

    @property
    def best(self) -> Tried:
        """The fastest plan, compared with the chosen plan turn by turn.

        It is the chosen plan if no other plan was faster.
        """
        return max([self.chosen[0].plan, *sorted(self.plans, key=str)], key=self.behind_or_level)

    def behind_or_level(self, plan: Tried) -> float:
        """Return `behind(plan)`, or 1 for a plan that few jobs measured."""
        return self.behind(plan) if plan in self.plans else 1.0

    def seconds(self, plan: Tried) -> float:
        """Return the median over the jobs of `plan`'s median turn, in seconds."""
        return statistics.median(tried.seconds for job in self.jobs for tried in job if tried.plan == plan)

    @property
    def gains(self) -> tuple[float, float] | None:
        """The predicted and the measured gain of the best grid over the flat ring.

        The flat ring runs through all ranks; the grid has several axes. The value is None unless both were measured.
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
    """Yield a claim for each configuration, and summary claims.

    With `limited`, the links have a rate limit; otherwise they have none.
    """
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
    """Return the claim that the chosen plan is as fast as the fastest plan."""
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
    """Run one job; return the sizes that it measured in time, each with its plans."""
    with LabJob(lab, RANK, "plans", ",".join(map(str, sizes))) as job:
        with suppress(TimeoutError):
            job.wait_for(lambda heard: len(heard) == len(sizes), JOB_S)
        heard = list(job.heard)
    with RECORDS.open("a") as records:
        for word in heard:
            records.write(json.dumps({"lab": lab, **word}) + "\n")
    return [(word["size"], tuple(map(tried_of, word["plans"]))) for word in heard]


def tried_of(word: dict[str, Any]) -> Tried:
    """Return the measured plan from a rank's report."""
    grid, shares = tuple(word["grid"]), tuple(word["shares"])
    return Tried(word["algorithm"], grid, shares, word["segment_bytes"], word["predicted_s"], tuple(word["seconds"]))


def together(found: list[Configuration]) -> Iterator[Claim]:
    """Yield the gain of multi-ring over the flat ring, and each algorithm's wins."""
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
