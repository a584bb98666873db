"""Models whose gradients are shared, and the reference values for them."""

from collections.abc import Callable
from typing import Any

import torch
from tests.support.plain import loss_of, mean_gradients, network
from torch import nn

import multiring.torch as mt

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}


kept: list[torch.optim.Optimizer] = []


def sgd(model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept.append(optimizer)  # gradients are shared as long as the optimizer lives
    return mt.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def expect(model: nn.Module, seeds: list[int], make: Callable[[], nn.Module] = network, scale: float = 1.0) -> None:
    """Compare gradients with `scale` times the mean gradient over `seeds`."""
    wanted = mean_gradients(make, [lambda model, seed=seed: loss_of(model, seed) for seed in seeds])  # type: ignore[misc]
    for (name, parameter), mean in zip(model.named_parameters(), wanted, strict=True):
        assert parameter.grad is not None, name
        bound = BOUNDS[parameter.dtype] * float(mean.abs().max() * scale)
        assert torch.allclose(parameter.grad, mean * scale, rtol=0, atol=bound), name


def expect_same_parameters(model: nn.Module) -> None:
    for parameter in model.parameters():
        lowest, highest = mt.allreduce(parameter.detach(), op="min"), mt.allreduce(parameter.detach(), op="max")
        assert torch.equal(lowest, highest)
