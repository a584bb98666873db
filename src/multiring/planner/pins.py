"""Read and write pinned plans: `multiring plan --save` writes them as TOML, and MULTIRING_PLAN makes a job use them.

A pinned plan serves its collective from its size up to the next pinned plan's size; docs/plan.md describes the file.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from multiring._collectives import build
from multiring._schedule import Accumulation, Collective, Frame, Wire, names_of
from multiring._topology import Topology
from multiring.errors import ArgumentError, ScheduleError
from multiring.planner.candidates import wires_of
from multiring.planner.plan import Plan, Task

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_WANTED: Mapping[str, type | tuple[type, ...]] = {
    "collective": str,
    "accumulation": str,
    "from_bytes": int,
    "algorithm": str,
    "grid": list,
    "order": list,
    "shares": list,
    "root": int,
    "engine": str,
    "predicted_seconds": (int, float),
}
_OPTIONAL = ("segment_bytes", "wire", "wires", "joined")


@dataclass(frozen=True, slots=True)
class Pins:
    """Pinned plans for topologies of one shape (`Topology.shape`), each with its task."""

    shape: str
    plans: tuple[tuple[Task, Plan], ...]

    def find(self, task: Task) -> Plan | None:
        """Return the plan pinned for the largest size up to the size of `task`, or None if there is none."""
        fitting = [
            (pinned.size_bytes, plan)
            for pinned, plan in self.plans
            if replace(pinned, size_bytes=task.size_bytes) == task and pinned.size_bytes <= task.size_bytes
        ]
        return max(fitting, key=lambda found: found[0])[1] if fitting else None

    def refuse_other(self, topology: Topology) -> None:
        """Raise ArgumentError unless the plans fit the layout of the ranks in `topology`.

        The lossy wires of a plan must be on exactly the axes that cross hosts here.
        """
        if self.shape != topology.shape():
            raise ArgumentError(
                f"the pinned plans are of another topology ({self.shape}) than the job's ({topology.shape()}: "
                f"{topology}); make new ones with multiring plan --save, or unset MULTIRING_PLAN"
            )
        for task, plan in self.plans:
            frame = plan.schedule.frame
            want = wires_of(frame.grid, frame.order, topology, task.wire)
            if frame.wires != want:
                raise ArgumentError(
                    f"a pinned plan of wire {task.wire.name.lower()} has wires {names_of(frame.wires)} on grid"
                    f" {frame.grid}: want {names_of(want)} because these axes cross hosts"
                )


def pins_of(text: str) -> Pins:
    """Return the pinned plans in `text`.

    Raises:
        ArgumentError: `text` is not TOML, or a plan in it is not valid.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ArgumentError(f"the pinned plans are not valid TOML: {error}") from None
    entries, shape = table.get("plans"), table.get("shape")
    strange = sorted(set(table) - {"shape", "plans"})
    if strange or not isinstance(entries, list) or not isinstance(shape, str):
        got = f"unknown key {strange[0]!r}" if strange else f"shape = {shape!r}"
        raise ArgumentError(
            f"pinned plans: {got}: want shape = TEXT and [[plans]], as multiring plan --save writes them"
        )
    return Pins(shape, tuple(_plan_of(entry) for entry in entries))


def _plan_of(entry: Any) -> tuple[Task, Plan]:
    if not isinstance(entry, dict):
        raise ArgumentError(f"plans = {entry!r}: want [[plans]] entries")
    known = (*_WANTED, *_OPTIONAL)
    strange = sorted(set(entry) - set(known))
    if strange:
        raise ArgumentError(f"a pinned plan: unknown key {strange[0]!r}; known are {', '.join(known)}")
    for key, kind in _WANTED.items():
        if not isinstance(entry.get(key), kind):
            raise ArgumentError(f"a pinned plan: {key} = {entry.get(key)!r}: want a value from multiring plan --save")
    cut = entry.get("segment_bytes")
    if cut is not None and (not isinstance(cut, int) or cut < 1):
        raise ArgumentError(f"a pinned plan: segment_bytes = {cut!r}: want an integer > 0, or leave it out")
    try:
        collective, accumulation = Collective(entry["collective"]), Accumulation[entry["accumulation"].upper()]
        frame = Frame(
            collective=collective,
            grid=tuple(entry["grid"]),
            order=tuple(entry["order"]),
            shares=tuple(entry["shares"]),
            root=entry["root"],
            wires=tuple(Wire[name.upper()] for name in entry.get("wires", ())),
            joined=tuple((int(rank), int(partner)) for rank, partner in entry.get("joined", ())),
        )
        task = Task(
            collective=collective,
            size_bytes=entry["from_bytes"],
            accumulation=accumulation,
            root=entry["root"],
            wire=Wire[entry.get("wire", "none").upper()],
        )
        schedule = build(entry["algorithm"], frame, accumulation)
    except (ValueError, KeyError, TypeError, AttributeError, ScheduleError) as error:
        raise ArgumentError(f"a pinned plan for {entry['collective']} is not valid: {error}") from None
    return task, Plan(schedule, entry["engine"], float(entry["predicted_seconds"]), cut)


def pins_text(plans: Iterable[tuple[Task, Plan]], topology: Topology) -> str:
    """Return the TOML text of `plans`, pinned for `topology`; `pins_of` reads it."""
    lines = [f"# Plans for {topology}.", f"shape = {json.dumps(topology.shape())}"]
    for task, plan in plans:
        schedule = plan.schedule
        lines += [
            "",
            "[[plans]]",
            f"collective = {json.dumps(task.collective.value)}",
            f"accumulation = {json.dumps(task.accumulation.name.lower())}",
            f"from_bytes = {task.size_bytes}",
            f"algorithm = {json.dumps(schedule.algorithm)}",
            f"grid = {list(schedule.grid)}",
            f"order = {list(schedule.order)}",
            f"shares = {list(schedule.shares)}",
            f"root = {schedule.root}",
            f"engine = {json.dumps(plan.engine)}",
            f"predicted_seconds = {plan.predicted_seconds!r}",
        ]
        lines += [] if plan.segment_bytes is None else [f"segment_bytes = {plan.segment_bytes}"]
        lines += [f"wire = {json.dumps(task.wire.name.lower())}"] if task.wire else []
        lines += [f"joined = {[list(pair) for pair in schedule.frame.joined]}"] if schedule.frame.joined else []
        lines += [f"wires = {json.dumps([wire.name.lower() for wire in schedule.wires])}"] if plan.wire else []
    return "\n".join(lines) + "\n"
