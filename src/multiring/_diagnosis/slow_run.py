"""Name the straggler and the phase of a run that was slow, from its timeline.

An operation begins when its last rank starts it. What that costs is the time between the start of the last rank and
that of the rank before it, as far as another rank waited then. The rank that cost most is the straggler, and its phase
is the one in which it spent more time than the median of the other ranks.
"""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from multiring._diagnosis.findings import FindingKind, HealthFinding
from multiring.errors import ArgumentError
from multiring.trace import read_timeline_file

_WORTH_TELLING = 0.05  # of the run: a straggler that cost less is not named
_MOST_OF_IT = 0.5  # of what all late ranks cost: below this share, no rank is the straggler
_EXPOSED = 0.25  # of the run: waiting for bytes for longer than this is a finding
_PHASES = ("forward", "backward", "optimizer")
_REST = "outside of any recorded phase (data, evaluation, other code)"
_LANE = re.compile(r" \(\d+\)$")

Stretch = tuple[float, float]  # start, end; in microseconds


@dataclass(slots=True)
class RankTimes:
    """What one rank did: its stretches of waiting and of transfers, and its time by phase, in microseconds."""

    start: float = float("inf")
    end: float = 0.0
    waits: list[Stretch] = field(default_factory=list)
    wires: list[Stretch] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=lambda: defaultdict(float))


@dataclass(frozen=True, slots=True)
class RecordedTimes:
    """A timeline: what each rank did, and when each started each operation."""

    ranks: Mapping[int, RankTimes]
    starts: Sequence[Mapping[int, float]]  # of each operation, by rank
    notes: Sequence[tuple[int, str]]  # what the timeline says of rails that were given up: rank, text
    missing: Sequence[int]

    @property
    def length(self) -> float:
        """The length of the run in microseconds."""
        return max(each.end for each in self.ranks.values()) - min(each.start for each in self.ranks.values())


def read_timeline(path: Path) -> RecordedTimes:
    """Return what the timeline at `path` says.

    Raises:
        ArgumentError: the file is not a timeline of multiring, is damaged, or has no collective of several ranks.
    """
    file = read_timeline_file(path)
    times = times_of(file.events, file.missing)
    if not times.starts or not times.length:
        raise ArgumentError(f"{path} has no collective of several ranks; want the timeline of a job's whole run")
    return times


def times_of(events: Sequence[Mapping[str, Any]], missing: Sequence[int] = ()) -> RecordedTimes:
    """Return the times in a timeline's events."""
    rows = {
        (each["pid"], each["tid"]): _LANE.sub("", each["args"]["name"])
        for each in events
        if each["name"] == "thread_name"
    }
    ranks: dict[int, RankTimes] = defaultdict(RankTimes)
    starts: dict[tuple[str, str, int], dict[int, float]] = defaultdict(dict)
    program: dict[int, list[tuple[float, float, str]]] = defaultdict(list)
    notes = []
    for each in events:
        if each["ph"] == "i" and each["name"].startswith("rail "):
            notes.append((each["pid"], each["name"]))
        if each["ph"] != "X":
            continue
        rank, row = ranks[each["pid"]], rows[each["pid"], each["tid"]]
        start, end = each["ts"], each["ts"] + each["dur"]
        rank.start, rank.end = min(rank.start, start), max(rank.end, end)
        if each["cat"] == "operation":
            starts[row, each["name"], each["args"]["operation"]][each["pid"]] = start
        elif each["cat"] == "wire":
            rank.wires.append((start, end))
        elif row == "program":
            if each["cat"] == "wait":
                rank.waits.append((start, end))
            program[each["pid"]].append((start, end, _phase(each)))
    for number, pieces in program.items():
        _add_phases(ranks[number], pieces)
    return RecordedTimes(dict(ranks), [each for each in starts.values() if len(each) > 1], notes, missing)


def _phase(event: Mapping[str, Any]) -> str:
    return str(event["cat"]) if event["cat"] in (*_PHASES, "wait") else str(event["name"])


def _add_phases(rank: RankTimes, pieces: list[tuple[float, float, str]]) -> None:
    """Add the time of each phase, without the phases within it, and the time outside of all phases."""
    pieces.sort(key=lambda piece: (piece[0], -piece[1]))
    open_ones: list[tuple[float, str]] = []  # end, phase
    covered, until = 0.0, rank.start
    for start, end, phase in pieces:
        while open_ones and open_ones[-1][0] <= start:
            open_ones.pop()
        if open_ones:
            rank.phases[open_ones[-1][1]] -= min(end, open_ones[-1][0]) - start
        rank.phases[phase] += end - start
        open_ones.append((end, phase))
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    rank.phases[_REST] = rank.end - rank.start - covered


def run_findings(times: RecordedTimes) -> list[HealthFinding]:
    """Return why a run was slow: a straggler with its phase, rails that were given up, exposed communication."""
    found = [
        HealthFinding(
            kind=FindingKind.SILENT,
            where=f"rank {rank}",
            found="the timeline lacks the rank",
            todo="merge its part: multiring trace merge FILE PART...",
        )
        for rank in times.missing
    ]
    by_rail: dict[str, list[int]] = defaultdict(list)
    for rank, text in times.notes:
        by_rail[text].append(rank)
    found += [
        HealthFinding(
            kind=FindingKind.RAIL_LOST,
            where=f"rank {', '.join(map(str, sorted(set(ranks))))}",
            found=text,
            todo="check the cable and the interface, then run multiring doctor on the hosts",
        )
        for text, ranks in sorted(by_rail.items())
    ]
    late = late_ranks(times)
    total = sum(late.values())
    worst = max(late, key=lambda rank: late[rank], default=None)
    if worst is not None and late[worst] > max(_WORTH_TELLING * times.length, _MOST_OF_IT * total):
        found.append(_straggler(times, worst, late[worst]))
    found += _exposed(times)
    return found


def late_ranks(times: RecordedTimes) -> dict[int, float]:
    """Return how many microseconds of others' waiting each rank has caused by starting operations last."""
    caused: dict[int, float] = defaultdict(float)
    ends = {rank: [end for _, end in sorted(each.waits)] for rank, each in times.ranks.items()}
    waits = {rank: sorted(each.waits) for rank, each in times.ranks.items()}
    for starts in times.starts:
        (before, _), (last_start, last) = sorted((start, rank) for rank, start in starts.items())[-2:]
        waited = [
            _overlap(waits[rank], ends[rank], (before, last_start)) for rank in starts if rank != last and rank in waits
        ]
        caused[last] += max(waited, default=0.0)
    return dict(caused)


def _overlap(waits: list[Stretch], ends: list[float], stretch: Stretch) -> float:
    """Return for how long of `stretch` there was waiting. `waits` are in order, without overlaps; `ends` are theirs."""
    total = 0.0
    for start, end in waits[bisect_left(ends, stretch[0]) :]:
        if start >= stretch[1]:
            break
        total += max(0.0, min(end, stretch[1]) - max(start, stretch[0]))
    return total


def _straggler(times: RecordedTimes, rank: int, cost_us: float) -> HealthFinding:
    own = times.ranks[rank].phases
    others = [each.phases for number, each in times.ranks.items() if number != rank]
    names = {name for phases in (own, *others) for name in phases} - {"wait"}
    excess = {name: own.get(name, 0.0) - median(each.get(name, 0.0) for each in others) for name in names}
    phase = max(excess, key=lambda name: (excess[name], name), default=_REST)
    share = cost_us / times.length
    return HealthFinding(
        kind=FindingKind.STRAGGLER,
        where=f"rank {rank}",
        found=f"the others waited for it for {cost_us / 1e6:.2f} s, {share:.0%} of the run; it spent "
        f"{excess.get(phase, 0.0) / 1e6:.2f} s more than the median of the others in: {phase}",
        todo="run multiring doctor on the hosts; if its host is healthy, give the rank less work in this phase",
        is_certain=share > 2 * _WORTH_TELLING,
    )


def _exposed(times: RecordedTimes) -> list[HealthFinding]:
    shares = []
    for each in times.ranks.values():
        wires = sorted(each.wires)
        merged: list[Stretch] = []
        for start, end in wires:
            if merged and start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], end)
            else:
                merged.append((start, end))
        ends = [end for _, end in merged]
        shares.append(sum(_overlap(merged, ends, wait) for wait in each.waits) / times.length)
    share = median(shares)
    if share <= _EXPOSED:
        return []
    return [
        HealthFinding(
            kind=FindingKind.COMMUNICATION,
            where="all ranks",
            found=f"the ranks waited for bytes for {share:.0%} of the run, after all of them had started the operation",
            todo="run multiring doctor on the hosts; if the links are healthy, use larger batches, compression or lag",
            is_certain=False,
        )
    ]
