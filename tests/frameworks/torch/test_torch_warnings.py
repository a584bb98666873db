"""Runs that will converge badly get one warning each; healthy runs get none."""

import math
import warnings
from typing import Any

import torch
from tests.support.plain import join
from tests.support.ranks import Here, run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import multiring.torch as mt
from multiring._gradients.loss_scale import LossScale

WIDTH, SAMPLES = 40, 4
HEALTHY = 10  # two of each kind


def test_six_sick_runs_are_named_once() -> None:
    for told in run_ranks(be_ill, 3):
        for kind, words in told.items():
            assert len(words) == 1, (kind, words)
            assert words[0].startswith(f"convergence: {kind}: "), (kind, words)
        assert list(told) == ["batch", "lag", "compression", "residual", "uneven ranks", "overflow"]


def be_ill(here: Here) -> dict[str, list[str]]:
    join(here, check_first_steps=False)  # avoids warnings about equal samples
    int8 = mt.Compression.int8
    return {
        "batch": told(here, 0, noise=0.02),
        "lag": told(here, 1, momentum=0.9, lag=1),
        "compression": told(here, 2, compression=int8),
        "residual": told(here, 3, compression=mt.PowerSGD(rank=1), is_square=True),
        "uneven ranks": told(here, 4, batch=2),
        "overflow": told(here, 5, steps=128, overflows=0.3),
    }


def test_healthy_runs_are_not_warned_of() -> None:
    for told in run_ranks(be_well, 2):
        assert told == [[]] * HEALTHY


def be_well(here: Here) -> list[list[str]]:
    join(here, check_first_steps=False)  # avoids warnings about equal samples
    wires: list[dict[str, Any]] = [
        {},
        {"compression": mt.Compression.bf16},
        {"compression": mt.Compression.int8, "error_feedback": True},
        {"momentum": 0.3, "lag": 1},
        {"overflows": 0.03, "steps": 112, "momentum": 0.9},
    ]
    return [told(here, 100 + number, **wires[number % len(wires)]) for number in range(HEALTHY)]


def told(  # noqa: PLR0913 -- one parameter for each kind of run
    here: Here,
    seed: int,
    *,
    steps: int = 48,
    noise: float = 2.0,
    batch: int = 0,
    momentum: float = 0.0,
    lag: int = 0,
    overflows: float = 0.0,
    is_square: bool = False,
    **options: Any,
) -> list[str]:
    """Train a linear function of slope 0.5 with noise; return the warnings.

    Args:
        here: this rank.
        seed: the seed of the samples.
        steps: the number of steps.
        noise: the standard deviation of a sample's gradient.
        batch: the batch size of a loader that deals samples unevenly; 0 for equal parts.
        momentum: SGD's momentum.
        lag: the gradient lag.
        overflows: the share of steps that overflow.
        is_square: whether the gradient is a matrix with equal singular values, of which rank-1 factors send one.
        options: options of the DistributedOptimizer.
    """
    generator = torch.Generator().manual_seed(1000 * seed + here.rank)
    shape = (WIDTH, WIDTH) if is_square else (WIDTH,)
    weight = nn.Linear(WIDTH, 1, bias=False) if batch else nn.Module()
    if not batch:
        weight.register_parameter("weight", nn.Parameter(torch.zeros(shape)))
    optimizer: Any = torch.optim.SGD(weight.parameters(), 1e-3, momentum)
    batches: Any = None
    if batch:
        data = TensorDataset(0.5 + noise * torch.randn(batch * steps, WIDTH))
        weight, optimizer, batches = mt.distribute(weight, optimizer, DataLoader(data, batch))
        batches = iter(batches)
    else:
        optimizer = mt.DistributedOptimizer(optimizer, weight.named_parameters(), **options)
    mt.gradient_lag(optimizer, lag)
    watch = mt.noise_scale(optimizer, samples=None if batch else SAMPLES, every=1)
    precision = mt.mixed_precision(optimizer, "fp16", scale=LossScale(scale=2.0**40)) if overflows else None
    chosen = torch.Generator().manual_seed(seed)  # the same on all ranks
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(steps):
            optimizer.zero_grad()
            bad = float(torch.rand((), generator=chosen)) < overflows
            loss = _loss(weight, batches, noise, generator)
            loss = loss * (math.inf if bad else 1.0)
            if precision is not None:
                precision.backward(loss)
            else:
                torch.autograd.backward(loss)
            optimizer.step()
    assert len(watch) > 0
    return [str(each.message) for each in seen]


def _loss(weight: nn.Module, batches: Any, noise: float, generator: torch.Generator) -> Tensor:
    if batches is not None:
        (samples,) = next(batches)
        outputs: Tensor = weight(samples)
        return outputs.mean() if len(samples) else outputs.sum()
    parameter = weight.get_parameter("weight")
    if parameter.dim() == 2:
        return (parameter * torch.eye(WIDTH)).sum()
    slopes = 0.5 + noise * torch.randn(SAMPLES, WIDTH, generator=generator)
    return (slopes @ parameter).mean()
