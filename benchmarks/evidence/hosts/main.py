"""Measure the claims about several hosts, in labs on this machine.

    sudo .venv/bin/python benchmarks/evidence/hosts/main.py [--only ranks,rail] [--short | --divide N]

Each printed row holds a claim and its measured figure. The exit code is 1 if any floor is missed. The printed table is
kept in benchmarks/results/. All failures together take hours, most of them waiting for time-outs.
"""

import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.hosts.failures import ENGINES, RANK, failures, slowed
from benchmarks.evidence.hosts.training import digits
from benchmarks.evidence.jobs.job import LabJob, Word
from benchmarks.evidence.planner.main import planner
from benchmarks.evidence.support.claims import Claim, report, shown

JOIN_S, JOIN_AIM_S = 90.0, 60.0
RAIL_S = 8.0  # the time measured before and after a rail is cut


def ranks(share: int) -> Iterator[Claim]:
    """Measure how 256 ranks, and smaller numbers of ranks, join on eight hosts."""
    hosts = 8
    opened = {}
    for slots in (2, 8, 32) if share == 1 else (2, 4):
        count = hosts * slots
        text = f"{count} ranks on {hosts} hosts: launch to the last init <= {JOIN_S:g} s (aim {JOIN_AIM_S:g} s)"
        with LabJob(f"--hosts {hosts} --slots {slots}", RANK, "join") as job:
            try:
                job.wait_for(lambda heard, count=count: len(heard) == count, 4 * JOIN_S)  # type: ignore[misc]
                code = job.launcher.wait(JOIN_S)
            except TimeoutError as error:
                yield Claim(text=text, figure=f"{len(job.heard)} joined; {shown([str(error)])}", holds=False)
                continue
        seconds = max(word["joined_s"] for word in job.heard) - job.start
        most = max(word["descriptors"] for word in job.heard)
        opened[count] = (most, tuple(job.heard[0]["grid"]))
        yield Claim(
            text=text,
            figure=f"{seconds:.1f} s, exit code {code}, sums {'right' if all_right(job.heard) else 'WRONG'}",
            holds=seconds <= JOIN_S and code == 0 and all_right(job.heard),
        )
    # A rank has `side - 1` neighbours on each axis of the grid. The other descriptors belong to the process itself.
    extra = {count: most - sum(side - 1 for side in grid) for count, (most, grid) in opened.items()}
    yield Claim(
        text="open descriptors a rank grow with the sides of the grid, not with the ranks",
        figure="; ".join(f"{count} ranks on {grid}: {most}" for count, (most, grid) in opened.items()),
        holds=max(extra.values()) <= 2 * sum(side - 1 for side in opened[max(opened)][1]),
    )


def all_right(heard: list[Word]) -> bool:
    """Return whether every reported sum was right."""
    return all(word.get("right", True) for word in heard)


def rail(share: int) -> Iterator[Claim]:
    """Cut one of a job's two rails."""
    for cut in ("rail1", "rail0")[: 1 if share > 1 else 2]:
        yield rail_cut(cut, RAIL_S / min(share, 4))


def rail_cut(cut: str, seconds: float) -> Claim:
    """Return the claim that a job continues and warns when host1 loses the rail `cut`.

    The rails have 1 Gbit/s and 250 Mbit/s.
    """
    text = f"{cut} of host1 cut in mid-run (4 hosts, rails of 1 Gbit/s and 250 Mbit/s): the job goes on, and says so"
    size_bytes = 8 << 20
    with LabJob("--hosts 4 --link 1gbit --rail 250mbit", RANK, "work", size_bytes) as job:
        try:
            job.wait_for(lambda heard: spans(heard, 0.0, seconds), 60)
            at_s = job.fault(f"cut host1 {cut}")
            job.wait_for(lambda heard: spans(heard, at_s, seconds), 120)
            job.tell("stop")
            job.wait_for(lambda heard: sum("done" in word for word in heard) == 4, 60)
        except TimeoutError as error:
            return Claim(text=text, figure=shown([str(error)]), holds=False)
        warned = [word["warned"] for word in job.heard if "warned" in word and word["at_s"] > at_s]
    before, after = (pace(job.heard, *span) * size_bytes / 1e6 for span in ((0.0, at_s), (at_s, float("inf"))))
    named = [line for line in warned if cut in line or "host1" in line or "rank 1" in line]
    figure = f"{before:.0f} MB/s before, {after:.0f} MB/s after; {named[0] if named else 'nobody named it'}"
    return Claim(text=text, figure=figure, holds=bool(named) and all_right(job.heard))


def spans(heard: list[Word], begin: float, seconds: float) -> bool:
    """Return whether rank 0's reports after `begin` span at least `seconds`."""
    at = [word["at_s"] for word in heard if "turns" in word and word["at_s"] > begin]
    return bool(at) and at[-1] - at[0] >= seconds


def pace(heard: list[Word], begin: float, end: float) -> float:
    """Return rank 0's turns per second between `begin` and `end`.

    It is the median over the intervals between reports.
    """
    told = [(float(word["at_s"]), int(word["turns"])) for word in heard if "turns" in word]
    points = [point for point in told if begin < point[0] < end]
    return statistics.median((after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(points))


CLAIMS: dict[str, Callable[[int], Iterator[Claim]]] = {
    "planner-limited": partial(planner, limited=True),
    "planner-unlimited": partial(planner, limited=False),
    "ranks": ranks,
    "rail": rail,
    "digits": digits,
    **{
        f"{done}-{engine}": partial(failures, fault, engine)
        for fault, done in (("kill", "killed"), ("freeze", "frozen"), ("cut", "unplugged"))
        for engine in ENGINES
    },
    **{f"slowed-{engine}": partial(slowed, engine) for engine in ENGINES},
}


if __name__ == "__main__":
    raise SystemExit(report(CLAIMS, __doc__ or ""))
