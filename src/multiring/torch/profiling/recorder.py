"""Turn the events of a training into the medians of its steps. This module does not import torch.

A step ends with its optimizers' updates, and begins where the step before it ended. With several backwards a step, all
compute before the last backward counts as forward, because only the last backward shares gradients.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from statistics import median, quantiles

from multiring._simulator.script_profile import PartSeconds, ReadyGradient
from multiring.errors import StateError

WARM_UP = 3  # steps: the hooks of gradients are installed in the first, DistributedDataParallel cuts buckets anew
LEAST = 3  # measured steps
_S = 1e-9


@dataclass(slots=True)
class _Step:
    """A step so far. Times are in ns; `ready` is since the start of the last backward."""

    input: int = 0
    samples: int = 0
    compute_before: int = 0
    backward: int = 0
    backwards: int = 0
    optimizer: int = 0
    updates: int = 0
    ready: dict[Hashable, int] = field(default_factory=dict)
    optimizers: set[Hashable] = field(default_factory=set)
    length: int = 0


class StepRecorder:
    """Collects events, in the order in which they happen, and calls `complete` after enough steps.

    All times are ns of one clock. `forward` calls `complete`, so that a step is never cut. It calls `meet` in the last
    step to warm up, which is not measured, so `meet` may wait.
    """

    def __init__(
        self, steps: int, now: int, complete: Callable[[], None], meet: Callable[[], None] = lambda: None
    ) -> None:
        self._wanted = WARM_UP + steps
        self._complete = complete
        self._meet = meet
        self._done: list[_Step] = []
        self._step = _Step()
        self._updated: _Step | None = None  # a step that ends if no further optimizer makes an update
        self._began = now
        self._updated_at = now
        self._forward_at: int | None = None
        self._batch = 0  # samples since the last backward
        self._backward_at = 0
        self._update_at: int | None = None

    @property
    def steps(self) -> int:
        """The number of steps so far, with those of the warm-up."""
        return len(self._done) + (self._updated is not None)

    def waited(self, ns: int) -> None:
        """Add a wait for the loader."""
        self._step.input += ns

    def forward(self, now: int) -> None:
        """Begin a forward pass."""
        if self._updated is not None:
            self._close()
            if len(self._done) == self._wanted:
                self._complete()
            elif len(self._done) == WARM_UP - 1:
                self._meet()
        if self._forward_at is None:
            self._forward_at = now

    def computed(self, samples: int) -> None:
        """End a forward pass of `samples` samples."""
        self._batch = max(self._batch, samples)

    def backward_begins(self, now: int) -> None:
        """Begin a backward pass.

        Raises:
            StateError: an optimizer calls it in its step.
        """
        if self._update_at is not None:
            raise StateError(
                "the optimizer computes gradients in its step (LBFGS, or another closure): want loss.backward() before "
                "optimizer.step()"
            )
        if self._updated is not None:
            self._close()
        step = self._step
        step.compute_before += step.backward + now - (now if self._forward_at is None else self._forward_at)
        step.backward = 0
        step.samples += self._batch
        step.ready.clear()
        self._batch, self._forward_at = 0, None
        self._backward_at = now

    def is_ready(self, gradient: Hashable, now: int) -> None:
        """Note that a gradient is complete."""
        self._step.ready[gradient] = now - self._backward_at

    def backward_ends(self, now: int) -> None:
        """End the backward pass."""
        self._step.backward = now - self._backward_at
        self._step.backwards += 1

    def update_begins(self, now: int) -> None:
        """Begin the step of an optimizer."""
        self._update_at = now

    def update_ends(self, now: int, optimizer: Hashable) -> None:
        """End the step of an optimizer. Updates without a backward before them belong to no step."""
        began, self._update_at = self._update_at, None
        if self._updated is None:
            if not self._step.backwards or began is None:
                return
            self._updated, self._step = self._step, _Step()
        self._updated.optimizer += now - (now if began is None else began)
        self._updated.updates += 1
        self._updated.optimizers.add(optimizer)
        self._updated_at = now

    def _close(self) -> None:
        step, self._updated = self._updated, None
        if step is not None:
            step.length = self._updated_at - self._began
            self._began = self._updated_at
            self._done.append(step)

    def measured(self) -> "MeasuredSteps":
        """Return the medians of the steps so far.

        Raises:
            StateError: there are too few steps, or they are not alike.
        """
        self._close()
        found = self._done[WARM_UP:]
        if len(found) < LEAST:
            raise StateError(
                f"the program made {len(self._done)} optimizer steps with a backward before them: want at least "
                f"{WARM_UP + LEAST}, {WARM_UP} of them to warm up"
            )
        if len({frozenset(each.optimizers) for each in found}) > 1:
            raise StateError(
                "the program's steps alternate between optimizers, as those of a GAN do: want the same optimizers in "
                "each step"
            )
        # A scaler leaves out an update, or an epoch ends with fewer backwards: such steps are not counted.
        usual = median_low_of([each.backwards for each in found])
        alike = [each for each in found if each.backwards == usual]
        usual_samples = median_low_of([each.samples for each in alike])
        alike = [each for each in alike if each.samples == usual_samples]
        return _measured(alike, usual, usual_samples)


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """The medians of the steps that are alike, and the gradients by their readiness, with the times in seconds.

    `compute_s` has forward and backward of each of these steps.
    """

    steps: int
    backwards: int
    samples: int
    seconds: PartSeconds
    ready: tuple[tuple[Hashable, float], ...]
    compute_s: tuple[float, ...]

    def gradients(self, about: Callable[[Hashable], tuple[str, int]]) -> tuple[ReadyGradient, ...]:
        """Return the gradients; `about` gives a gradient's name and bytes."""
        return tuple(ReadyGradient(*about(key), ready_s=ready_s) for key, ready_s in self.ready)


def median_low_of(values: list[int]) -> int:
    """Return the value in the middle, which is one of `values`."""
    return sorted(values)[(len(values) - 1) // 2]


def _measured(steps: list[_Step], backwards: int, samples: int) -> MeasuredSteps:
    lengths = [each.length * _S for each in steps]
    low, middle, high = quantiles(lengths, n=4, method="inclusive") if len(lengths) > 1 else lengths * 3
    parts = {
        "input": median(each.input for each in steps) * _S,
        "forward": median(each.compute_before for each in steps) * _S,
        "backward": median(each.backward for each in steps) * _S,
        "optimizer": median(each.optimizer for each in steps) * _S,
    }
    known = sum(parts.values())
    other = max(0.0, middle - known)
    times: dict[Hashable, list[int]] = defaultdict(list)
    for each in steps:
        for gradient, at in each.ready.items():
            times[gradient].append(at)
    ready = [(key, median(found) * _S) for key, found in times.items() if 2 * len(found) >= len(steps)]
    return MeasuredSteps(
        steps=len(steps),
        backwards=backwards,
        samples=samples,
        seconds=PartSeconds(step=known + other, step_low=low, step_high=high, other=other, **parts),
        ready=tuple(sorted(ready, key=lambda each: each[1])),
        compute_s=tuple(round((each.compute_before + each.backward) * _S, 9) for each in steps),
    )
