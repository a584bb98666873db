"""Metrics as OpenMetrics text, which Prometheus reads.

Source: OpenMetrics 1.0.0, https://prometheus.io/docs/specs/om/open_metrics_spec/
"""

import bisect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

Labels = tuple[tuple[str, str], ...]


class CounterMetric:
    """A number for each set of labels, which only grows."""

    kind = "counter"

    def __init__(self) -> None:
        self._values: dict[Labels, float] = defaultdict(float)

    def add(self, amount: float = 1, **labels: str) -> None:
        """Add to the number of these labels."""
        self._values[labels_of(labels)] += amount

    def lines(self, name: str) -> list[str]:
        """Return the metric's lines."""
        return [f"{name}_total{_braces(labels)} {_number(value)}" for labels, value in sorted(self._values.items())]


class GaugeMetric:
    """A number that is asked for when the metrics are read."""

    kind = "gauge"

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read

    def lines(self, name: str) -> list[str]:
        """Return the metric's lines."""
        return [f"{name} {_number(self._read())}"]


class MeasuredValues:
    """Numbers that were measured elsewhere, one for each set of labels.

    Args:
        kind: "gauge", or "counter" for numbers that only grow.
        values: pairs of labels and a number, each set of labels once.
    """

    def __init__(self, kind: str, values: Iterable[tuple[Mapping[str, str], float]]) -> None:
        self.kind = kind
        self._values = {labels_of(labels): value for labels, value in values}

    def lines(self, name: str) -> list[str]:
        """Return the metric's lines."""
        ending = "_total" if self.kind == "counter" else ""
        return [f"{name}{ending}{_braces(labels)} {_number(value)}" for labels, value in self._values.items()]


class HistogramMetric:
    """How many of the observed values are at most each bound, for each set of labels."""

    kind = "histogram"

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = defaultdict(float)

    def observe(self, value: float, **labels: str) -> None:
        """Add a value."""
        key = labels_of(labels)
        counts = self._counts.setdefault(key, [0] * (len(self._bounds) + 1))
        counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sums[key] += value

    def lines(self, name: str) -> list[str]:
        """Return the metric's lines."""
        found = []
        for key, counts in sorted(self._counts.items()):
            total = 0
            for bound, count in zip([*map(float, self._bounds), "+Inf"], counts, strict=True):
                total += count
                found.append(f"{name}_bucket{_braces((*key, ('le', str(bound))))} {total}")
            found.append(f"{name}_count{_braces(key)} {total}")
            found.append(f"{name}_sum{_braces(key)} {_number(self._sums[key])}")
        return found


Metric = CounterMetric | GaugeMetric | HistogramMetric | MeasuredValues


def openmetrics_text(metrics: Mapping[str, tuple[str, Metric]]) -> str:
    """Return metrics as text; `metrics` has a help text and a metric for each name."""
    lines = []
    for name, (text, metric) in metrics.items():
        lines += [f"# TYPE {name} {metric.kind}", f"# HELP {name} {_escaped(text)}", *metric.lines(name)]
    return "\n".join([*lines, "# EOF"]) + "\n"


def labels_of(labels: Mapping[str, str]) -> Labels:
    """Return labels as a key, sorted by name."""
    return tuple(sorted(labels.items()))


def _number(value: float) -> str:
    """Return a number with all its digits, as OpenMetrics spells it."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1 << 53 else repr(float(value))


def _braces(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}" if labels else ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
