"""Report metrics of all ranks to TensorBoard, W&B or a file, as one process would."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from multiring._arguments import require_function, require_whole
from multiring._frontend.evaluation import checked, mean
from multiring._frontend.lifecycle import rank
from multiring.errors import ArgumentError

Writer = Callable[[dict[str, Any], int], object]


class MetricsHook:
    """Averages metrics over all ranks' samples and over several steps, and reports them on rank 0."""

    def __init__(self, start: Callable[[], Writer], every: int) -> None:
        self._start = require_function("metrics_hook: start", start, "a function that returns a writer")
        self._every = require_whole("metrics_hook: every", every, 1)
        self._writer: Writer | None = None
        self._sums: dict[str, Any] = {}
        self._weight = 0.0
        self._calls = 0

    def __call__(self, step: int, metrics: Mapping[str, Any], weight: float = 1.0) -> dict[str, Any] | None:
        """Add a step's metrics, and report after every `every` steps. Every rank calls it.

        Args:
            step: the step's number, for the writer.
            metrics: the means over this rank's samples, numbers or arrays by name; the same names on all ranks.
            weight: the number of this rank's samples in the step; 0 if the rank had no samples.

        Returns:
            The reported metrics, on every rank; None if this call has not reported.

        Raises:
            ArgumentError: the names differ from those of the step before; or as in `mean`.
            MismatchError, CollectiveError: as in `mean`.
        """
        if self._sums and list(metrics) != list(self._sums):
            raise ArgumentError(
                f"metrics {', '.join(metrics)}; want the same metrics as in the previous step: {', '.join(self._sums)}"
            )
        for name, value in zip(metrics, checked(metrics, weight), strict=True):
            self._sums[name] = self._sums.get(name, 0.0) + (value * weight if weight else np.zeros_like(value))
        self._weight += weight
        self._calls += 1
        return self.flush(step) if self._calls == self._every else None

    def flush(self, step: int) -> dict[str, Any] | None:
        """Report the metrics added since the last report, if there are any.

        Every rank calls it.
        """
        if not self._calls:
            return None
        sums, weight = self._sums, self._weight
        self._sums, self._weight, self._calls = {}, 0.0, 0
        found = mean({name: value / weight if weight else value for name, value in sums.items()}, weight)
        if rank() == 0:
            self._writer = self._writer or self._start()
            self._writer(found, step)
        return found


def metrics_hook(start: Callable[[], Writer], *, every: int = 1) -> MetricsHook:
    """Return a hook that reports each step's metrics to TensorBoard, W&B or another writer.

        log = mt.metrics_hook(lambda: wandb.init(project="digits").log, every=10)
        for step, (inputs, labels) in enumerate(loader):
            ...
            log(step, {"loss": loss}, weight=len(labels))

    Args:
        start: creates the writer. It is called once, on rank 0 only, before the first report. The hook calls the writer
            with (metrics, step): `metrics` by name are floats, or arrays of float64.
        every: the number of steps per report. A report has the means over all samples of these steps, on all ranks.

    Raises:
        ArgumentError: `start` is not callable, or `every` is below 1.
    """
    return MetricsHook(start, every)
