"""Simulated timelines, and their parts."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from multiring.trace import Part, block
from multiring.trace.part import OPERATION, ROW, WAIT
from multiring.trace.spans import Span

NAMES = ["all_reduce", "barrier", "send"]


def who(rank: int, size: int = 2, **changes: Any) -> dict[str, Any]:
    """Return the fields of a start block."""
    return {
        "rank": rank,
        "size": size,
        "host": f"host{rank}",
        "pid": 100 + rank,
        "job": "a job",
        "timeline": "f00",
        "versions": {"multiring": "0"},
        "clock": f"clock {rank}",
        "names": NAMES,
        "steps": 3,
        "faults": ["none", "argument", "mismatch"],
        "wall_s": 1.5,
        "start_ns": 0,
        "mark_cycles": False,
        **changes,
    }


def row(kind: int, start: int, end: int, **fields: int) -> Any:
    """Return one row; `agreed` defaults to its start."""
    made = np.zeros(1, ROW)
    made["kind"], made["start"], made["end"] = kind, start, end
    if kind == OPERATION:
        made["agreed"] = start
    for name, value in fields.items():
        made[name] = value
    return made


def rows(*each: Any) -> Any:
    return np.concatenate(each) if each else np.empty(0, ROW)


def part(rank: int = 0, *each: Any, spans: tuple[Span, ...] = (), **fields: Any) -> Part:
    about = fields.pop("who", {})
    return Part(who=who(rank, **about), rows=rows(*each), spans=spans, end={"dropped": 0, "fault": ""}, **fields)


def part_bytes(rank: int, *each: Any, **about: Any) -> bytes:
    """Return the bytes that a rank would have written."""
    return (
        block("start", **who(rank, **about))
        + block("reading", at_ns=10, offset_ns=1000, error_ns=5)
        + block("words", b'{"operations": {"7": ["all_reduce sum", "a plan", ""]}, "groups": {"1": "ranks 0-1"}}')
        + block("rows", rows(*each).tobytes())
        + block("spans", b'[["forward Net", "forward", 1, 2, 100]]')
        + block("rails", b"[[1, 0, 500]]", at_ns=20)
        + block("reading", at_ns=100, offset_ns=2000, error_ns=7)
        + block("end", at_ns=110, dropped=0, fault="")
    )


__all__ = ["NAMES", "OPERATION", "ROW", "WAIT", "Span", "part", "part_bytes", "row", "rows", "who"]


def timeline_text(
    events: Sequence[dict[str, Any]],
    *,
    hosts: Sequence[str],
    missing: Sequence[int] = (),
    writer: str = "multiring 1.0",
) -> str:
    """Return the text of a timeline of ranks on these hosts, with one line for each event, as TraceFile writes it."""
    own = {"wall_s": 1.5, "clock": "rank 0's", "is_complete": True, "dropped_events": 0}
    reading = {"offset_us": -0.5, "error_us": 3.0, "at_us": 9.0}
    ranks: dict[str, Any] = {}
    names = []
    for rank, host in enumerate(hosts):
        if rank in missing:
            ranks[str(rank)] = {"is_missing": "it left no part here"}
            continue
        ranks[str(rank)] = {"host": host, "pid": 100 + rank, **own, "readings": [reading]}
        title = {"name": f"rank {rank}, {host}"}
        names.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": title})
        names.append({"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
    lines = ",\n".join(map(json.dumps, [*names, *events]))
    about = {"job": "a job", "size": len(hosts), "written_by": writer, "ranks": ranks}
    return f'{{"traceEvents":[\n{lines}\n],"displayTimeUnit":"ms","metadata":{json.dumps(about)}}}\n'
