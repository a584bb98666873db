"""Training scripts for one process; `distribute` adapts them to several ranks."""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.support.plain import backward
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import multiring.torch as mt

FEATURES, CLASSES, SAMPLES = 6, 3, 22
Losses = list[float]
Curve = tuple[Losses, list[float]]  # the losses, and the final parameters


def data(count: int = SAMPLES, seed: int = 5) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(count, FEATURES, dtype=torch.float64, generator=generator)
    return TensorDataset(points, points[:, :CLASSES].argmax(1))


class Stream(IterableDataset[tuple[Tensor, ...]]):
    """A stream of samples. Each worker shuffles its part with its own seed."""

    def __init__(self, samples: Dataset[tuple[Tensor, ...]], count: int = SAMPLES) -> None:
        self.samples, self.count = samples, count

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        info = get_worker_info()
        part = range(self.count) if info is None else range(info.id, self.count, info.num_workers)
        order = list(part)
        if info is not None:
            random.Random(info.seed).shuffle(order)  # noqa: S311 -- no secret
        return (self.samples[index] for index in order)


class Ragged(Sampler[list[int]]):
    """Batches of different sizes, one of a single sample, drawn on demand."""

    def __iter__(self) -> Iterator[list[int]]:
        for size in (1, 4, 3, 7, 2):
            yield random.sample(range(SAMPLES), size)

    def __len__(self) -> int:
        return 5


def network(*, normalise: bool = False) -> nn.Sequential:
    hidden: list[nn.Module] = [nn.BatchNorm1d(8)] if normalise else []
    return nn.Sequential(nn.Linear(FEATURES, 8), *hidden, nn.Tanh(), nn.Linear(8, CLASSES)).double()


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02)


@dataclass(frozen=True)
class Case:
    """A training script. `rules` are its arguments for `distribute`."""

    loader: Callable[[], DataLoader[Any]]
    normalises: bool = False
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = sgd
    reduction: str = "mean"
    penalty: float = 0.0
    clip: float | None = None
    passes: int = 1  # backward passes per step
    rules: dict[str, Any] = field(default_factory=dict)


CASES = {
    "shuffled": Case(lambda: DataLoader(data(), 5, shuffle=True), penalty=0.01),
    "clipped": Case(lambda: DataLoader(data(), 5, shuffle=True), optimizer=adam, clip=0.3),
    "dropped": Case(lambda: DataLoader(data(), 5, shuffle=True, drop_last=True)),
    "summed": Case(lambda: DataLoader(data(), 5), reduction="sum", rules={"reduction": "sum"}, optimizer=adam),
    "accumulated": Case(lambda: DataLoader(data(), 5, shuffle=True), passes=2),
    "normalised": Case(lambda: DataLoader(data(23), 5, shuffle=True), normalises=True),
    "workers": Case(lambda: forked(data(), shuffle=True, persistent_workers=True)),
    "weighted": Case(
        lambda: DataLoader(data(), 4, sampler=WeightedRandomSampler([1.0 + i % 3 for i in range(SAMPLES)], 18))
    ),
    "ragged": Case(lambda: DataLoader(data(), batch_sampler=Ragged())),
    "many batches": Case(lambda: DataLoader(data(71), 1, shuffle=True)),
    "stream": Case(lambda: DataLoader(Stream(data()), 5)),
    "dropping stream": Case(lambda: DataLoader(Stream(data()), 5, drop_last=True)),
    "stream of workers": Case(lambda: forked(Stream(data()))),
}


def forked(dataset: Dataset[Any], **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, 5, num_workers=2, multiprocessing_context="fork", **options)


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)


def curve_of(case: Case, distribute: Callable[[Any, Any, Any], tuple[Any, Any, Any]] | None = None) -> Curve:
    """Train for two epochs; return the losses and the final parameters.

    With `distribute`, the loader's `global_loss` combines the losses of all ranks.
    """
    model = network(normalise=case.normalises)
    optimizer = case.optimizer(model.parameters())
    loader: Any = case.loader()
    if distribute is not None:
        model, optimizer, loader = distribute(model, optimizer, loader)
    losses = []
    for _ in range(2):
        for number, (points, labels) in enumerate(loader, 1):
            loss = nn.functional.cross_entropy(model(points), labels, reduction=case.reduction)
            if case.penalty:
                loss = loss + case.penalty * sum(parameter.square().sum() for parameter in model.parameters())
            if (number - 1) % case.passes == 0:
                optimizer.zero_grad()
            backward(loss / case.passes)
            if number % case.passes == 0 or number == len(loader):
                if case.clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), case.clip)
                optimizer.step()
            losses.append(float(loss.detach() if distribute is None else loader.global_loss(loss)))
    return losses, nn.utils.parameters_to_vector([each.detach() for each in model.parameters()]).tolist()


def distributed(case: Case) -> Callable[[Any, Any, Any], tuple[Any, Any, Any]]:
    """Return the function that prepares a script for several ranks."""

    def prepare(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> tuple[Any, Any, Any]:
        if case.normalises:
            model = mt.convert_sync_batchnorm(model)
        if case.passes > 1:
            optimizer = mt.DistributedOptimizer(
                optimizer, model.named_parameters(), backward_passes_per_step=case.passes
            )
        return mt.distribute(model, optimizer, loader, **case.rules)

    return prepare
