"""Read the file of a timeline: every field that a reader of it uses is checked, and an error names the event."""

import gzip
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multiring._strict_json import (
    WrongFieldError,
    count_at,
    field_at,
    line_of,
    number_at,
    rows_at,
    strict_json,
    table_at,
    text_at,
)
from multiring.errors import ArgumentError

_GZIP = b"\x1f\x8b"
_WANTED = "want a file of `multiring run --timeline`"
_NAMED = ("thread_name", "process_name")
# The numbers that an event of an operation has, or a reduction within it.
_OF_OPERATION = ("operation", "bytes")
_READING = ("error_us", "at_us")


@dataclass(frozen=True, slots=True)
class TimelineFile:
    """The events of a timeline, as chrome.py writes them, and what the file says of each rank."""

    events: list[dict[str, Any]]
    ranks: Mapping[int, Mapping[str, Any]]

    @property
    def missing(self) -> list[int]:
        """The ranks that the timeline lacks."""
        return [rank for rank, about in self.ranks.items() if "is_missing" in about]


def read_timeline_file(path: Path) -> TimelineFile:
    """Return the content of the timeline at `path`.

    Raises:
        ArgumentError: the file cannot be read, is not a timeline of multiring, or is damaged. The error names the line
            and the field, and the event if the damage is in one.
    """
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw.startswith(_GZIP) else raw).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ArgumentError(f"{path} cannot be read: {error}; {_WANTED}") from None
    try:
        whole = strict_json(text)
    except ArgumentError as error:
        raise ArgumentError(f"{path} is not a timeline of multiring: {error}; {_WANTED}") from None
    try:
        return _checked(whole)
    except WrongFieldError as error:
        if error.path[:1] == ("traceEvents",) and len(error.path) > 1:
            at = int(error.path[1])
            field = ".".join(map(str, error.path[2:]))
            where = f"event {at} (line {line_of(text, error.path)}){field and f', field {field}'}"
            raise ArgumentError(f"{path} is damaged: {where}: {error.words}; {_WANTED}") from None
        raise ArgumentError(f"{path} is not a timeline of multiring: {error.in_text(text)}; {_WANTED}") from None


def _checked(whole: Any) -> TimelineFile:
    table = table_at(whole, ())
    about = table_at(field_at(table, "metadata", ()), ("metadata",))
    writer = text_at(about, "written_by", ("metadata",))
    if not writer.startswith("multiring"):
        raise WrongFieldError(("metadata", "written_by"), f"{writer!r} wrote it")
    where = ("metadata", "ranks")
    ranks = {}
    for name, each in table_at(field_at(about, "ranks", ("metadata",)), where).items():
        if not (name.isascii() and name.isdigit() and str(int(name)) == name):
            raise WrongFieldError((*where, name), "want the number of a rank")
        ranks[int(name)] = _checked_rank(each, (*where, name))
    events = rows_at(field_at(table, "traceEvents", ()), ("traceEvents",))
    rows, titled = _checked_names(events)
    untitled = [rank for rank, each in ranks.items() if "is_missing" not in each and rank not in titled]
    if untitled:
        raise WrongFieldError(("traceEvents",), f"no event process_name of rank {untitled[0]}")
    for at, each in enumerate(events):
        _check_event(each, ("traceEvents", at), ranks, rows)
    return TimelineFile(events, ranks)


def _checked_rank(value: Any, path: tuple[str | int, ...]) -> Mapping[str, Any]:
    table = table_at(value, path)
    if "is_missing" in table:
        text_at(table, "is_missing", path)
        return table
    text_at(table, "host", path)
    for name in ("pid", "dropped_events"):
        count_at(table, name, path)
    number_at(table, "wall_s", path)
    if not isinstance(field_at(table, "is_complete", path), bool):
        raise WrongFieldError((*path, "is_complete"), "want true or false")
    for at, each in enumerate(rows_at(field_at(table, "readings", path), (*path, "readings"))):
        own = (*path, "readings", at)
        number_at(table_at(each, own), "offset_us", own, -math.inf)
        for name in _READING:
            number_at(each, name, own)
    return table


def _checked_names(events: list[Any]) -> tuple[set[tuple[int, int]], set[int]]:
    """Check the events that name rows and ranks, and return which they name: (rank, row), and the ranks."""
    rows, ranks = set(), set()
    for at, each in enumerate(events):
        path = ("traceEvents", at)
        table = table_at(each, path)
        if text_at(table, "ph", path) != "M":
            continue
        name, told = text_at(table, "name", path), table_at(field_at(table, "args", path), (*path, "args"))
        rank, row = count_at(table, "pid", path), count_at(table, "tid", path)
        if name in _NAMED:
            text_at(told, "name", (*path, "args"))
        else:
            count_at(told, "sort_index", (*path, "args"))
        if name == "thread_name":
            rows.add((rank, row))
        elif name == "process_name":
            ranks.add(rank)
    return rows, ranks


def _check_event(
    event: Mapping[str, Any], path: tuple[str | int, ...], ranks: Mapping[int, Any], rows: set[tuple[int, int]]
) -> None:
    rank = count_at(event, "pid", path)
    if rank not in ranks or "is_missing" in ranks[rank]:
        raise WrongFieldError((*path, "pid"), f"rank {rank} has events, but metadata.ranks lacks it")
    kind = event["ph"]
    if kind == "M":
        return
    text_at(event, "name", path)
    number_at(event, "ts", path)
    if kind == "C":
        values = table_at(field_at(event, "args", path), (*path, "args"))
        for name in values:
            number_at(values, name, (*path, "args"))
        return
    if kind not in {"X", "i"}:
        raise WrongFieldError((*path, "ph"), f"{kind!r}: want M, X, C or i")
    text_at(event, "cat", path)
    row = count_at(event, "tid", path)
    if (rank, row) not in rows:
        raise WrongFieldError((*path, "tid"), f"row {row} of rank {rank} has no event thread_name")
    if kind == "X":
        _check_slice(event, path)


def _check_slice(event: Mapping[str, Any], path: tuple[str | int, ...]) -> None:
    number_at(event, "dur", path)
    told = table_at(event.get("args", {}), (*path, "args"))
    if event["cat"] == "operation":
        for name in _OF_OPERATION:
            count_at(told, name, (*path, "args"))
    for name in ("busy_us", "algbw GB/s"):
        if name in told:
            number_at(told, name, (*path, "args"))
