"""The noise scale of a training run, measured while it trains; see `multiring.convergence.noise_scale`."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from multiring.convergence.adascale import AdaScale
from multiring.convergence.convergence_concerns import Facts, concerns
from multiring.convergence.critical_batch import Advice, advise
from multiring.convergence.noise_scale import Interval, NoiseSample, NoiseScale, sample_of_means
from multiring.data import Share
from multiring.errors import ArgumentError, StateError
from multiring.frontend.errors import internal_errors
from multiring.runtime import Group
from multiring.torch.gradients.distributed import Distributed, setup_of
from multiring.torch.step.gradients import norms_of, square_of
from multiring.torch.step.stages import Mark, StepContext, stages_of

_SKETCH = 4096  # numbers: norms are then off by 2 %, each time another way


class NoiseWatch:
    """Measures the noise scale every few steps; see `noise_scale`."""

    name = "noise"

    def __init__(
        self, optimizer: torch.optim.Optimizer, samples: int | None, every: int, *, window: int, warns: bool
    ) -> None:
        self._optimizer = optimizer
        self._samples = samples
        self._every = every
        self._warns = warns
        self._known = NoiseScale(window)
        self._steps = 0
        self._observation: _Observation | None = None  # of the step that is being made, if it is its turn
        self._parts: list[tuple[float, int]] = []  # micro-batches of one rank: squared norms, samples
        self._before: list[Tensor] = []
        self._batch = 0.0
        self._measured = 0  # also gradients that are not finite, which do not count
        self._said: set[str] = set()
        self._adascale: AdaScale | None = None
        self._begin()

    def begin_adascale(self, scale: float, batch: int) -> AdaScale:
        """Return what is told each measurement, from now on."""
        if self._every != 1:
            raise ArgumentError(f"AdaScale with a noise scale of every {self._every} steps; want noise_scale(every=1)")
        self._adascale = AdaScale(scale, batch)
        return self._adascale

    def __len__(self) -> int:
        return len(self._known)

    @property
    def value(self) -> float:
        """The noise scale, in samples; see `NoiseScale.value`."""
        return self._known.value

    @property
    def batch(self) -> float:
        """Samples of the last step that was measured."""
        return self._batch

    def interval(self, level: float = 0.95) -> Interval:
        """Return the noise scale and where it may lie; see `NoiseScale.interval`."""
        return self._known.interval(level)

    def critical(self, batch: float) -> float:
        """Return the critical batch of the run so far, all of it within the window; see `NoiseScale.progress_mean`."""
        return self._known.progress_mean(batch)

    def report(self) -> str:
        """Return a line: the noise scale, or how many steps it still needs."""
        if len(self._known) < 8:
            return f"noise scale: {len(self._known)} of at least 8 measurements; a longer run tells it"
        left = self._known.steps_needed()
        more = "" if left == 0 else ", no end in sight" if left < 0 else f", to 25 % in {left * self._every} steps more"
        return f"noise scale {self.interval()} at batch {self._batch:,.0f}{more}"

    def advise(self, **known: Any) -> Advice:
        """Return `multiring.convergence.advise` with what was measured here; `known` are its other arguments.

        Raises:
            StateError: too little was measured, or what was gives no finite noise scale yet.
        """
        if "critical" not in known and not 0 < self.value < float("inf"):
            raise StateError(f"noise.advise: no finite noise scale yet ({self.report()}); measure more steps before")
        return advise(**{"critical": self.value, "batch": round(self._batch), **known})

    def part(self, samples: int) -> None:
        """Take note, on one rank, that a micro-batch of so many samples has been added to the gradients.

        Called after each backward of a step, before the next one. Each counts for its share of the step's samples.
        """
        if not self._is_due():
            return
        now = [each.grad for group in self._optimizer.param_groups for each in group["params"] if each.grad is not None]
        before = self._before if len(self._before) == len(now) else []
        added = [each - earlier for each, earlier in zip(now, before, strict=True)] if before else now
        self._parts.append((square_of(self._parameters, added), samples))
        self._before = [each.detach().clone() for each in now]

    # ---- as a stage ----

    def mark(self, step: StepContext) -> Mark | None:
        """Return what was measured of the gradients just made, where it is their turn; all ranks' may be to come."""
        self._steps += 1
        if (
            not isinstance(step.optimizer, Distributed)
            or step.optimizer.group is None
            or step.optimizer.group.size == 1
        ):
            found = self._of_parts(step)
        else:
            found = self._of_ranks(step.optimizer, step.optimizer.group)
        self._begin()
        return found

    def before(self, step: StepContext) -> None:
        """Count what was measured of the gradients that are applied now."""
        mark = step.marks.get(self.name) or {}
        sample = _sample_of(mark)
        if sample is not None:
            self._batch = mark["batch"]
            self._known.add(sample)
            if self._adascale is not None:
                self._adascale.add(sample)
            self._measured += 1
            if self._warns and self._measured % 16 == 0:
                self._warn()

    def after(self, step: StepContext, *, applied: bool) -> None:
        """There is nothing to do."""

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured."""
        adascale = None if self._adascale is None else self._adascale.state_dict()
        return {"steps": self._steps, "known": self._known.state_dict(), "adascale": adascale, "batch": self._batch}

    def load_state_dict(self, state: dict[str, Any], parameters: list[Tensor]) -> None:  # noqa: ARG002 -- as Stage
        """Go on from there."""
        self._steps, self._batch = state["steps"], state["batch"]
        self._known.load_state_dict(state["known"])
        if self._adascale is not None and state["adascale"] is not None:
            self._adascale.load_state_dict(state["adascale"])
        self._begin()

    @property
    def _parameters(self) -> list[Tensor]:
        return [each for group in self._optimizer.param_groups for each in group["params"]]

    def _is_due(self) -> bool:
        return self._steps % self._every == 0

    def _begin(self) -> None:
        """Have the next step watched, if it is its turn."""
        setup = setup_of(self._optimizer)
        # What comes out of these is not the mean of what went in, step by step: they owe something to the next one.
        is_altered = setup is not None and (setup.options.is_lossy or setup.options.translates)
        self._observation = _Observation(_SKETCH if is_altered else 0, self._steps) if self._is_due() else None
        self._parts, self._before = [], []
        if isinstance(self._optimizer, Distributed):
            self._optimizer.watch(self._observation)

    def _of_parts(self, step: StepContext) -> Mark | None:
        if len(self._parts) < 2:
            return None
        total = float(sum(samples for _, samples in self._parts))
        # A part's gradient is in the sum with its share of the samples.
        mean = sum(square * total / samples for square, samples in self._parts)
        whole = square_of(step.parameters, step.gradients)
        return {"batch": total, "mean": mean, "total": total, "parts": len(self._parts), "divisor": 1.0, "whole": whole}

    def _of_ranks(self, optimizer: Distributed, group: Group) -> Mark | None:
        observation = self._observation
        if observation is None or not observation.has_begun:
            return None
        setup = setup_of(optimizer)
        passes = 1 if setup is None else setup.options.backward_passes_per_step
        shares = optimizer.shares_of_step
        if len({each.total for each in shares}) > 1 or (shares and 1 < passes != len(shares)):
            return None  # batches of unlike sizes, or fewer of them than others: the sum of their means is no mean
        share = None
        if shares:
            samples, total, least = (
                sum(getattr(each, name) for each in shares) for name in ("samples", "total", "least")
            )
            share = Share(samples=samples, total=total, ranks=shares[0].ranks, least=least)
        own = self._samples if share is None else share.samples
        if own is None:
            raise StateError(
                "noise_scale: how many samples a step has is not known; make the loader by mt.distribute, or pass "
                "samples=, this rank's"
            )
        is_sum = setup is not None and setup.options.op == "sum"
        # What the rank's own gradient was multiplied by, beside being a mean over its samples.
        weight = float(own) if is_sum else 1.0 if share is None else share.weight
        square = observation.own / weight**2 if own else 0.0
        is_mean_of_means = share is None and not is_sum
        counted = [square * (1.0 if is_mean_of_means else own), own, 1.0 / own if own else 0.0, float(own > 0)]
        told = np.concatenate([counted, observation.sketch])
        with internal_errors("noise_scale"):
            group.all_reduce(told)
        mean, total, inverse, parts = told[:4].tolist()
        if parts < 2:
            return None
        whole = observation.whole
        if len(observation.sketch):
            whole = float((told[4:] ** 2).sum()) / (1.0 if is_sum else group.size**2)
        # Means of unlike numbers of samples count as their harmonic mean.
        by = parts if is_mean_of_means else total
        found = {"mean": mean / by, "total": parts**2 / inverse if is_mean_of_means else total, "parts": parts}
        observation.mark = {**found, "batch": total, "divisor": total**2 if is_sum else 1.0, "whole": whole}
        return observation.mark

    def _warn(self) -> None:
        interval = self._known.interval(resamples=200) if len(self._known) > 7 else None
        for each in concerns(facts_of(self._optimizer, self._batch, interval)):
            if each.kind not in self._said:
                self._said.add(each.kind)
                warnings.warn(str(each), stacklevel=2)


class _Observation:
    """What the reducer shows of one step's gradients.

    Where compression alters the gradients' sum, the norms are of sketches: g's is S g, of a few thousand numbers, where
    each number of g is added to one of S g with a random sign, the same on all ranks. Then E |S g|^2 = |g|^2, and the
    sketch of a mean is the mean of sketches, which is small enough to be summed as it is.

    Source: Charikar, Chen & Farach-Colton, "Finding frequent items in data streams", ICALP 2002.
    """

    def __init__(self, sketched: int, seed: int) -> None:
        self.has_begun = False
        self._own = 0.0
        self.whole: float | None = None  # all ranks', once it is known
        self.mark: Mark = {}  # what waits for that
        self._seed = seed
        self._signs = torch.Generator()
        self._sketch = torch.zeros(sketched, dtype=torch.float64)

    @property
    def sketch(self) -> NDArray[np.float64]:
        """Of this rank's gradients; empty where the norms themselves serve."""
        found: NDArray[np.float64] = self._sketch.numpy()
        return found

    @property
    def own(self) -> float:
        """This rank's squared norm."""
        return float(self._sketch.square().sum()) if len(self._sketch) else self._own

    def begin(self) -> None:
        """Look at a reduction from its begin."""
        self.has_begun, self._own, self.whole = True, 0.0, None
        self._sketch.zero_()
        self._signs.manual_seed(self._seed)

    def see_own(self, gradients: Sequence[Tensor]) -> None:
        """Count some of this rank's."""
        if not len(self._sketch):
            self._own += float((norms_of(gradients) ** 2).sum())
            return
        width = len(self._sketch)
        for each in gradients:
            flat = nn.functional.pad(each.reshape(-1), (0, -each.numel() % width))
            signs = torch.randint(0, 2, flat.shape, generator=self._signs, dtype=torch.int8).mul_(2).sub_(1)
            self._sketch += (flat * signs).view(-1, width).sum(0)

    def see_whole(self, gradients: Sequence[Tensor]) -> None:
        """Count all ranks'."""
        if len(self._sketch):
            return
        self.whole = float((norms_of(gradients) ** 2).sum())
        if self.mark:
            self.mark["whole"] = self.whole


def _sample_of(mark: Mark) -> NoiseSample | None:
    if mark.get("whole") is None:
        return None
    return sample_of_means(mark["mean"], mark["whole"] / mark["divisor"], mark["total"], mark["parts"])


def facts_of(optimizer: torch.optim.Optimizer, batch: float, noise: Interval | None) -> Facts:
    """Return what is known of a run that may harm its convergence."""
    options = None
    share, owed = None, 0.0
    if isinstance(optimizer, Distributed):
        setup = setup_of(optimizer)
        options = None if setup is None else setup.options
        share = optimizer.share_of_batch
        owed = optimizer.residual_norm() if options is not None and options.is_lossy else 0.0
    stages = stages_of(optimizer)
    precision: Any = stages.find("unscale")
    first = optimizer.param_groups[0]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    gradients = [each.grad for each in parameters if each.grad is not None]
    return Facts(
        batch=batch,
        noise=noise,
        lag=int(stages.find("lag") is not None),
        momentum=float(first.get("momentum", 0.0)),
        wire=None if options is None else options.wire,
        has_feedback=options is not None and options.error_feedback,
        owed=owed,
        gradient=square_of(parameters, gradients) ** 0.5,
        shares=None if share is None else (share.least, -(-share.total // share.ranks)),
        steps=0 if precision is None else precision.whole.steps,
        skipped=0 if precision is None else precision.whole.skipped,
    )


def noise_scale(
    optimizer: torch.optim.Optimizer,
    *,
    samples: int | None = None,
    every: int = 10,
    window: int = 1000,
    warns: bool = True,
) -> NoiseWatch:
    """Measure the gradient noise scale of `optimizer`'s steps; return what tells it.

        noise = mt.noise_scale(optimizer)
        ...
        mt.print_once(noise.report())
        if len(noise) >= 8:
            mt.print_once(noise.advise(learning_rate=0.1))

    It takes the squared norms of each rank's gradient and of their average, and one small sum. On one rank call
    `noise.part(samples)` after each of two or more backwards that make a step.

    Args:
        optimizer: a DistributedOptimizer, or any on one rank.
        samples: this rank's in each step; a loader of `distribute` knows.
        every: steps from one measurement to the next.
        window: measurements that an answer is from.
        warns: whether to warn, once each, of what may harm convergence (`multiring.convergence.convergence_concerns`).

    Raises:
        ArgumentError: a number out of range.
        StateError: it is measured already.
    """
    if every < 1 or (samples is not None and samples < 1):
        raise ArgumentError(f"noise_scale(samples={samples!r}, every={every!r}): want 1 or more")
    found = NoiseWatch(optimizer, samples, every, window=window, warns=warns)
    stages_of(optimizer).add(found)
    return found
