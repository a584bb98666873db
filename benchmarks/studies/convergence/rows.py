"""Compare ways to train in tables, one row for each way.

Each row has its own sweep of the learning rate, then ten runs with other seeds at the best rate.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from benchmarks.studies.convergence.record import OutOfTimeError, Record
from benchmarks.studies.convergence.tasks import Stream, deep_network, evaluated, network, small_resnet
from torch import nn
from torch.nn.functional import cross_entropy

import multiring.torch as mt
from multiring._gradients.loss_scale import LossScale
from multiring.convergence import Constant, Polynomial, Warmup
from multiring.errors import StateError

SWEEP_SEEDS = (100, 101)
SEEDS = tuple(range(10))
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
TESTED = 20_480
UNFINISHED = "not complete"
STUDENT = 2.262  # Student's t for nine degrees of freedom, 95 %


@dataclass(frozen=True, slots=True)
class Row:
    """A way to train.

    Attributes:
        name: The name of the row.
        make: Creates the optimizer from a model and a rate.
        rate: The middle of the swept rates.
        batch: The number of samples per step.
        warms_up: Whether the rate rises over the first tenth of the steps.
        clip: The norm to which gradients are clipped; 0 for no clipping.
        lag: The gradient lag in steps.
        dtype: The arithmetic's precision.
        scale: The loss scale for "fp16".
        sweeps: Whether the rate is swept. Otherwise `rate` is used.
        shrink: A factor for the loss; the rate is divided by it. A power of two changes nothing in float32.
    """

    name: str
    make: Callable[[nn.Module, float], torch.optim.Optimizer]
    rate: float
    batch: int
    warms_up: bool = False
    clip: float = 0.0
    lag: int = 0
    dtype: str = "float32"
    scale: float = 65536.0
    sweeps: bool = True
    shrink: float = 1.0


def train(row: Row, model_of: Callable[[int], nn.Module], samples: int, rate: float, seed: int) -> dict[str, Any]:
    """Train on `samples` images; return the accuracy on 20,480 test images.

    A run that diverged gets the accuracy of a random guess.
    """
    torch.set_num_threads(1)
    source, model = Stream(seed), model_of(seed)
    optimizer = row.make(model, rate / row.shrink)
    steps = samples // row.batch
    lag = mt.gradient_lag(optimizer, row.lag)
    # The rate falls to zero, so the comparison does not depend on the noise of the last steps.
    rule = Polynomial(steps, 1.0) * (Warmup(steps // 10) if row.warms_up else Constant())
    mt.schedule_learning_rate(optimizer, rule)
    if row.clip:
        mt.clip_gradients(optimizer, row.clip)
    scale = LossScale(scale=row.scale, patience=200, least=2.0**-30) if row.dtype == "fp16" else None
    if row.scale == 1.0:
        scale = LossScale(scale=1.0, growth=1.0, least=2.0**-30)
    precision = mt.mixed_precision(optimizer, row.dtype, scale=scale)
    try:
        for _ in range(steps):
            images, labels = source.batch(row.batch)
            optimizer.zero_grad()
            with precision.autocast():
                outputs = model(images)
            precision.backward(row.shrink * cross_entropy(outputs.float(), labels))
            optimizer.step()
        lag.flush()
    except StateError as error:  # raised for a step with a gradient that is not finite
        return {"accuracy": 0.1, "loss": None, "diverged": str(error)[:60]}
    loss, accuracy = evaluated(model, *Stream(999).batch(TESTED))
    return {"accuracy": accuracy, "loss": loss if math.isfinite(loss) else None, "skipped": precision.skipped}


def accuracies(
    record: Record, row: Row, model_of: Callable[[int], nn.Module], samples: int
) -> tuple[float, bool, list[float]]:
    """Return the best rate, whether it is at the sweep's edge, and ten accuracies.

    The edges of the sweep are its lowest and its highest rate.
    """
    best, is_edge = row.rate, False
    if row.sweeps:
        mean = {
            factor: statistics.mean(
                record.run(
                    f"{row.name} x{factor} seed {seed}",
                    partial(train, row, model_of, samples, factor * row.rate, seed),
                )["accuracy"]
                for seed in SWEEP_SEEDS
            )
            for factor in FACTORS
        }
        factor = max(mean, key=lambda each: mean[each])
        best, is_edge = factor * row.rate, factor in {FACTORS[0], FACTORS[-1]}
    found = [
        record.run(f"{row.name} seed {seed}", partial(train, row, model_of, samples, best, seed))["accuracy"]
        for seed in SEEDS
    ]
    return best, is_edge, found


def table(record: Record, rows: Sequence[Row], model_of: Callable[[int], nn.Module], samples: int) -> str:
    """Return a table that compares the rows with the first row, seed by seed."""
    lines = ["| | batch | rate | accuracy | less than the first row, points, 95 % |", "|---|---|---|---|---|"]
    first: list[float] = []
    missing = 0
    for row in rows:
        try:
            rate, is_edge, found = accuracies(record, row, model_of, samples)
        except OutOfTimeError:
            missing += 1
            lines.append(f"| {row.name} | {row.batch} | | not complete | |")
            continue
        first = first or found
        behind = [100 * (one - other) for one, other in zip(first, found, strict=True)]
        half = STUDENT * statistics.stdev(behind) / math.sqrt(len(behind)) if row is not rows[0] else 0.0
        mean = statistics.mean(behind)
        edge = " (edge)" if is_edge else ""
        lines.append(
            f"| {row.name} | {row.batch} | {rate:.3g}{edge} | {100 * statistics.mean(found):.2f} % | "
            f"{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f}) |"
        )
    lines += ["", f"- {len(record)} runs of {samples:,} samples, {record.seconds / 60:.1f} minutes of one thread"]
    if missing:
        lines.append(f"- {UNFINISHED}: {missing} of {len(rows)} rows")
    return "\n".join(lines)


# ---- the tables ----


def _sgd(model: nn.Module, rate: float, momentum: float = 0.0, *, nesterov: bool = False) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), rate, momentum, nesterov=nesterov)


def _adam(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), rate)


def _lars(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return mt.LARS(mt.parameter_groups(model, weight_decay=1e-4), rate, trust_coefficient=0.02)


def _lamb(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return mt.LAMB(mt.parameter_groups(model, weight_decay=1e-4), rate)


class _Both(torch.optim.Optimizer):
    """Muon for the inner matrices and Adam for the other parameters, as one optimizer.

    The inner matrices are those between the first and the last layer. Adam's rate is a tenth of Muon's.
    """

    def __init__(self, model: nn.Module, rate: float) -> None:
        parameters = list(model.parameters())
        inner = [each for each in parameters if each.dim() >= 2][1:-1]
        ids = {id(each) for each in inner}
        rest = [each for each in parameters if id(each) not in ids]
        super().__init__([{"params": inner}, {"params": rest}], {"lr": rate})
        self._muon = mt.Muon(inner, rate, weight_decay=0.0)
        self._adam = torch.optim.Adam(rest, 0.1 * rate)

    def step(self, closure: Any = None) -> Any:
        """Step both optimizers, at the rate that the schedule has set."""
        self._muon.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        self._adam.param_groups[0]["lr"] = 0.1 * self.param_groups[1]["lr"]
        self._muon.step()
        self._adam.step()
        return closure


def lag_rows() -> list[Row]:
    """Return rows with gradient lag 0 and 1 for each optimizer."""
    rows = []
    for momentum in (0.0, 0.5, 0.9):
        for lag in (0, 1):
            make = partial(_sgd, momentum=momentum)
            rows.append(Row(f"SGD momentum {momentum} lag {lag}", make, 0.4 * (1 - momentum), 128, lag=lag))
    rows += [Row(f"Adam lag {lag}", _adam, 0.003, 128, lag=lag) for lag in (0, 1)]
    return rows


def scaling_rows(base_rate: float, base: int = 16) -> list[Row]:
    """Return a row with a small batch, and rows with a 16 times larger batch.

    The rows with plain scaling are not swept.
    """
    large, nesterov = 16 * base, partial(_sgd, momentum=0.9, nesterov=True)
    plain = partial(_sgd, momentum=0.9)
    return [
        Row("small batch", plain, base_rate, base),
        Row("linear scaling", plain, 16 * base_rate, large, sweeps=False),
        Row("+ warm-up", plain, 16 * base_rate, large, warms_up=True, sweeps=False),
        Row("+ clip", plain, 16 * base_rate, large, warms_up=True, clip=1.0, sweeps=False),
        Row("tuned Nesterov", nesterov, 8 * base_rate, large, warms_up=True, clip=1.0),
        Row("tuned Adam", _adam, 0.003, large, warms_up=True),
        Row("LARS", _lars, 0.25, large, warms_up=True),
        Row("LAMB", _lamb, 0.02, large, warms_up=True),
        Row("Muon", _Both, 0.02, large, warms_up=True),
    ]


def precision_rows() -> list[Row]:
    """Return rows for float32, bf16, and fp16 with a loss scale."""
    make = partial(_sgd, momentum=0.9)
    kinds = (("float32", "float32", 65536.0), ("bf16", "bf16", 65536.0), ("fp16", "fp16", 65536.0))
    return [Row(name, make, 0.04, 128, dtype=dtype, scale=scale, sweeps=False) for name, dtype, scale in kinds]


def control_rows() -> list[Row]:
    """Return rows with gradients as small as a large network's.

    They compare fp16 with and without a loss scale.
    """
    make, small = partial(_sgd, momentum=0.9), 2.0**-14
    return [
        Row("float32", make, 0.04, 128, sweeps=False, shrink=small),
        Row("fp16", make, 0.04, 128, dtype="fp16", sweeps=False, shrink=small),
        Row("fp16 without a scale", make, 0.04, 128, dtype="fp16", scale=1.0, sweeps=False, shrink=small),
        Row("fp16, 2^-20", make, 0.04, 128, dtype="fp16", sweeps=False, shrink=small / 64),
        Row("fp16 without a scale, 2^-20", make, 0.04, 128, dtype="fp16", scale=1.0, sweeps=False, shrink=small / 64),
    ]


def higher_rows(base_rate: float = 0.003, base: int = 16) -> list[Row]:
    """Return rows of scaling-deep with higher rates, and a row for Adam with clipping.

    In the first sweep, the best rate of these rows was the highest of the five.
    """
    large = 16 * base
    nesterov = partial(_sgd, momentum=0.9, nesterov=True)
    return [
        Row("small batch", partial(_sgd, momentum=0.9), base_rate, base, sweeps=False),
        Row("tuned Nesterov", nesterov, 32 * base_rate, large, warms_up=True, clip=1.0),
        Row("tuned Adam", _adam, 0.012, large, warms_up=True),
        Row("tuned Adam + clip", _adam, 0.012, large, warms_up=True, clip=1.0),
    ]


def higher_lag_rows() -> list[Row]:
    """Return rows with lag 0 and 1 for momentum 0.9 and for Adam, at higher rates.

    The rates are up to 16 times those of `lag_rows`.
    """
    heavy = partial(_sgd, momentum=0.9)
    rows = [Row(f"SGD momentum 0.9 lag {lag}", heavy, 0.64, 128, lag=lag) for lag in (0, 1)]
    return rows + [Row(f"Adam lag {lag}", _adam, 0.048, 128, lag=lag) for lag in (0, 1)]


TABLES: dict[str, Callable[[Record], str]] = {
    "lag": lambda record: table(record, lag_rows(), network, 128_000),
    "scaling-deep": lambda record: _scaling(record, deep_network, 0.003),
    "scaling-resnet": lambda record: _scaling(record, small_resnet, 0.01),
    "scaling-higher": lambda record: table(record, higher_rows(), deep_network, 80_000),
    "lag-higher": lambda record: table(record, higher_lag_rows(), network, 64_000),
    "sixteen-control": lambda record: table(record, control_rows(), network, 64_000),
    "sixteen-bits": lambda record: table(record, precision_rows(), network, 200_000),
}


def _scaling(record: Record, model_of: Callable[[int], nn.Module], rate: float) -> str:
    """Return the table of scaling.

    Linear scaling multiplies the best rate of the small batch.
    """
    best, _, _ = accuracies(record, Row("small batch", partial(_sgd, momentum=0.9), rate, 16), model_of, 80_000)
    rows = scaling_rows(best)
    rows[0] = Row("small batch", partial(_sgd, momentum=0.9), rate, 16)
    return table(record, rows, model_of, 80_000)
