"""Plans in labs of many kinds: is the chosen one as good as the best measured, and which algorithm won where."""

import json
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
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

    def over(self, other: "Tried") -> float:
        """Return how many times as long as `other` this took: the median over the turns that both have."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.turns, other.turns, strict=False))

    def __str__(self) -> str:
        cut = "whole" if self.segment_bytes is None else f"{self.segment_bytes // KIB} KiB"
        channels = f", channels {':'.join(map(str, self.shares))}" if len(self.shares) > 1 else ""
        return f"{self.algorithm} on {' x '.join(map(str, self.grid))}{channels}, {cut}"


@dataclass(frozen=True, slots=True)
class Configuration:
    """What was measured in one lab for one size; the chosen plan comes first."""

    lab: str
    size_bytes: int
    tried: tuple[Tried, ...]

    def __str__(self) -> str:
        size = f"{self.size_bytes // MIB} MiB" if self.size_bytes >= MIB else f"{self.size_bytes // KIB} KiB"
        return f"{self.lab}, {size}"

    @property
    def chosen(self) -> Tried:
        """What the planner takes."""
        return self.tried[0]

    @property
    def best(self) -> Tried:
        """What was fastest, held against the chosen one turn by turn."""
        return max(self.tried, key=self.chosen.over)

    @property
    def flat_ring(self) -> Tried | None:
        """The best of the rings through all ranks, if more than one axis could be had."""
        ranks = max(len(tried.grid) for tried in self.tried)
        flat = [tried for tried in self.tried if tried.algorithm == "ring" and len(tried.grid) == 1]
        return min(flat, key=lambda tried: tried.predicted_s) if flat and ranks > 1 else None


def planner(share: int, *, limited: bool) -> Iterator[Claim]:
    """Yield a claim for each configuration of links with a limit, or without one, and what they amount to together."""
    found: list[Configuration] = []
    labs = {lab: sizes for lab, sizes in LABS.items() if ("--link" in lab) == limited}
    for lab, sizes in list(labs.items())[:: min(share, len(labs))]:
        configurations, wrong = measured(lab, sizes)
        found += configurations
        if wrong:
            yield Claim(text=f"plans in {lab} are measured", figure=shown([wrong]), holds=False)
        for each in configurations:
            ratio = each.chosen.over(each.best)
            yield Claim(
                text=f"{each}: of {len(each.tried)} plans the chosen one is within {WITHIN - 1:.0%} of the best",
                figure=f"{ratio:.3f}: {each.chosen} {each.chosen.seconds * 1e3:.3g} ms"
                f" (predicted {each.chosen.predicted_s * 1e3:.3g}); best {each.best} {each.best.seconds * 1e3:.3g} ms",
                holds=ratio <= WITHIN,
            )
    yield from together(found)


def measured(lab: str, sizes: tuple[int, ...]) -> tuple[list[Configuration], str]:
    """Return what one job found, as far as it got, and what went wrong ("" if nothing)."""
    with LabJob(lab, RANK, "plans", ",".join(map(str, sizes))) as job:
        wrong = ""
        try:
            job.wait_for(lambda heard: len(heard) == len(sizes), JOB_S)
        except TimeoutError as error:
            wrong = str(error)
        heard = list(job.heard)
    with RECORDS.open("a") as records:
        for word in heard:
            records.write(json.dumps({"lab": lab, **word}) + "\n")
    return [Configuration(lab, word["size"], tuple(map(tried_of, word["plans"]))) for word in heard], wrong


def tried_of(word: dict[str, Any]) -> Tried:
    """Return a plan as its rank told of it."""
    grid, shares = tuple(word["grid"]), tuple(word["shares"])
    return Tried(word["algorithm"], grid, shares, word["segment_bytes"], word["predicted_s"], tuple(word["seconds"]))


def together(found: list[Configuration]) -> Iterator[Claim]:
    """Yield how multi-ring is beside the flat ring, and who won how often."""
    gains = []
    for each in found:
        flat = each.flat_ring
        rings = [tried for tried in each.tried if len(tried.grid) > 1]
        multi = min(rings, key=lambda tried: tried.predicted_s) if rings else None
        if flat is not None and multi is not None and flat.predicted_s / multi.predicted_s > GAIN:
            gains.append((flat.over(multi), f"{each}: {flat.over(multi):.2f} x"))
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
