"""What a server measures, as OpenMetrics text."""

import bisect
from collections import defaultdict
from collections.abc import Callable, Sequence

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64)

Labels = tuple[tuple[str, str], ...]


class CounterMetric:
    """A number for each set of labels, which only grows."""

    kind = "counter"

    def __init__(self) -> None:
        self._values: dict[Labels, float] = defaultdict(float)

    def add(self, amount: float = 1, **labels: str) -> None:
        """Add to the number of these labels."""
        self._values[tuple(sorted(labels.items()))] += amount

    def lines(self, name: str) -> list[str]:
        """Return the metric's lines."""
        return [f"{name}_total{_braces(labels)} {value:g}" for labels, value in sorted(self._values.items())]


class GaugeMetric:
    """A number that is asked for when the metrics are read."""

    kind = "gauge"

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read

    def lines(self, name: str) -> list[str]:
        """Return the metric's lines."""
        return [f"{name} {self._read():g}"]


class HistogramMetric:
    """How many of the observed values are at most each bound, for each set of labels."""

    kind = "histogram"

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = defaultdict(float)

    def observe(self, value: float, **labels: str) -> None:
        """Add a value."""
        key = tuple(sorted(labels.items()))
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
            found.append(f"{name}_sum{_braces(key)} {self._sums[key]:g}")
        return found


Metric = CounterMetric | GaugeMetric | HistogramMetric


class ServerMetrics:
    """All metrics of a server.

    Attributes:
        requests: finished requests by endpoint, model and HTTP status.
        seconds: from the request's header to the answer, by endpoint and model.
        batch_rows: rows of a batch, by model.
        batch_seconds: seconds of a batch, by model.
    """

    def __init__(self) -> None:
        self.requests = CounterMetric()
        self.seconds = HistogramMetric(_SECONDS)
        self.batch_rows = HistogramMetric(_ROWS)
        self.batch_seconds = HistogramMetric(_SECONDS)
        self._metrics: dict[str, tuple[str, Metric]] = {
            "multiring_requests": ("Finished requests.", self.requests),
            "multiring_request_seconds": ("Seconds from the header of a request to its answer.", self.seconds),
            "multiring_batch_rows": ("Rows of a batch.", self.batch_rows),
            "multiring_batch_seconds": ("Seconds of a batch in the model.", self.batch_seconds),
        }

    def add_gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a metric that is read when it is asked for."""
        self._metrics[f"multiring_{name}"] = (text, GaugeMetric(read))

    def text(self) -> str:
        """Return the metrics as OpenMetrics text."""
        lines = []
        for name, (text, metric) in self._metrics.items():
            lines += [f"# TYPE {name} {metric.kind}", f"# HELP {name} {text}", *metric.lines(name)]
        return "\n".join([*lines, "# EOF"]) + "\n"


def _braces(labels: Labels) -> str:
    def escaped(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels) + "}" if labels else ""
