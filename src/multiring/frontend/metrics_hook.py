"""Metrics of all ranks for what draws them, TensorBoard, W&B or a file: as one process would report them."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from multiring.errors import ArgumentError
from multiring.frontend.evaluation import checked, mean
from multiring.frontend.lifecycle import rank

Writer = Callable[[dict[str, Any], int], object]


class MetricsHook:
    """Hands on metrics, over all ranks' samples and over several steps, on rank 0; see `metrics_hook`."""

    def __init__(self, start: Callable[[], Writer], every: int) -> None:
        begin, steps = cast("tuple[object, object]", (start, every))  # whatever a user gave
        if not callable(begin) or not isinstance(steps, int) or steps < 1:
            raise ArgumentError(
                f"metrics_hook({start!r}, every={every!r}): want what returns a writer, and 1 step or more"
            )
        self._start = start
        self._every = every
        self._writer: Writer | None = None
        self._sums: dict[str, Any] = {}
        self._weight = 0.0
        self._calls = 0

    def __call__(self, step: int, metrics: Mapping[str, Any], weight: float = 1.0) -> dict[str, Any] | None:
        """Take note of a step's metrics, and hand them on where it is time; every rank calls it.

        Args:
            step: its number, for the writer.
            metrics: by name, the same names on all ranks; the means over this rank's samples. Numbers or arrays.
            weight: how many samples those are; 0 where the rank had none.

        Returns:
            What was handed on, on every rank; None where it was not yet time.

        Raises:
            ArgumentError: other names than in the step before; or as in `mean`.
            MismatchError, HorovodInternalError: as in `mean`.
        """
        if self._sums and list(metrics) != list(self._sums):
            raise ArgumentError(f"metrics {', '.join(metrics)}; want those of the step before: {', '.join(self._sums)}")
        for name, value in zip(metrics, checked(metrics, weight), strict=True):
            self._sums[name] = self._sums.get(name, 0.0) + (value * weight if weight else np.zeros_like(value))
        self._weight += weight
        self._calls += 1
        return self.flush(step) if self._calls == self._every else None

    def flush(self, step: int) -> dict[str, Any] | None:
        """Hand on what has been noted since the last time, if anything was; every rank calls it."""
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
    """Return what hands each step's metrics on to TensorBoard, W&B or whatever else; no dependency.

        log = mt.metrics_hook(lambda: wandb.init(project="digits").log, every=10)
        for step, (inputs, labels) in enumerate(loader):
            ...
            log(step, {"loss": loss}, weight=len(labels))

    Args:
        start: called once, on rank 0 alone, as the first metrics come; returns what is called with (metrics, step):
            `metrics` by name, floats, or arrays of float64.
        every: so many steps are one report, whose metrics are the means over all of their samples, on all ranks.

    Raises:
        ArgumentError: `start` cannot be called, or `every` is below 1.
    """
    return MetricsHook(start, every)
