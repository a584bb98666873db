"""A program's default device is for its own tensors: those that multiring makes for itself stay in host memory."""

from typing import Any

import pytest
import torch
from tests.support import plain
from tests.support.ranks import Here, run_ranks
from torch import nn

import multiring.torch as mt


def train(here: Here, helper: str) -> list[float]:
    """Return the losses of a training while the default device is one whose tensors have no values."""
    plain.join(here)
    torch.manual_seed(1)
    bag: Any = nn.EmbeddingBag(10, 6, sparse=helper == "sparse")  # typed Any, because torch has no type of its call
    model = nn.Sequential(bag, nn.ReLU(), nn.Linear(6, 3))
    inputs, targets = torch.randint(10, (8, 8, 4)), torch.randn(8, 8, 3)
    ones = torch.ones(3)
    torch.set_default_device("meta")
    parameters: Any = model.parameters()
    optimizers: dict[str, Any] = {
        "lamb": lambda: mt.LAMB(parameters, lr=0.01),
        "lars": lambda: mt.LARS(parameters, lr=0.1),
        "muon": lambda: mt.Muon([each for each in parameters if each.dim() > 1], lr=0.02),
        "shampoo": lambda: mt.Shampoo(parameters, eigendecomposition=mt.Eigendecomposition(frequency=3)),
    }
    optimizer = optimizers.get(helper, lambda: torch.optim.SGD(parameters, lr=0.1))()
    options: dict[str, dict[str, Any]] = {
        "int8": {"compression": "int8", "error_feedback": True},
        "powersgd": {"compression": mt.PowerSGD(rank=1)},
        "adasum": {"op": mt.Adasum},
    }
    named = None if helper == "muon" else model.named_parameters()
    optimizer = mt.DistributedOptimizer(optimizer, named, **options.get(helper, {}))
    precision = mt.mixed_precision(optimizer, "fp16") if helper == "fp16" else None
    lag = mt.gradient_lag(optimizer) if helper == "lag" else None
    if helper == "larc":
        mt.LARC(optimizer)
    if helper == "clip":
        mt.clip_gradients(optimizer, 0.5)
    if helper == "noise":
        mt.noise_scale(optimizer, samples=8, every=2, warns=False)
    if helper == "average":
        mt.moving_average(optimizer, model, 0.9)
    losses = []
    for step in range(8):
        optimizer.zero_grad()
        loss: Any = (model(inputs[step]) - targets[step]).square().mean()
        loss.backward() if precision is None else precision.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    if lag is not None:
        lag.flush()
    assert mt.allreduce(ones, op=mt.Sum).tolist() == [here.size] * 3
    assert mt.allgather(ones).shape == (3 * here.size,)
    assert mt.broadcast_object({"losses": losses}) is not None
    assert mt.mean({"loss": losses[-1]})["loss"] > 0
    return losses


HELPERS = [
    "plain",
    "lamb",
    "lars",
    "muon",
    "shampoo",
    "larc",
    "int8",
    "powersgd",
    "adasum",
    "fp16",
    "lag",
    "clip",
    "noise",
    "average",
    "sparse",
]


@pytest.mark.parametrize("helper", [*HELPERS, "average", "sparse"])
def test_training(helper: str) -> None:
    for losses in run_ranks(train, 2, helper):
        assert len(losses) == 8
        assert losses[-1] < 3
