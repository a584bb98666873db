"""What a training tells of its steps while it runs: their number, metrics such as the loss, and waits for input.

A training only updates numbers here, which costs about a microsecond a step. `multiring run --record` and `--page` let
each rank read the numbers from another thread, at most once a second (docs/live.md).
"""

import logging
import math
import operator
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from multiring.errors import ArgumentError

MOST_METRICS, MOST_CHARACTERS = 32, 100  # kept metrics, and characters of a metric's name
Each = TypeVar("Each")
_log = logging.getLogger("multiring")


class StepMark(NamedTuple):
    """The end of a training step.

    `steps` counts steps within a window. Steps of two windows cannot be compared: between them, the program evaluated,
    saved, or returned to an earlier step.
    """

    window: int
    steps: int
    at_s: float  # of this host's monotonic clock
    input_s: float  # seconds that the program has waited for input so far


class MadeSamples(NamedTuple):
    """What the workers of this process's loaders have made so far, up to the newest batch that a program received."""

    samples: int = 0
    workers: int = 0  # of the newest loader
    worker_s: float = 0.0  # seconds of workers, without waits for a core
    cpu_s: float = 0.0  # of that, processor time
    process_cpu_s: float = 0.0  # of that, processor time of threads of this process

    def since(self, before: "MadeSamples") -> "MadeSamples":
        """Return what was made after `before`."""
        return MadeSamples(
            self.samples - before.samples,
            self.workers,
            self.worker_s - before.worker_s,
            self.cpu_s - before.cpu_s,
            self.process_cpu_s - before.process_cpu_s,
        )


class StepCounters:
    """The numbers of this process.

    Attributes:
        mark: the end of the newest step; None before the first.
        begin: the end of the first step of its window.
        input_s: seconds that the program has waited for input so far.
        made: what workers have made.
        step: the number of the newest step as the program counts, or None if it has not told it.
        metrics: the newest metrics by name.
        is_read: whether something reads the metrics.
        wants_metrics: whether metrics that are expensive to read are wanted, as after each report.
    """

    def __init__(self) -> None:
        self.mark: StepMark | None = None
        self.begin: StepMark | None = None
        self.input_s = 0.0
        self.made = MadeSamples()
        self.step: int | None = None
        self.metrics: dict[str, float] = {}
        self.is_read = False
        self.wants_metrics = True
        self._window = 0
        self._has_dropped = False

    def count(self) -> None:
        """Count a step of a training whose program does not tell its steps by `log_metrics`."""
        if self.step is None:
            mark = self.mark
            self._end_step(1 if mark is None else mark.steps + 1)

    def count_made(self, samples: int, workers: int, worker_s: float, cpu_s: float, *, by_threads: bool) -> None:
        """Count a batch that workers have made; `by_threads`: threads of this process."""
        old, own_s = self.made, cpu_s if by_threads else 0.0
        self.made = MadeSamples(
            old.samples + samples, workers, old.worker_s + worker_s, old.cpu_s + cpu_s, old.process_cpu_s + own_s
        )

    def begin_window(self) -> None:
        """Exclude the time from the newest step to the next one, such as an evaluation."""
        self._window += 1

    def tell_step(self, step: int) -> None:
        """Count the steps up to number `step`."""
        mark = self.mark
        if self.step is None or step < self.step:  # the first one, or the program went back to a checkpoint
            self._window += 1
        if mark is None or step != self.step or mark.window != self._window:
            self.step = step
            self._end_step(step)

    def _end_step(self, steps: int) -> None:
        is_first = self.mark is None or self.mark.window != self._window
        self.mark = StepMark(self._window, steps, time.monotonic(), self.input_s)
        if is_first:
            self.begin = self.mark

    def keep(self, name: str, value: Any) -> None:
        """Keep a metric. A value that is no Python number is read only if it is wanted."""
        metrics = self.metrics
        if type(value) is not float and type(value) is not int and not (self.wants_metrics or name not in metrics):
            return
        if name not in metrics and (len(metrics) >= MOST_METRICS or len(name) > MOST_CHARACTERS):
            if not self._has_dropped:
                self._has_dropped = True
                _log.warning(
                    "multiring.log_metrics: %.120r is dropped: a record keeps %d metrics, with names of at most %d "
                    "characters",
                    name,
                    MOST_METRICS,
                    MOST_CHARACTERS,
                )
            return
        metrics[name] = _number(name, value)


STEPS = StepCounters()


def with_timed_waits(batches: Iterable[Each]) -> Iterator[Each]:
    """Yield batches, and count the time that each is waited for as waiting for input."""
    source = iter(batches)
    while True:
        began_s = time.monotonic()
        try:
            batch = next(source)
        except StopIteration:
            return
        finally:
            STEPS.input_s += time.monotonic() - began_s
        yield batch


def log_metrics(step: int | None = None, **metrics: Any) -> None:
    """Tell `multiring run --record` and `--page` about a step of this training.

        multiring.log_metrics(step=step, loss=loss)

    Every rank may call this, each with its own values. The call only keeps the values, so it may be made in each step.
    Without `--record` and `--page` it keeps nothing.

    Args:
        step: the number of finished steps. Without it, the call counts no step: steps are then counted where the
            gradients of an optimizer of multiring are reduced.
        metrics: numbers by name, such as `loss` and `noise_scale`. A tensor of one element is read about once a second
            only, because reading it may wait for a GPU. At most 32 names of 100 characters are kept.

    Raises:
        ArgumentError: `step` is not an integer of at least 0, or a metric is not a number.
    """
    for name, value in metrics.items():
        if not hasattr(value, "__float__"):
            raise ArgumentError(f"log_metrics: {name:.100} is a {type(value).__name__}; want a number")
    if step is not None:
        try:
            number = operator.index(step)
        except TypeError:
            number = -1
        if number < 0:
            raise ArgumentError(f"log_metrics(step={str(step)[:100]}): want an integer of at least 0")
        STEPS.tell_step(number)
    if STEPS.is_read:
        for name, value in metrics.items():
            STEPS.keep(name, value)


def _number(name: str, value: Any) -> float:
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except OverflowError:  # an integer beyond float64
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"log_metrics: {name:.100} is not one number: {str(error)[:200]}") from None
