"""The parts of a training's steps in a timeline: compute, exposed communication, update, and each bucket of gradients.

A step ends with the last `optimizer` slice before the next `forward` slice. Its compute is from the begin of the first
forward to the end of the last backward. From there to the optimizer, communication that backward did not hide is a
wait, in any thread: DistributedDataParallel waits in threads of its own. It includes the wait for slower ranks.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from multiring.errors import ArgumentError
from multiring.trace import read_timeline_file

_WARM_UP = 3  # steps
_LEAST = 3  # measured steps
_FEWEST_RANKS = 2
_S = 1e-6
_SMALL = 1024  # bytes: smaller reductions count samples or decide something


@dataclass(frozen=True, slots=True)
class RecordedBucket:
    """A bucket in the order of a step: its bytes, and the seconds of its all-reduce.

    They begin when every rank has started it and the bucket before it has ended.
    """

    size_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedSteps:
    """The medians of all ranks' steps, in seconds. `hosts` are the ranks of each host.

    `computes` has the compute of each rank's steps, for the same steps of all ranks.
    """

    hosts: tuple[tuple[int, ...], ...]
    steps: int
    step: float
    compute: float
    exposed: float
    update: float
    outside: float
    buckets: tuple[RecordedBucket, ...]
    computes: tuple[tuple[float, ...], ...]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return sum(map(len, self.hosts))

    @property
    def waiting(self) -> float:
        """By how much the slowest rank of the median step computes longer than the median rank, in seconds."""
        slowest: float = median(map(max, zip(*self.computes, strict=True)))
        return max(0.0, slowest - self.compute)


@dataclass(slots=True)
class _Rank:
    """The slices of one rank as (start, end), in us."""

    program: list[tuple[float, float, str]] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    reductions: list[tuple[float, float, str, int, int]] = field(default_factory=list)  # row, number, bytes


def read_steps(path: Path) -> RecordedSteps:
    """Return the steps of the training in the timeline at `path`.

    Raises:
        ArgumentError: the file is not a timeline of multiring, lacks a rank, or has too few steps.
    """
    file = read_timeline_file(path)
    if file.missing:
        raise ArgumentError(f"{path} lacks rank {min(file.missing)}; want the timeline of all ranks")
    hosts: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(file.ranks):
        hosts[file.ranks[rank]["host"]].append(rank)
    if sorted(file.ranks) != list(range(len(file.ranks))):
        raise ArgumentError(f"{path} has ranks {sorted(file.ranks)}; want the timeline of all ranks")
    try:
        return steps_of(file.events, tuple(map(tuple, hosts.values())))
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from None


def steps_of(events: Sequence[Mapping[str, Any]], hosts: tuple[tuple[int, ...], ...]) -> RecordedSteps:
    """Return the steps in a timeline's events.

    Raises:
        ArgumentError: there are too few steps with forward, backward and an optimizer, or ranks differ.
    """
    ranks = _ranks_of(events)
    if len(ranks) < _FEWEST_RANKS:
        raise ArgumentError(f"the timeline has the steps of {len(ranks)} ranks; want a run of at least 2 ranks")
    parts: dict[str, list[float]] = defaultdict(list)
    computes: list[list[float]] = []  # of each rank's steps
    buckets: list[list[tuple[str, int, int]]] = []  # of rank 0's steps: the keys of the reductions, with their bytes
    for number in sorted(ranks):
        found = _steps_of_rank(ranks[number])
        if len(found) < _LEAST:
            raise ArgumentError(
                f"rank {number} has {len(found)} steps with forward, backward and optimizer after {_WARM_UP} to warm "
                f"up; want at least {_LEAST}, of a program that trains with torch"
            )
        computes.append([step["compute"] for step in found])
        for step in found:
            for name in ("step", "compute", "exposed", "update", "outside"):
                parts[name].append(step[name])
        if number == min(ranks):
            buckets = [step["buckets"] for step in found]
    if not median(parts["step"]):
        raise ArgumentError("the steps take no time: want the timeline of a real run")
    usual = sorted(buckets, key=len)[(len(buckets) - 1) // 2]
    sizes = [size for _, _, size in usual]
    alike = [each for each in buckets if [size for _, _, size in each] == sizes]
    same = min(map(len, computes))
    return RecordedSteps(
        hosts=hosts,
        steps=len(parts["step"]) // len(ranks),
        computes=tuple(tuple(each * _S for each in own[:same]) for own in computes),
        buckets=tuple(_bucket_seconds(alike, sizes, ranks)),
        **{name: median(values) * _S for name, values in parts.items()},
    )


def _ranks_of(events: Sequence[Mapping[str, Any]]) -> dict[int, _Rank]:
    rows = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"}
    ranks: dict[int, _Rank] = defaultdict(_Rank)
    for each in events:
        if each["ph"] != "X":
            continue
        rank, row = ranks[each["pid"]], rows[each["pid"], each["tid"]]
        start, end = each["ts"], each["ts"] + each["dur"]
        if each["cat"] == "wait":
            rank.waits.append((start, end))
        elif each["cat"] == "operation" and each["name"] == "all_reduce" and each["args"]["bytes"] >= _SMALL:
            # Lanes of one group have numbers behind its name.
            rank.reductions.append((start, end, row.split(" (")[0], each["args"]["operation"], each["args"]["bytes"]))
        elif row == "program" and each["cat"] in ("forward", "backward", "optimizer"):
            rank.program.append((start, end, each["cat"]))
    for rank in ranks.values():
        rank.program.sort()
        rank.waits.sort()
        rank.reductions.sort()
    return ranks


def _steps_of_rank(rank: _Rank) -> list[dict[str, Any]]:
    """Return the parts of each step after the warm-up, in us, and the step's reductions."""
    found: list[dict[str, Any]] = []
    own: list[tuple[float, float, str]] = []
    before: float | None = None
    for slice_, following in zip(rank.program, [*rank.program[1:], (0.0, 0.0, "forward")], strict=True):
        own.append(slice_)
        if slice_[2] != "optimizer" or following[2] == "optimizer":
            continue
        kinds = {kind for _, _, kind in own}
        if before is not None and kinds == {"forward", "backward", "optimizer"}:
            found.append(_parts_of(own, before, slice_[1], rank))
        before, own = slice_[1], []
    return found[_WARM_UP - 1 :]  # the step before the first end is not in `found`


def _parts_of(own: Sequence[tuple[float, float, str]], begin: float, end: float, rank: _Rank) -> dict[str, Any]:
    forward = min(start for start, _, kind in own if kind == "forward")
    computed = max(end for _, end, kind in own if kind == "backward")
    updating = min(start for start, _, kind in own if kind == "optimizer")
    update = sum(end - start for start, end, kind in own if kind == "optimizer")
    exposed = _covered(rank.waits, computed, updating)
    first = bisect_left(rank.reductions, (forward,))
    inside = [each for each in rank.reductions[first:] if each[0] < updating]
    return {
        "step": end - begin,
        "compute": computed - forward,
        "exposed": exposed,
        "update": update,
        "outside": max(0.0, end - begin - (computed - forward) - exposed - update),
        "buckets": [(row, number, size) for _, _, row, number, size in inside],
    }


def _covered(stretches: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Return for how long of `begin` to `end` at least one of the sorted stretches lasts."""
    total, until = 0.0, begin
    for start, stop in stretches:
        if start >= end:
            break
        total += max(0.0, min(stop, end) - max(start, until))
        until = max(until, min(stop, end))
    return total


def _bucket_seconds(
    steps: Sequence[Sequence[tuple[str, int, int]]], sizes: Sequence[int], ranks: Mapping[int, _Rank]
) -> list[RecordedBucket]:
    starts: dict[tuple[str, int], float] = defaultdict(float)
    ends: dict[tuple[str, int], float] = defaultdict(float)
    for rank in ranks.values():
        for start, end, row, number, _ in rank.reductions:
            starts[row, number] = max(starts[row, number], start)
            ends[row, number] = max(ends[row, number], end)
    found: list[list[float]] = [[] for _ in sizes]
    for step in steps:
        before = 0.0
        for at, (row, number, _) in enumerate(step):
            key = (row, number)
            found[at].append(max(0.0, ends[key] - max(starts[key], before)))
            before = max(before, ends[key])
    return [RecordedBucket(size, median(taken) * _S) for size, taken in zip(sizes, found, strict=True)]
