"""A script with `distribute` trains as in one process, on any number of ranks."""

import itertools
from typing import Any

import pytest
import torch
from tests.support.distribute_cases import (
    CASES,
    Case,
    Curve,
    Stream,
    curve_of,
    data,
    distributed,
    forked,
    network,
    seed,
    sgd,
)
from tests.support.plain import backward, join
from tests.support.ranks import Here, run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

import multiring.torch as mt
from multiring.torch.gradients.distributed import setup_of


def near(values: list[float]) -> object:
    """Return a matcher of `values` that allows for another order of summation."""
    return pytest.approx(values, rel=1e-9, abs=1e-12)


@pytest.fixture(scope="module")
def alone() -> dict[str, Curve]:
    """Return the curves of the scripts in one process, without multiring."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = {}
    for name, case in CASES.items():
        seed(7)
        found[name] = curve_of(case)
    torch.set_num_threads(threads)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_curves_are_those_of_one_process(ranks: int, alone: dict[str, Curve]) -> None:
    """Last batches are uneven, or smaller than the number of ranks.

    All ranks but rank 0 start with other parameters and seeds.
    """
    for curves in run_ranks(train_all, ranks):
        for name, (losses, parameters) in curves.items():
            assert losses == near(alone[name][0]), name
            assert parameters == near(alone[name][1]), name


def train_all(here: Here) -> dict[str, Curve]:
    join(here)
    found = {}
    for name, case in CASES.items():
        seed(7 if here.rank == 0 else 1000 + here.rank)
        found[name] = curve_of(case, distributed(case))
    mt.shutdown()
    return found


@pytest.mark.parametrize("rule", ["linear", "sqrt", "keep"])
def test_batches_per_rank_are_one_large_batch(rule: str) -> None:
    factor = {"linear": 3.0, "sqrt": 3**0.5, "keep": 1.0}[rule]

    def quick(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1 * factor)  # type: ignore[arg-type] # parameters are iterable

    seed(7)
    losses, parameters = curve_of(Case(lambda: DataLoader(data(), 6, shuffle=True), optimizer=quick))
    for found in run_ranks(train_per_rank, 3, rule):
        assert found[0] == near(losses)
        assert found[1] == near(parameters)


def train_per_rank(here: Here, rule: str) -> Curve:
    join(here)
    seed(7)
    case = Case(
        lambda: DataLoader(data(), 2, shuffle=True),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        rules={"batch": "per_rank", "learning_rate": rule},
    )
    return curve_of(case, distributed(case))


SHARDED: dict[str, Any] = {"batch": "per_rank", "learning_rate": "keep", "sharded": True}
SIZES = (7, 4, 2)  # samples of each rank


def test_shards_of_unlike_length() -> None:
    """Each step's batch combines the ranks' shards until all shards are used up."""
    own = [data(size, seed=rank)[:] for rank, size in enumerate(SIZES)]
    steps = [
        [tuple(each[start : start + 3] for each in samples) for samples in own if len(samples[0]) > start]
        for start in range(0, max(SIZES), 3)
    ]
    batches = [tuple(torch.cat(column) for column in zip(*step, strict=True)) for step in steps]
    seed(0)
    model = network()
    optimizer = sgd(model.parameters())
    losses = []
    for points, labels in batches:
        loss = nn.functional.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
        losses.append(loss.item())
    for found in run_ranks(train_shards, 3):
        assert found == [near(losses)] * 2


def train_shards(here: Here) -> list[list[float]]:
    join(here)
    own = data(SIZES[here.rank], seed=here.rank)
    found = []
    for dataset in (own, Stream(own, SIZES[here.rank])):
        seed(0)
        model = network()
        model, optimizer, loader = mt.distribute(model, sgd(model.parameters()), DataLoader(dataset, 3), **SHARDED)
        losses = []
        for points, labels in loader:
            loss = nn.functional.cross_entropy(model(points), labels)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            losses.append(float(loader.global_loss(loss)))
        found.append(losses)
    return found


def test_samplers_that_deal_to_ranks() -> None:
    """Each pass has its own order; `set_epoch` selects an order."""
    by_rank = run_ranks(take_dealt, 2)
    passes = [sorted(itertools.chain(*parts)) for parts in zip(*by_rank, strict=True)]
    assert passes == [list(range(8))] * 4
    first, second, third, fourth = by_rank[0]
    assert first != second
    assert third == first
    assert fourth == second


def take_dealt(here: Here) -> list[list[int]]:
    join(here)
    numbers: Any = range(8)
    loader: DataLoader[Tensor] = DataLoader(numbers, 2, sampler=DistributedSampler(numbers, here.size, here.rank))
    model = network()
    _, _, taken = mt.distribute(model, sgd(model.parameters()), loader, **SHARDED)
    found = [torch.cat(list(taken)).tolist() for _ in range(2)]
    for epoch in (0, 1):
        taken.set_epoch(epoch)
        found.append(torch.cat(list(taken)).tolist())
    return found


class Seeds(Dataset[tuple[int, int]]):
    """A data set of the workers' seeds."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, int]:
        info = get_worker_info()
        assert info is not None
        assert torch.initial_seed() == info.seed
        return info.id, info.seed


def test_workers_have_seeds_of_their_own() -> None:
    """Workers' seeds differ by rank, worker and epoch, and derive from rank 0's seed.

    Rank 0's workers have the seeds of one process.
    """
    seed(3)
    alone = seeds_of(forked(Seeds()))
    by_rank = run_ranks(tell_seeds, 2)
    assert by_rank[0][0] == alone
    assert all(first == again for first, again, _ in by_rank)
    assert len({number for _, *runs in by_rank for run in runs for number in run}) == 16


def tell_seeds(here: Here) -> list[list[int]]:
    join(here)
    model = network()
    found = []
    for number in (3, 3, 4):
        seed(number)
        _, _, loader = mt.distribute(model, sgd(model.parameters()), forked(Seeds()), check=False)
        found.append(seeds_of(loader))
    return found


def seeds_of(loader: DataLoader[list[Tensor]]) -> list[int]:
    """Return the seeds of both workers in two epochs."""
    found = [sorted({tuple(pair) for batch in loader for pair in torch.stack(batch, 1).tolist()}) for _ in range(2)]
    return [number for epoch in found for _, number in epoch]


def test_what_a_loader_says_of_itself() -> None:
    assert run_ranks(describe, 2) == [[(5, 5), (10, 3), (None, 5), (5, 5)]] * 2


def describe(here: Here) -> list[tuple[int | None, int]]:
    join(here)
    found = []
    for name, rules in (
        ("shuffled", {}),
        ("shuffled", {"batch": "per_rank", "learning_rate": "keep"}),
        ("ragged", {}),
        ("stream", {}),
    ):
        model = network()
        loader: DataLoader[object] = CASES[name].loader()
        if name == "stream":
            loader = DataLoader(Sized(data()), 5)
        _, optimizer, made = mt.distribute(  # type: ignore[call-overload]
            model, sgd(model.parameters()), loader, compression="bf16", **rules
        )
        chosen = setup_of(optimizer)
        assert chosen is not None
        assert chosen.options.compression is mt.Compression.bf16
        assert made.dataset is loader.dataset
        found.append((made.global_batch_size, len(made)))
    return found


class Sized(Stream):
    def __len__(self) -> int:
        return self.count
