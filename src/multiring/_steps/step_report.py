"""A rank's report on its steps to its launcher: sums since the rank joined, so that a lost report loses nothing."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

MOST_REPORT_BYTES = 1 << 15  # of an encoded report
_MOST_COUNT = 1 << 62
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, kw_only=True, slots=True)
class RailTotals:
    """What one rail of a rank has carried.

    - rail: its number.
    - up, connections: how many of the rank's connections over the rail are in use, of how many.
    - carried_bytes: acknowledged bytes.
    - busy_s: seconds with data to send, summed over connections.
    """

    rail: int
    up: int
    connections: int
    carried_bytes: int
    busy_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What a rank has done so far. Seconds and bytes are sums over the counted steps.

    - generation, rank_now, ranks: the generation of the job's ranks, and this rank's number and their count in it.
    - steps: the counted steps. The first step is not counted, because its beginning is unknown.
    - step: the program's own number of its newest step.
    - wall_s: seconds of the counted steps.
    - input_s: of these, waiting for input.
    - peers_s: of these, waiting until other ranks came to a collective.
    - exposed_s: of these, waiting while data moved.
    - collective_s: seconds in which collectives moved data, also beside computation.
    - collective_bytes: sizes of the callers' buffers.
    - idle_s: seconds since the end of the newest step; None before the first.
    - dropped: events that were lost, whose times are missing.
    - writer_cpu_s: the CPU time of the thread that makes the reports.
    """

    generation: int = 0
    rank_now: int = 0
    ranks: int = 1
    steps: int = 0
    step: int | None = None
    wall_s: float = 0.0
    input_s: float = 0.0
    peers_s: float = 0.0
    exposed_s: float = 0.0
    collective_s: float = 0.0
    collective_bytes: int = 0
    idle_s: float | None = None
    dropped: int = 0
    writer_cpu_s: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    rails: tuple[RailTotals, ...] = ()

    @property
    def compute_s(self) -> float:
        """The rest of `wall_s`: computation, and everything else that the program does."""
        return max(0.0, self.wall_s - self.input_s - self.peers_s - self.exposed_s)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON's values; numbers that are not finite become words."""
        found = {name: getattr(self, name) for name in _NAMES}
        found["metrics"] = {name: json_number(value) for name, value in self.metrics.items()}
        found["rails"] = [asdict(each) for each in self.rails]
        return found


_NAMES = tuple(each.name for each in fields(StepReport))


def json_number(value: float) -> float | str:
    """Return a number as JSON can hold it: "NaN", "Infinity" and "-Infinity" are words."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def report_in(told: object) -> StepReport | None:
    """Return the report in decoded JSON, or None if it is none."""
    if not isinstance(told, dict):
        return None
    try:
        values = {each.name: told[each.name] for each in fields(StepReport)}
        metrics, rails = values.pop("metrics"), values.pop("rails")
        for name, value in values.items():
            if not (value is None and name in ("step", "idle_s")):
                values[name] = _checked(value, is_whole=not name.endswith("_s"))
        kept = {
            str(name): _WORDS[value] if isinstance(value, str) else _checked(value) for name, value in metrics.items()
        }
        return StepReport(**values, metrics=kept, rails=tuple(_rail_in(each) for each in rails))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def decode_report(data: bytes) -> StepReport | None:
    """Return the report in a message, or None if it is none."""
    try:
        return report_in(json.loads(data))
    except (ValueError, RecursionError):
        return None


def encode_report(report: StepReport) -> bytes:
    """Return a message; without metrics if it would be too long."""
    data = json.dumps(report.to_json(), allow_nan=False, separators=(",", ":")).encode()
    if len(data) <= MOST_REPORT_BYTES:
        return data
    return json.dumps({**report.to_json(), "metrics": {}}, allow_nan=False, separators=(",", ":")).encode()


def _rail_in(told: Mapping[str, Any]) -> RailTotals:
    values = {each.name: told[each.name] for each in fields(RailTotals)}
    return RailTotals(**{name: _checked(value, is_whole=name != "busy_s") for name, value in values.items()})


def _checked(value: Any, *, is_whole: bool = False) -> Any:
    if isinstance(value, bool) or not isinstance(value, int if is_whole else int | float):
        raise TypeError
    if not (-_MOST_COUNT < value < _MOST_COUNT if is_whole else math.isfinite(value)):
        raise ValueError
    return value if is_whole else float(value)
