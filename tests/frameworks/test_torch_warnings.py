"""Runs that will not converge well are told so once, with the reason, while they train; healthy ones are not."""

import math
import warnings
from typing import Any

import torch
from tests.frameworks.plain import join
from tests.wire.ranks import Here, run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import multiring.torch as mt
from multiring.gradients.loss_scale import LossScale

WIDTH, SAMPLES = 40, 4
HEALTHY = 20


def test_six_sick_runs_are_named_once() -> None:
    for told in run_ranks(be_ill, 3):
        for kind, words in told.items():
            assert len(words) == 1, (kind, words)
            assert words[0].startswith(f"convergence: {kind}: "), (kind, words)
        assert list(told) == ["batch", "lag", "compression", "residual", "uneven ranks", "overflow"]


def be_ill(here: Here) -> dict[str, list[str]]:
    join(here, check_first_steps=False)  # a step's samples are as seeded, on all ranks alike
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
    join(here, check_first_steps=False)  # a step's samples are as seeded, on all ranks alike
    wires: list[dict[str, Any]] = [
        {},
        {"compression": mt.Compression.bf16},
        {"compression": mt.Compression.int8, "error_feedback": True},
        {"momentum": 0.3, "lag": 1},
        {"overflows": 0.03, "steps": 112, "momentum": 0.9},
    ]
    return [told(here, 100 + number, **wires[number % len(wires)]) for number in range(HEALTHY)]


def told(  # noqa: PLR0913 -- each is what one kind is about
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
    """Return what is warned of while a plane of slope 0.5 and `noise` is trained on.

    Args:
        here: this rank.
        seed: of the samples.
        steps: how many.
        noise: the standard deviation of a sample's gradient.
        batch: of a loader that deals samples unevenly; 0 for equal parts.
        momentum: of SGD.
        lag: of gradients.
        overflows: the part of steps that do.
        is_square: whether the gradient is a matrix whose singular values are alike, of which factors send the first.
        options: of the DistributedOptimizer.
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
