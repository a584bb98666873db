"""What a server measures."""

from collections.abc import Callable

from multiring._web.openmetrics import CounterMetric, GaugeMetric, HistogramMetric, Metric, openmetrics_text

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64)


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
        return openmetrics_text(self._metrics)
