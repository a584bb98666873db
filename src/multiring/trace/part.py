"""A part: the record of one rank.

It is written to a file during the job, and sent to rank 0 at the end.

A part is a sequence of blocks: a line of JSON, and a payload whose length is the line's "bytes". A reader can read a
part up to its last complete block, even if the rank was killed.

block       fields, and the payload
start       rank, size, host, pid, job, timeline, versions, clock (equal for ranks with one clock), names, faults,
            steps, wall_s, start_ns, mark_cycles; always the first block
reading     at_ns, offset_ns, error_ns: rank 0's clock, seen from this rank's clock
rows        an array of ROW
spans       JSON: [[name, kind, start ns, end ns, thread], ...]
devices     JSON: [[device, group, sequence, start ns, end ns, error ns], ...]
words       JSON: {"operations": {digest: [title, plan, engine]}, "groups": {group: text}}
rails       at_ns; JSON: [[peer, rail, bytes acknowledged], ...]
end         at_ns, dropped, fault: an error while the part was written, or ""; always the last block
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from multiring.errors import ArgumentError
from multiring.trace.clocks import Alignment, ClockReading
from multiring.trace.spans import DeviceSlice, Span

# The layout is the same as `Event` in native/core/rank/event_recorder.h. Times are ns of the rank's monotonic clock;
# agreed is 0 if the ranks never agreed.
ROW = np.dtype(
    [
        ("kind", "<u4"),
        ("name", "<u4"),
        ("group", "<u8"),
        ("sequence", "<u8"),
        ("bytes", "<u8"),
        ("start", "<i8"),
        ("agreed", "<i8"),
        ("end", "<i8"),
        ("digest", "<u8"),
        ("busy", "<i8"),
        ("thread", "<u4"),
        ("fault", "<u4"),
    ]
)
OPERATION, WAIT, RAIL, REDUCE = range(4)  # kinds
_HEADER_MOST = 1 << 20


class Row(NamedTuple):
    """One element of an array of ROW, as a tuple: reading fields from the array takes ten times as long."""

    kind: int
    name: int
    group: int
    sequence: int
    size_bytes: int
    start: int
    agreed: int
    end: int
    digest: int
    busy: int
    thread: int
    fault: int


def rows_of(table: NDArray[np.void], kind: int) -> list[Row]:
    """Return the rows of one kind."""
    return [Row._make(each) for each in table[table["kind"] == kind].tolist()]


@dataclass(frozen=True, slots=True)
class RailSample:
    """The bytes that each (peer, rail) had carried at `at_ns`."""

    at_ns: int
    carried: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One rank's record.

    `who` is its start block; `end` is its end block, or None if the part was cut off.
    """

    who: dict[str, Any]
    rows: NDArray[np.void]
    spans: tuple[Span, ...] = ()
    devices: tuple[DeviceSlice, ...] = ()
    readings: tuple[ClockReading, ...] = ()
    operations: dict[int, tuple[str, str, str]] = field(default_factory=dict)
    groups: dict[int, str] = field(default_factory=dict)
    rails: tuple[RailSample, ...] = ()
    end: dict[str, Any] | None = None

    @property
    def rank(self) -> int:
        """The rank that recorded this part."""
        return int(self.who["rank"])

    def alignment(self, reference: str | None) -> Alignment:
        """Return the alignment of this part's times to the clock called `reference`.

        If the part has another clock, or `reference` is None, its own readings decide.
        """
        if self.rank == 0 or (reference is not None and self.who["clock"] == reference):
            return Alignment()
        return Alignment(*self.readings[:1], *self.readings[1:][-1:])


def block(kind: str, payload: bytes = b"", /, **fields: Any) -> bytes:
    """Return one block as bytes."""
    return json.dumps({"block": kind, "bytes": len(payload), **fields}).encode() + b"\n" + payload


def read_part(data: bytes) -> Part:
    """Return the part that consists of the blocks in `data`, up to the last complete block.

    Raises:
        ArgumentError: `data` is not a part, or has no complete start block.
    """
    rows: list[NDArray[np.void]] = []
    spans: list[Span] = []
    devices: list[DeviceSlice] = []
    readings: list[ClockReading] = []
    rails: list[RailSample] = []
    part: dict[str, Any] = {"operations": {}, "groups": {}, "end": None}
    for fields, payload in _blocks(data):
        kind = fields["block"]
        if kind == "start":
            part["who"] = fields
        elif kind == "rows":
            rows.append(np.frombuffer(payload, ROW))
        elif kind == "spans":
            spans += [Span(*each) for each in json.loads(payload)]
        elif kind == "devices":
            devices += [DeviceSlice(*each) for each in json.loads(payload)]
        elif kind == "reading":
            readings.append(ClockReading(fields["at_ns"], fields["offset_ns"], fields["error_ns"]))
        elif kind == "rails":
            rails.append(RailSample(fields["at_ns"], tuple((*each,) for each in json.loads(payload))))
        elif kind == "words":
            words = json.loads(payload)
            part["operations"] |= {int(key): tuple(text) for key, text in words["operations"].items()}
            part["groups"] |= {int(key): text for key, text in words["groups"].items()}
        else:
            part["end"] = fields
    if "who" not in part:
        raise ArgumentError("not a part of a timeline; want a file that a rank left, named *.rank-K.part")
    whole = np.concatenate(rows) if rows else np.empty(0, ROW)
    part |= {"spans": tuple(spans), "devices": tuple(devices), "readings": tuple(readings), "rails": tuple(rails)}
    return Part(rows=whole, **part)


def _blocks(data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
    at = 0
    while (line := data.find(b"\n", at, at + _HEADER_MOST)) >= 0:
        try:
            fields = json.loads(data[at:line])
            end = line + 1 + fields["bytes"]
            known = fields["block"] in _BLOCKS
        except (ValueError, KeyError, TypeError):
            return
        if not known or end > len(data):
            return
        yield fields, data[line + 1 : end]
        at = end


_BLOCKS = ("start", "reading", "rows", "spans", "devices", "words", "rails", "end")
