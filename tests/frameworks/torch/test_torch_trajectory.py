"""N ranks with one global batch follow one process with plain torch."""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.support.plain import backward, join, network, samples
from tests.support.ranks import Here, run_ranks
from torch import Tensor, nn

import multiring.torch as mt

STEPS, BATCH = 50, 24
BOUNDS = {"float64": 1e-10, "float32": 1e-4}


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The losses on the whole batch before each step, and the final parameters."""

    losses: NDArray[np.float64]
    parameters: NDArray[np.float64]


def trained(dtype: str, rank: int, size: int, op: str, weights: str) -> Trajectory:
    """Train on this rank's share of each batch; `size` 1 means plain torch."""
    kind = getattr(torch, dtype)
    model = network(kind, seed=0 if size == 1 else 100 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)
    if size > 1:
        if rank == 0:
            model.load_state_dict(network(kind).state_dict())
        mt.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = mt.DistributedOptimizer(optimizer, model.named_parameters(), op=op, bucket_bytes=512)
    losses = []
    for step in range(STEPS):
        images, labels = samples(step % 5, BATCH + step % 2, kind)
        errors = nn.functional.cross_entropy(model(images), labels, reduction="none")
        losses.append(errors.detach().mean())
        own = nn.functional.cross_entropy(model(images[rank::size]), labels[rank::size], reduction="sum")
        shard = len(images) / size if weights == "equal shards" else len(images)
        optimizer.zero_grad()
        backward(own / shard)
        optimizer.step()
    return trajectory(model, losses)


def trajectory(model: nn.Module, losses: list[Tensor]) -> Trajectory:
    parameters = torch.cat([each.detach().flatten() for each in model.parameters()])
    return Trajectory(torch.stack(losses).double().numpy(), parameters.double().numpy())


def train_ranks(here: Here, dtype: str, op: str, weights: str) -> Trajectory:
    join(here)
    return trained(dtype, here.rank, here.size, op, weights)


@functools.cache
def single(dtype: str) -> Trajectory:
    torch.set_num_threads(1)
    return trained(dtype, 0, 1, "none", "whole batch")


def deviation(one: Trajectory, other: Trajectory) -> float:
    """Return the largest relative distance between two trajectories.

    Losses are relative to the other losses, and parameters to the largest parameter.
    """
    losses = np.abs(one.losses - other.losses) / other.losses
    parameters = np.abs(one.parameters - other.parameters) / np.abs(other.parameters).max()
    return float(max(losses.max(), parameters.max()))


def follows(ranks: int, dtype: str, *job: Any) -> None:
    plain = single(dtype)
    assert plain.losses[-1] <= plain.losses[0] / 2
    for each in run_ranks(train_ranks, ranks, dtype, *job):
        assert deviation(each, plain) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_average_follows_single_process(ranks: int, dtype: str) -> None:
    follows(ranks, dtype, "average", "equal shards")


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sum_of_shares_follows_single_process(ranks: int, dtype: str) -> None:
    """Batches of 25 do not divide by 2, 3 or 4, so the shards are uneven."""
    follows(ranks, dtype, "sum", "whole batch")


def test_sum_taken_for_average_is_caught() -> None:
    plain = single("float32")
    for each in run_ranks(train_ranks, 2, "float32", "sum", "equal shards"):
        assert deviation(each, plain) > 100 * BOUNDS["float32"]


def test_average_of_uneven_shards_means_is_caught() -> None:
    """The bound detects that one sample in 25 weighs slightly more than the others."""
    plain = single("float64")
    for each in run_ranks(train_mean_of_means, 2):
        assert deviation(each, plain) > 100 * BOUNDS["float64"]


def train_mean_of_means(here: Here) -> Trajectory:
    join(here)
    model = network()
    optimizer = mt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8))
    losses = []
    for step in range(STEPS):
        images, labels = samples(step % 5, BATCH + step % 2)
        losses.append(nn.functional.cross_entropy(model(images), labels).detach())
        own = nn.functional.cross_entropy(model(images[here.rank :: here.size]), labels[here.rank :: here.size])
        optimizer.zero_grad()
        backward(own)
        optimizer.step()
    return trajectory(model, losses)
