"""Convert a part into events for Perfetto and chrome://tracing: one process per rank, with these rows.

program         the main thread: forward, backward, optimizer, wait, and the program's own spans
other threads   the same for other threads, in as many rows as there are threads at a time
ranks ...       the operations of a group, in as many rows as operations are in flight; each operation has:
                agree    until every rank has started the operation
                wire     from the agreement to the operation's end: bytes are in flight or awaited. An operation that an
                         engine carries has none: the engine moves its data afterwards
                reduce   a part of `wire`: this rank's processor combines, decodes, and writes to others' buffers
NCCL on ...     the operations that NCCL runs on a device, in the device's own times
rails           rails that were given up; and for each rail a curve of its throughput

Source: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Times
in the events are microseconds of rank 0's monotonic clock.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from multiring.trace.clocks import Alignment
from multiring.trace.lanes import lanes
from multiring.trace.part import OPERATION, RAIL, REDUCE, ROW, WAIT, Part, Row, rows_of

Event = dict[str, Any]
_MESSAGES = ("send", "recv")


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a rank; times in ns of the reference clock.

    `agreed` is None if the ranks have never agreed on the operation.
    """

    name: str
    key: tuple[int, int]  # the id of its group, and its sequence there
    number: int
    group: str
    start: int
    agreed: int | None
    end: int
    size_bytes: int
    title: str
    plan: str
    engine: str  # that carries the data; "" if the native core does
    fault: str
    reductions: tuple[tuple[int, int, int], ...]  # (start, end, ns of work)


def events_of(part: Part, alignment: Alignment, *, mark_cycles: bool = False) -> list[Event]:
    """Return the events of one rank: first the names of its rows, then their contents in the order of time.

    Args:
        part: the rank's part.
        alignment: converts the part's times to the reference clock.
        mark_cycles: whether an instant marks each operation that begins while no other is in flight.
    """
    rows = _aligned(part.rows, alignment)
    names = _GroupNames(part)
    operations = _operations(part, rows, names)
    picture = _Picture(part.rank)
    _draw_threads(picture, part, rows, names, alignment)
    if mark_cycles:
        _draw_cycles(picture, operations)
    _draw_operations(picture, operations)
    _draw_devices(picture, part, operations, alignment)
    _draw_rails(picture, part, rows, alignment)
    return picture.events(f"rank {part.rank}, {part.who['host']}")


def _aligned(rows: NDArray[np.void], alignment: Alignment) -> NDArray[np.void]:
    made = np.array(rows, ROW)
    for each in ("start", "end", "agreed"):
        made[each] = alignment.aligned(rows[each])
    made["agreed"][rows["agreed"] == 0] = 0
    return made[np.argsort(made["start"], kind="stable")]


def _operations(part: Part, rows: NDArray[np.void], names: "_GroupNames") -> list[Operation]:
    reductions: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for row in rows_of(rows, REDUCE):
        reductions[row.group, row.sequence].append((row.start, row.end, row.busy))
    made = []
    for row in rows_of(rows, OPERATION):
        title, plan, engine = part.operations.get(row.digest, ("", "", ""))
        made.append(
            Operation(
                name=_name_of(part, row),
                key=(row.group, row.sequence),
                number=_number_of(part, row),
                group=names.of(row),
                start=row.start,
                agreed=row.agreed or None,
                end=row.end,
                size_bytes=row.size_bytes,
                title=title,
                plan=plan,
                engine=engine,
                fault=part.who["faults"][row.fault] if row.fault else "",
                reductions=tuple(reductions.get((row.group, row.sequence), ())),
            )
        )
    return made


def _name_of(part: Part, row: Row) -> str:
    names: list[str] = part.who["names"]
    return names[row.name]


def _number_of(part: Part, row: Row) -> int:
    return row.sequence // int(part.who["steps"])


class _GroupNames:
    """The names of the groups' rows: groups of the same ranks get different names; messages share one row."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._known: dict[int, str] = {}
        self._alike: dict[str, int] = defaultdict(int)

    def of(self, row: Row) -> str:
        if row.group not in self._known:
            text = self._part.groups.get(row.group)
            if text is None:
                name = _name_of(self._part, row)
                return "messages" if name in _MESSAGES else name
            self._alike[text] += 1
            count = self._alike[text]
            self._known[row.group] = text if count == 1 else f"{text}, group {count}"
        return self._known[row.group]


class Slice(NamedTuple):
    """A stretch of time in a row; times in ns."""

    start: int
    end: int
    name: str
    kind: str
    arguments: dict[str, Any]


class _Picture:
    """The rows of one rank, in the order of their creation, and the events in them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._rows: dict[str, int] = {}
        self._events: list[tuple[int, int, Event]] = []

    def row(self, name: str, lane: int = 0) -> int:
        """Return the number of a row; `lane` numbers the rows of one name."""
        return self._rows.setdefault(name if lane == 0 else f"{name} ({lane + 1})", len(self._rows) + 1)

    def add(self, row: int, piece: Slice) -> None:
        event = {"ph": "X", "name": piece.name, "cat": piece.kind, "pid": self._rank, "tid": row}
        event |= {"ts": piece.start / 1000, "dur": (piece.end - piece.start) / 1000}
        if piece.arguments:
            event["args"] = piece.arguments
        self._events.append((piece.start, piece.start - piece.end, event))

    def mark(self, row: int, at: int, name: str) -> None:
        event = {"ph": "i", "name": name, "cat": "mark", "pid": self._rank, "tid": row, "ts": at / 1000, "s": "t"}
        self._events.append((at, 0, event))

    def count(self, at: int, name: str, values: dict[str, float]) -> None:
        event = {"ph": "C", "name": name, "cat": "rail", "pid": self._rank, "ts": at / 1000, "args": values}
        self._events.append((at, 0, event))

    def events(self, title: str) -> list[Event]:
        """Return the names of the rows, then the events by time.

        If events start at the same time, the longest event is first.
        """
        made = [self._meta("process_name", name=title), self._meta("process_sort_index", sort_index=self._rank)]
        for name, row in self._rows.items():
            made += [self._meta("thread_name", row, name=name), self._meta("thread_sort_index", row, sort_index=row)]
        self._events.sort(key=lambda each: each[:2])
        return made + [event for _, _, event in self._events]

    def _meta(self, name: str, row: int = 0, /, **arguments: Any) -> Event:
        return {"ph": "M", "name": name, "pid": self._rank, "tid": row, "args": arguments}


def _draw_threads(
    picture: _Picture, part: Part, rows: NDArray[np.void], names: _GroupNames, alignment: Alignment
) -> None:
    threads: dict[int, list[Slice]] = defaultdict(list)
    times = alignment.aligned(np.array([each[2:4] for each in part.spans], np.int64).reshape(-1, 2))
    for each, (start, end) in zip(part.spans, times.tolist(), strict=True):
        threads[each.thread].append(Slice(start, end, each.name, each.kind, {}))
    for row in rows_of(rows, WAIT):
        what = {"for": f"{_name_of(part, row)} {_number_of(part, row)} of {names.of(row)}"}
        threads[row.thread].append(Slice(row.start, row.end, "wait", "wait", what))
    program = picture.row("program")
    for piece in threads.pop(int(part.who["pid"]), []):
        picture.add(program, piece)
    others = sorted(threads.values(), key=lambda pieces: min(piece.start for piece in pieces))
    extents = [(min(piece.start for piece in each), max(piece.end for piece in each)) for each in others]
    for pieces, lane in zip(others, lanes(extents), strict=True):
        for piece in pieces:
            picture.add(picture.row("other threads", lane), piece)


def _draw_cycles(picture: _Picture, operations: list[Operation]) -> None:
    until = None
    for each in operations:
        if until is None or each.start >= until:
            picture.mark(picture.row("program"), each.start, "CYCLE_START")
        until = each.end if until is None else max(until, each.end)


def _draw_operations(picture: _Picture, operations: list[Operation]) -> None:
    groups: dict[str, list[Operation]] = defaultdict(list)
    for each in operations:
        groups[each.group].append(each)
    for group, members in groups.items():
        for each, lane in zip(members, lanes([(each.start, each.end) for each in members]), strict=True):
            row = picture.row(group, lane)
            for piece in _slices(each):
                picture.add(row, piece)


def _draw_devices(picture: _Picture, part: Part, operations: list[Operation], alignment: Alignment) -> None:
    known = {each.key: each for each in operations}
    times = alignment.aligned(np.array([each[3:5] for each in part.devices], np.int64).reshape(-1, 2)).tolist()
    for each, (start, end) in zip(part.devices, times, strict=True):
        found = known.get((each.group, each.sequence))  # None if it came before the timeline
        told: dict[str, Any] = {"clock_error_us": each.error_ns / 1000}
        if found is not None:
            told |= {"operation": found.number, "group": found.group, "bytes": found.size_bytes, "title": found.title}
            if found.size_bytes and end > start:
                told["algbw GB/s"] = _rate(found.size_bytes, end - start)
        name = "operation" if found is None else found.name
        picture.add(picture.row(f"NCCL on cuda:{each.device}"), Slice(start, end, name, "device", told))


def _rate(size_bytes: int, ns: int) -> float:
    return float(f"{size_bytes / ns:.4g}")


def _slices(each: Operation) -> Iterator[Slice]:
    yield Slice(each.start, each.end, each.name, "operation", _told(each))
    if each.agreed is None:
        return
    if each.agreed > each.start:
        yield Slice(each.start, each.agreed, "agree", "agree", {"horovod": f"NEGOTIATE_{_horovod(each)}"})
    if each.end > each.agreed and not each.engine:
        yield Slice(each.agreed, each.end, "wire", "wire", {})
    for start, end, busy in each.reductions:
        # A stretch includes short gaps. If it spans the agreement, its part before the agreement is such a gap.
        first = max(start, each.agreed) if end > each.agreed else start
        if end > first:
            yield Slice(first, end, "reduce", "reduce", {"busy_us": busy / 1000})


def _told(each: Operation) -> dict[str, Any]:
    ns = each.end - (each.agreed or each.start) or each.end - each.start
    told: dict[str, Any] = {"operation": each.number, "bytes": each.size_bytes, "horovod": _horovod(each)}
    if each.size_bytes and ns > 0 and not each.engine:
        told["algbw GB/s"] = _rate(each.size_bytes, ns)
    words = {"title": each.title, "plan": each.plan, "engine": each.engine, "fault": each.fault}
    return told | {name: text for name, text in words.items() if text}


def _horovod(each: Operation) -> str:
    """Return the operation's name in Horovod's timeline."""
    return each.name.replace("_", "").upper()


def _draw_rails(picture: _Picture, part: Part, rows: NDArray[np.void], alignment: Alignment) -> None:
    for row in rows_of(rows, RAIL):
        picture.mark(picture.row("rails"), row.start, f"rail {row.name} to rank {row.sequence} is given up")
    times = alignment.aligned(np.array([sample.at_ns for sample in part.rails], np.int64)).tolist()
    for i in range(1, len(part.rails)):
        before = {each[:2]: each[2] for each in part.rails[i - 1].carried}
        moved: dict[int, int] = defaultdict(int)
        for peer, rail, carried in part.rails[i].carried:
            moved[rail] += carried - before.get((peer, rail), 0)
        ns = max(1, times[i] - times[i - 1])
        for rail, size_bytes in moved.items():
            picture.count(times[i - 1], f"rail {rail}", {"GB/s": _rate(size_bytes, ns)})
