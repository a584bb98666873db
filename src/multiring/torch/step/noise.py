"""The noise scale of a training run, measured while it trains; see `multiring.convergence.noise_scale`."""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from multiring._arguments import require_flag, require_whole
from multiring._former_names import refuse
from multiring._frontend.errors import internal_errors
from multiring._runtime import Group
from multiring._steps.step_counters import STEPS
from multiring.convergence.adascale import AdaScale
from multiring.convergence.convergence_concerns import Facts, concerns
from multiring.convergence.critical_batch import Advice, recommend_batch_size
from multiring.convergence.noise_scale import ConfidenceInterval, NoiseSample, NoiseScale, sample_of_means
from multiring.data import Share
from multiring.errors import ArgumentError, StateError
from multiring.torch.gradients.device_buckets import on_host
from multiring.torch.gradients.distributed import Distributed, setup_of
from multiring.torch.step.gradients import norms_of, square_of
from multiring.torch.step.stages import Mark, StepContext, stages_of

_FEW = 8  # measurements without which no noise scale is shown
_SKETCH = 4096  # the size of a sketch; norms then have an independent error of 2 % at each measurement


class NoiseWatch:
    """Measure the noise scale every few steps; see `noise_scale`."""

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
        self._observation: _Observation | None = None  # of the current step, if it is measured
        self._parts: list[tuple[float, int]] = []  # micro-batches of one rank: squared norm, number of samples
        self._before: list[Tensor] = []
        self._batch = 0.0
        self._measured = 0  # the number of measurements, including gradients that are not finite
        self._said: set[str] = set()
        self._adascale: AdaScale | None = None
        self._begin()

    def begin_adascale(self, scale: float, batch: int) -> AdaScale:
        """Return an AdaScale that receives each measurement from now on."""
        if self._every != 1:
            raise ArgumentError(
                f"AdaScale needs a noise scale of each step, not of every {self._every} steps: use noise_scale(every=1)"
            )
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
        """The number of samples of the last measured step."""
        return self._batch

    def interval(self, level: float = 0.95) -> ConfidenceInterval:
        """Return the noise scale with its confidence interval; see `NoiseScale.interval`."""
        return self._known.interval(level)

    def critical(self, batch: float) -> float:
        """Return the critical batch of the run so far, over the window; see `NoiseScale.progress_mean`."""
        return self._known.progress_mean(batch)

    def report(self) -> str:
        """Return a line of text with the noise scale, or with the number of measurements that it needs."""
        if len(self._known) < _FEW:
            return f"noise scale: {len(self._known)} of at least {_FEW} measurements; a longer run is needed"
        left = self._known.steps_needed()
        more = "" if left == 0 else ", too noisy yet" if left < 0 else f", to 25 % in {left * self._every} more steps"
        return f"noise scale {self.interval()} at batch {self._batch:,.0f}{more}"

    if not TYPE_CHECKING:  # otherwise mypy would accept every name

        def __getattr__(self, name: str) -> NoReturn:
            """Raise an error with the current name if `name` is a former name."""
            refuse("NoiseWatch", name)

    def recommend_batch_size(self, **known: Any) -> Advice:
        """Return `multiring.convergence.recommend_batch_size` for the measurements here.

        Args:
            known: its other arguments.

        Raises:
            StateError: there are too few measurements, or they give no finite noise scale yet.
        """
        if "critical" not in known and not 0 < self.value < float("inf"):
            raise StateError(
                f"noise.recommend_batch_size: no finite noise scale yet ({self.report()}); measure more steps first"
            )
        return recommend_batch_size(**{"critical": self.value, "batch": round(self._batch), **known})

    def part(self, samples: int) -> None:
        """On a single rank, record that a backward has added a micro-batch of `samples` samples.

        Call this after each backward of a step. Each micro-batch is weighted by its share of the step's samples.
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
        """Return the measurement of the new gradients, if this step is measured.

        With gradient lag, the norm of the reduced gradients is added to the mark later.
        """
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
        """Add the measurement of the gradients that this step applies."""
        mark = step.marks.get(self.name) or {}
        sample = _sample_of(mark)
        if sample is not None:
            self._batch = mark["batch"]
            self._known.add(sample)
            if self._adascale is not None:
                self._adascale.add(sample)
            self._measured += 1
            if STEPS.is_read and STEPS.wants_metrics and len(self._known) >= _FEW:
                STEPS.keep("noise_scale", self.value)
            if self._warns and self._measured % 16 == 0:
                self._warn()

    def after(self, step: StepContext, *, applied: bool) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return the measurements."""
        adascale = None if self._adascale is None else self._adascale.state_dict()
        return {"steps": self._steps, "known": self._known.state_dict(), "adascale": adascale, "batch": self._batch}

    def load_state_dict(self, state: dict[str, Any], parameters: list[Tensor]) -> None:  # noqa: ARG002 -- as Stage
        """Restore the measurements."""
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
        """Observe the gradients of the next step, if it is to be measured."""
        setup = setup_of(self._optimizer)
        # With compression, the result of a reduction is not the mean of its inputs: errors go to the next reduction.
        is_altered = setup is not None and (setup.options.is_lossy or setup.options.translates)
        self._observation = _Observation(_SKETCH if is_altered else 0, self._steps) if self._is_due() else None
        self._parts, self._before = [], []
        if isinstance(self._optimizer, Distributed):
            self._optimizer.watch(self._observation)

    def _of_parts(self, step: StepContext) -> Mark | None:
        if len(self._parts) < 2:
            return None
        total = float(sum(samples for _, samples in self._parts))
        # Each part's gradient is weighted by the part's share of the samples.
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
            return None  # the batches differ in size, or a batch is missing: the sum of their means is not a mean
        share = None
        if shares:
            samples, total, least = (
                sum(getattr(each, name) for each in shares) for name in ("samples", "total", "least")
            )
            share = Share(samples=samples, total=total, ranks=shares[0].ranks, least=least)
        own = self._samples if share is None else share.samples
        if own is None:
            raise StateError(
                "noise_scale: the number of samples of a step is not known; make the loader by mt.distribute, or pass "
                "samples=, the number on this rank"
            )
        is_sum = setup is not None and setup.options.op == "sum"
        # The rank's gradient is this factor times the mean gradient of the rank's samples.
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
        # For means over different numbers of samples, use the harmonic mean of these numbers.
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
    """The norms of one step's gradients, observed before and after the reduction.

    If compression changes the sum of the gradients, the norms are computed from sketches. The sketch of g is S g, a
    vector of a few thousand numbers. Each element of g is added to one element of S g with a random sign, which is the
    same on all ranks. Then E |S g|^2 = |g|^2. The sketch of a mean is the mean of the sketches, and sketches are small
    enough to be summed without compression.

    Source: Charikar, Chen & Farach-Colton, "Finding frequent items in data streams", ICALP 2002.
    """

    def __init__(self, sketched: int, seed: int) -> None:
        self.has_begun = False
        self._own = 0.0
        self.whole: float | None = None  # the squared norm of the reduced gradients, once it is known
        self.mark: Mark = {}  # the measurement that needs `whole`
        self._seed = seed
        self._signs = torch.Generator("cpu")
        self._sketch = torch.zeros(sketched, dtype=torch.float64, device="cpu")

    @property
    def sketch(self) -> NDArray[np.float64]:
        """The sketch of this rank's gradients; empty if the norms are computed without sketches."""
        found: NDArray[np.float64] = self._sketch.numpy()
        return found

    @property
    def own(self) -> float:
        """The squared norm of this rank's gradients."""
        return float(self._sketch.square().sum()) if len(self._sketch) else self._own

    def begin(self) -> None:
        """Start to observe a reduction."""
        self.has_begun, self._own, self.whole = True, 0.0, None
        self._sketch.zero_()
        self._signs.manual_seed(self._seed)

    def see_own(self, gradients: Sequence[Tensor]) -> None:
        """Add some of this rank's gradients to the norm or the sketch."""
        if not len(self._sketch):
            self._own += float((norms_of(gradients) ** 2).sum())
            return
        width = len(self._sketch)
        for each in on_host(gradients):
            flat = nn.functional.pad(each.reshape(-1), (0, -each.numel() % width))
            signs = torch.randint(0, 2, flat.shape, generator=self._signs, dtype=torch.int8).mul_(2).sub_(1)
            self._sketch += (flat * signs).view(-1, width).sum(0)

    def see_whole(self, gradients: Sequence[Tensor]) -> None:
        """Compute the norm of the reduced gradients."""
        if len(self._sketch):
            return
        self.whole = float((norms_of(gradients) ** 2).sum())
        if self.mark:
            self.mark["whole"] = self.whole


def _sample_of(mark: Mark) -> NoiseSample | None:
    if mark.get("whole") is None:
        return None
    return sample_of_means(mark["mean"], mark["whole"] / mark["divisor"], mark["total"], mark["parts"])


def facts_of(optimizer: torch.optim.Optimizer, batch: float, noise: ConfidenceInterval | None) -> Facts:
    """Return the facts of a run that its convergence depends on."""
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
    """Measure the gradient noise scale of `optimizer`'s steps.

        noise = mt.noise_scale(optimizer)
        ...
        mt.print_once(noise.report())
        if len(noise) >= 8:
            mt.print_once(noise.recommend_batch_size(learning_rate=0.1))

    The returned object reports the noise scale. A measurement computes the squared norms of each rank's gradient and of
    the average gradient, and sums a few numbers over the ranks. On a single rank, each step needs two or more
    backwards; call `noise.part(samples)` after each.

    Args:
        optimizer: a DistributedOptimizer; on a single rank, any optimizer.
        samples: the number of this rank's samples in each step; not needed with a loader of `distribute`.
        every: the number of steps from one measurement to the next.
        window: the number of most recent measurements that a result uses.
        warns: whether to warn, once for each kind, of settings that may harm convergence
            (`multiring.convergence.convergence_concerns`).

    Raises:
        ArgumentError: a number is out of range.
        StateError: the optimizer's noise scale is measured already.
    """
    samples = None if samples is None else require_whole("noise_scale: samples", samples, 1)
    every, window = require_whole("noise_scale: every", every, 1), require_whole("noise_scale: window", window, 2)
    warns = require_flag("noise_scale: warns", warns)
    found = NoiseWatch(optimizer, samples, every, window=window, warns=warns)
    stages_of(optimizer).add(found)
    return found
