"""`accumulate`: several batches per step, as in a hand-written loop."""

import itertools
from typing import Any

import pytest
import torch
from tests.support.distribute_cases import data, seed
from tests.support.distribute_cases import network as classifier
from tests.support.plain import backward, join
from tests.support.ranks import Here, run_ranks
from torch import nn
from torch.utils.data import DataLoader

import multiring.torch as mt
from multiring.errors import ArgumentError, StateError

BATCHES = 5  # per epoch; with two per step, the last batch is alone


def parameters_of(model: nn.Module) -> list[float]:
    return nn.utils.parameters_to_vector([each.detach() for each in model.parameters()]).tolist()


def by_hand(steps: int) -> list[float]:
    """Train for two epochs by hand; return the norms, rates and parameters."""
    seed(7)
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    found: list[float] = []
    for _ in range(2):
        for number, (points, labels) in enumerate(DataLoader(data(), 5), 1):
            backward(nn.functional.cross_entropy(model(points), labels) / steps)
            if number % steps == 0 or number == BATCHES:
                found.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
    return [*found, *map(float, scheduler.get_last_lr()), *parameters_of(model)]


def by_accumulate(way: str, steps: int) -> list[float]:
    """Train like `by_hand`, but with `accumulate`, in the given way."""
    seed(7)
    model = classifier()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader: Any = DataLoader(data(), 5)
    if way == "distribute":
        model, optimizer, loader = mt.distribute(model, optimizer, loader)
    elif way == "DistributedOptimizer":
        optimizer = mt.DistributedOptimizer(optimizer, model.named_parameters())
    accumulated = mt.accumulate(optimizer, steps)
    found: list[float] = []
    for _ in range(2):
        for number, (points, labels) in enumerate(loader, 1):
            with accumulated if way == "distribute" else accumulated(last=number == len(loader)) as completes:
                backward(nn.functional.cross_entropy(model(points), labels) / steps)
                if completes:
                    found.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
                optimizer.step()
                optimizer.zero_grad()
                if completes:
                    scheduler.step()
    assert "zero_grad" not in vars(optimizer)
    return [*found, *map(float, scheduler.get_last_lr()), *parameters_of(model)]


def train_all(here: Here, cases: list[tuple[str, int]]) -> list[list[float]]:
    join(here)
    return [by_accumulate(*case) for case in cases]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_as_by_hand(ranks: int) -> None:
    cases = list(itertools.product(["distribute", "DistributedOptimizer", "plain"], [1, 2, 4, 9]))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    wanted = {steps: by_hand(steps) for _, steps in cases}
    torch.set_num_threads(threads)
    for found in run_ranks(train_all, ranks, cases):
        for (way, steps), own in zip(cases, found, strict=True):
            assert own == pytest.approx(wanted[steps], rel=1e-9, abs=1e-12), (way, steps)


def test_what_makes_no_sense() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ArgumentError, match="want the number of batches a step"):
        mt.accumulate(optimizer, 0)
    with pytest.raises(ArgumentError, match="optimizer is a int"):
        mt.accumulate(3, 2)  # type: ignore[arg-type]
    accumulated = mt.accumulate(optimizer, 2)
    with accumulated, pytest.raises(StateError, match="are nested"), accumulated:
        pass
    step = optimizer.step
    with pytest.raises(ValueError, match="mine"), accumulated:  # the block's error passes, and `step` is restored
        raise ValueError("mine")
    assert optimizer.step == step
