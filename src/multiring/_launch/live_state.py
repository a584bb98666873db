"""What a record says of its newest job: for the page as JSON, and for Prometheus as OpenMetrics text."""

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from multiring._launch.live_record import record_line
from multiring._steps.step_report import StepReport, json_number, report_in
from multiring._web.openmetrics import MeasuredValues, Metric, openmetrics_text

PARTS = ("compute", "input", "waiting", "collective")  # of a step: they sum to it
_WINDOW_S = 10.0  # the newest time of which the page shows a step's parts
_MOST_POINTS = 600  # of a curve
_MOST_CURVES, _MOST_TEXTS, _MOST_RANKS = 32, 200, 1 << 16


class Curve:
    """The values of a metric by step, thinned so that at most `_MOST_POINTS` are kept."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self._every = 1
        self._seen = 0

    def add(self, step: float, value: float) -> None:
        """Add the next point. Values that are not finite leave a gap."""
        self._seen += 1
        if self._seen % self._every:
            return
        self.points.append((step, value))
        if len(self.points) > _MOST_POINTS:
            self.points = self.points[::2]
            self._every *= 2


@dataclass(slots=True)
class LiveRank:
    """A rank in the newest start.

    - host: its host, or "" if the record does not say it.
    - at_s: the time of its newest report, in seconds since 1970.
    - report: its newest report, or None before the first.
    - before: earlier reports, of the last `_WINDOW_S` seconds.
    - ended: how its process ended, or "".
    """

    host: str
    at_s: float = 0.0
    report: StepReport | None = None
    before: deque[tuple[float, StepReport]] = field(default_factory=lambda: deque(maxlen=64))
    ended: str = ""

    def take(self, at_s: float, report: StepReport) -> None:
        """Take the rank's next report."""
        if self.report is not None:
            if report.wall_s < self.report.wall_s or report.steps < self.report.steps:
                self.before.clear()  # its program has joined the job anew, and its sums with it
            else:
                self.before.append((self.at_s, self.report))
        # The oldest one is kept that makes the window long enough.
        while len(self.before) > 1 and self.before[1][0] <= at_s - _WINDOW_S:
            self.before.popleft()
        self.at_s, self.report = at_s, report

    def step(self) -> dict[str, float]:
        """Return the seconds of a step's parts, as a mean of the last seconds; {} if no step ended in them."""
        if self.report is None:
            return {}
        for _, begin in self.before:
            steps = self.report.steps - begin.steps
            if steps > 0:
                old, new = _parts(begin), _parts(self.report)
                return {name: max(0.0, (new[name] - old[name]) / steps) for name in PARTS}
        return {}


class LiveState:
    """The newest job of a record."""

    def __init__(self) -> None:
        self.begin_job({})

    def begin_job(self, line: Mapping[str, Any]) -> None:
        """Forget the job before."""
        self.job = _text(line.get("job"))
        self.program = _text(line.get("program"))
        self.began_s = _seconds(line)
        self.at_s = self.began_s
        self.starts = self.failures = 0
        self.code: int | None = None
        self.ranks: list[LiveRank] = []
        self.curves: dict[str, Curve] = {}
        self.texts: deque[tuple[float, str]] = deque(maxlen=_MOST_TEXTS)

    def take(self, line: bytes) -> None:
        """Take the next line of the record. A line with other contents than a record's changes nothing."""
        found = record_line(line)
        if found is None:
            return
        self.at_s = max(self.at_s, _seconds(found))
        kind = found["kind"]
        if kind == "job":
            self.begin_job(found)
        elif kind == "start":
            self._begin_start(found)
        elif kind == "newcomer" and (rank := self._rank(found)) is not None:
            rank.host = _text(found.get("host"))
        elif kind == "steps":
            self._take_steps(found)
        elif kind == "said":
            self.texts.append((_seconds(found), _text(found.get("text"))))
        elif kind == "ended":
            self._take_end(found)
        elif kind == "over" and isinstance(found.get("code"), int):
            self.code = found["code"]

    def _begin_start(self, line: Mapping[str, Any]) -> None:
        self.starts += 1
        try:
            hosts = [_text(name) for name, count in line["hosts"] for _ in range(min(count, _MOST_RANKS))]
            self.ranks = [LiveRank(each) for each in hosts[:_MOST_RANKS]]
        except (KeyError, TypeError, ValueError):
            self.ranks = []

    def _take_steps(self, line: Mapping[str, Any]) -> None:
        report, rank = report_in(line), self._rank(line)
        if report is None or rank is None:
            return
        rank.take(_seconds(line), report)
        # The first rank that tells a metric has its curve: other ranks' are of their own samples.
        first = next((each for each in self.ranks if each.report is not None and each.report.metrics), None)
        if rank is not first:
            return
        step = report.step if report.step is not None else report.steps
        for name, value in report.metrics.items():
            if name in self.curves or len(self.curves) < _MOST_CURVES:
                self.curves.setdefault(name, Curve()).add(step, value)

    def _take_end(self, line: Mapping[str, Any]) -> None:
        rank = self._rank(line)
        if rank is not None:
            rank.ended = _text(line.get("how")) or "ended"
            self.failures += line.get("code") != 0

    def _rank(self, line: Mapping[str, Any]) -> LiveRank | None:
        number = line.get("rank")
        if not isinstance(number, int) or not 0 <= number < _MOST_RANKS:
            return None
        while self.ranks and number >= len(self.ranks):  # a newcomer, whose line says its host
            self.ranks.append(LiveRank(""))
        return self.ranks[number] if self.ranks else None

    def snapshot(self) -> dict[str, Any]:
        """Return what the page shows, as JSON's values."""
        return {
            "job": self.job,
            "program": self.program,
            "began_s": self.began_s,
            "now_s": time.time(),
            "starts": self.starts,
            "code": self.code,
            "ranks": [_row(number, rank) for number, rank in enumerate(self.ranks)],
            "curves": {
                name: [[step, json_number(value)] for step, value in curve.points]
                for name, curve in self.curves.items()
            },
            "texts": [[at_s, text] for at_s, text in self.texts],
        }

    def metrics(self) -> str:
        """Return the metrics as OpenMetrics text."""
        found: dict[str, tuple[str, Metric]] = {
            "multiring_job_starts": ("Starts of the ranks.", MeasuredValues("counter", [({}, self.starts)])),
            "multiring_rank_failures": (
                "Processes of ranks that ended with an error.",
                MeasuredValues("counter", [({}, self.failures)]),
            ),
            "multiring_rank_running": (
                "Whether the rank's process runs.",
                MeasuredValues(
                    "gauge",
                    [
                        ({"rank": str(number), "host": each.host}, float(not each.ended))
                        for number, each in enumerate(self.ranks)
                    ],
                ),
            ),
        }
        told = [(str(number), each, each.report) for number, each in enumerate(self.ranks) if each.report is not None]

        def add(name: str, kind: str, text: str, values: Iterable[tuple[dict[str, str], float]]) -> None:
            found[f"multiring_{name}"] = text, MeasuredValues(kind, values)

        add("steps", "counter", "Counted training steps.", [({"rank": k}, r.steps) for k, _, r in told])
        add(
            "step_number",
            "gauge",
            "The program's number of its newest step.",
            [({"rank": k}, r.step) for k, _, r in told if r.step is not None],
        )
        add(
            "step_seconds",
            "counter",
            "Seconds of the counted steps, by what the program did.",
            [({"rank": k, "part": part}, seconds) for k, _, r in told for part, seconds in _parts(r).items()],
        )
        add(
            "collective_seconds",
            "counter",
            "Seconds in which collectives moved data, also beside computation.",
            [({"rank": k}, r.collective_s) for k, _, r in told],
        )
        add(
            "collective_bytes",
            "counter",
            "Bytes of the buffers of collectives.",
            [({"rank": k}, r.collective_bytes) for k, _, r in told],
        )
        add(
            "idle_seconds",
            "gauge",
            "Seconds from the end of the newest step to the newest report.",
            [({"rank": k}, r.idle_s) for k, _, r in told if r.idle_s is not None],
        )
        add(
            "report_time_seconds",
            "gauge",
            "When the rank reported last, in seconds since 1970.",
            [({"rank": k}, each.at_s) for k, each, _ in told],
        )
        add("ranks", "gauge", "Ranks of the rank's generation.", [({"rank": k}, r.ranks) for k, _, r in told])
        add(
            "generation",
            "gauge",
            "Number of the rank's generation.",
            [({"rank": k}, r.generation) for k, _, r in told],
        )
        rails = [({"rank": k, "rail": str(each.rail)}, each) for k, _, r in told for each in r.rails]
        add("rail_bytes", "counter", "Bytes that a rail carried.", [(at, each.carried_bytes) for at, each in rails])
        add(
            "rail_busy_seconds",
            "counter",
            "Seconds in which a rail had data to send, summed over its connections.",
            [(at, each.busy_s) for at, each in rails],
        )
        add("rail_up", "gauge", "Connections over a rail that are in use.", [(at, each.up) for at, each in rails])
        add(
            "metric",
            "gauge",
            "A metric that the program told, such as the loss.",
            [({"rank": k, "name": name}, value) for k, _, r in told for name, value in r.metrics.items()],
        )
        return openmetrics_text(found)


def _parts(report: StepReport) -> dict[str, float]:
    """Return the sums of a report by part of a step."""
    return {
        "compute": report.compute_s,
        "input": report.input_s,
        "waiting": report.peers_s,
        "collective": report.exposed_s,
    }


def _row(number: int, rank: LiveRank) -> dict[str, Any]:
    report = rank.report
    row: dict[str, Any] = {"rank": number, "host": rank.host, "ended": rank.ended, "at_s": rank.at_s, "step": {}}
    if report is None:
        return row
    return {
        **row,
        "step": rank.step(),
        "steps": report.steps,
        "number": report.step,
        "idle_s": report.idle_s,
        "generation": report.generation,
        "rank_now": report.rank_now,
        "ranks": report.ranks,
        "collective_bytes": report.collective_bytes,
        "metrics": {name: json_number(value) for name, value in report.metrics.items()},
        "rails": report.to_json()["rails"],
    }


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _seconds(line: Mapping[str, Any]) -> float:
    value = line.get("at_s")
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number and value is not None else 0.0
