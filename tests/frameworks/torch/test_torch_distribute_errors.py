"""Errors of `distribute` and its loader reach all ranks, and the job continues."""

import logging
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.distribute_cases import Stream, data, network, seed, sgd
from tests.support.plain import backward, join
from tests.support.ranks import Here, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, SequentialSampler
from torch.utils.data.datapipes.iter import IterableWrapper

import multiring.torch as mt
from multiring.data import ArrayDataset
from multiring.errors import ArgumentError, MismatchError, MultiringError, StateError, UnsupportedError
from multiring.torch.distributing.options import AgreedOptions

SHARDED: dict[str, Any] = {"batch": "per_rank", "learning_rate": "keep", "sharded": True}


def made(loader: Any = None, **rules: Any) -> Any:
    model = rules.pop("model", None) or network()
    optimizer = rules.pop("optimizer", None) or sgd(model.parameters())
    return mt.distribute(model, optimizer, DataLoader(data(), 5) if loader is None else loader, **rules)[2]


def fails(kind: type[MultiringError], text: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=text):
        call()
    assert mt.allreduce(torch.ones(1)).item() == 1.0


def test_arguments() -> None:
    run_ranks(pass_wrong_arguments, 2)


class OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter(())


def pass_wrong_arguments(here: Here) -> None:
    join(here)
    dealing: Any = DistributedSampler(range(22), 2, here.rank)  # type: ignore[arg-type] # a range is no Dataset
    other: Any = DistributedSampler(range(22), 4, here.rank)  # type: ignore[arg-type]
    scheduled = sgd(network().parameters())
    torch.optim.lr_scheduler.ExponentialLR(scheduled, 0.9)
    summing = network()
    by_sum = mt.DistributedOptimizer(sgd(summing.parameters()), op=mt.Sum)
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    pipe: DataLoader[int] = DataLoader(IterableWrapper(range(9)), 3)
    wrong: list[tuple[type[MultiringError], str, Callable[[], object]]] = [
        (ArgumentError, "batch='big': want 'global' or 'per_rank'", lambda: made(batch="big")),
        (ArgumentError, "reduction=1: want 'mean' or 'sum'", lambda: made(reduction=1)),
        (ArgumentError, "sharded='yes': want False or True", lambda: made(sharded="yes")),
        (
            ArgumentError,
            "learning_rate='linear' with batch='global'.*leaves nothing to scale",
            lambda: made(learning_rate="linear"),
        ),
        (ArgumentError, "batch='per_rank' without learning_rate", lambda: made(batch="per_rank")),
        (ArgumentError, "sharded=True with batch='global'", lambda: made(sharded=True)),
        (
            StateError,
            "learning_rate='sqrt', but the optimizer already has a scheduler.* make the scheduler after `distribute`",
            lambda: made(optimizer=scheduled, batch="per_rank", learning_rate="sqrt"),
        ),
        (ArgumentError, "model is a str; want a torch.nn.Module", lambda: made(model="model", optimizer=scheduled)),
        (
            ArgumentError,
            "is a DistributedDataParallel.*want its `module`",
            lambda: made(model=wrapped, optimizer=scheduled),
        ),
        (ArgumentError, "optimizer is a str; want", lambda: made(optimizer="SGD")),
        (
            ArgumentError,
            "DistributedOptimizer with op='sum'; reduction='mean' wants op='average'",
            lambda: made(model=summing, optimizer=by_sum),
        ),
        (ArgumentError, "compression='fp7': want", lambda: made(compression="fp7")),
        (
            ArgumentError,
            "compression='bf16' for an optimizer that is already a DistributedOptimizer: give compression to",
            lambda: made(model=summing, optimizer=by_sum, reduction="sum", compression="bf16"),
        ),
        (
            MismatchError,
            "rank 0: .*compression=bf16.*; rank 1: .*=int8",
            lambda: made(compression=("bf16", "int8")[here.rank]),
        ),
        (ArgumentError, "loader is a list; want a torch.utils.data.DataLoader", lambda: made([1])),
        (UnsupportedError, "a OwnLoader, with an __iter__ of its own", lambda: made(OwnLoader(data()))),
        (UnsupportedError, "is a data pipe", lambda: made(pipe)),
        (UnsupportedError, "batch_size=None: batches that the data set makes", lambda: made(DataLoader(data(), None))),
        (UnsupportedError, "in_order=False", lambda: made(DataLoader(data(), 5, num_workers=1, in_order=False))),
        (
            ArgumentError,
            "sampler, DistributedSampler, already divides the samples among 2 ranks",
            lambda: made(DataLoader(data(), 5, sampler=dealing)),
        ),
        (
            ArgumentError,
            f"selects samples for rank {here.rank} of 4; want rank {here.rank} of 2",
            lambda: made(DataLoader(data(), 5, sampler=other), **SHARDED),
        ),
        (
            ArgumentError,
            "not a parameter of the model: make the optimizer of model.parameters()",
            lambda: made(model=network(), optimizer=sgd([*network().parameters()])),
        ),
        (
            MismatchError,
            "rank 0: .*batch_size=2.*; rank 1: .*batch_size=3",
            lambda: made(DataLoader(data(), 2 + here.rank)),
        ),
        (MismatchError, "rank 0: .*of 22 samples; rank 1: .*of 23", lambda: made(DataLoader(data(22 + here.rank), 5))),
        (MismatchError, "num_workers=1", lambda: made(DataLoader(data(), 5, num_workers=here.rank))),
        (
            ArgumentError if here.rank else MismatchError,
            "batch='x': want" if here.rank else "rank 1: failed with ArgumentError: batch='x'",
            lambda: made(batch="x" if here.rank else "global"),
        ),
        (StateError, "no batch of the loader has been handed out", lambda: made().global_loss(torch.ones(()))),
    ]
    for kind, text, call in wrong:
        fails(kind, text, call)


def test_samples() -> None:
    """Ranks have equal samples, different samples, or no samples."""
    run_ranks(pass_wrong_samples, 3)


class Shuffled(Stream):
    """A stream with a different order on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(data())
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        found = list(super().__iter__())
        return iter(found[self.rank :] + found[: self.rank])


class Same(Dataset[float]):
    """A data set in which all samples are equal."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return 1.0


class Breaking:
    """A batch sampler that fails at its third batch."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1, 2], [3, 4, 5])
        raise RuntimeError("the index is broken")


class Drawing:
    """A batch sampler that yields an empty batch."""

    def __iter__(self) -> Iterator[list[int]]:
        yield []


def pass_wrong_samples(here: Here) -> None:
    join(here)

    def through(loader: Any, **rules: Any) -> Callable[[], object]:
        return lambda: list(made(loader, **rules))

    def batches(sampler: Any) -> DataLoader[Any]:
        return DataLoader(data(), batch_sampler=sampler)

    own = data(4 if here.rank else 0) if here.rank != 1 else data(4, seed=9)
    same = "ranks 0, 1, 2 have the same first batch"
    fails(ArgumentError, same, through(DataLoader(data(), 5), **SHARDED))
    fails(ArgumentError, same, through(DataLoader(Stream(data()), 5), **SHARDED))
    fails(ArgumentError, same, through(DataLoader(Same(), 6)))
    assert len(list(made(DataLoader(Same(), 6), check=False))) == 2
    differ = "data sets give different batches: rank 0: 5 samples, [0-9a-f]{16}; rank 1: .* sharded=True"
    fails(MismatchError, differ, through(DataLoader(Shuffled(here.rank), 5)))
    shorter = "rank 2: no more; ranks 0, 1: 2 samples"
    fails(MismatchError, shorter, through(DataLoader(Stream(data(), 20 if here.rank == 2 else 22), 5)))
    fails(
        ArgumentError,
        "rank 0 has no samples, but other ranks have some",
        through(DataLoader(Stream(own, len(own)), 2), **SHARDED),
    )
    normalising = mt.convert_sync_batchnorm(network(normalise=True))
    fails(
        UnsupportedError,
        "a batch of 2 samples for 3 ranks, with SyncBatchNorm",
        through(DataLoader(data(), 5), model=normalising),
    )

    loader = iter(made(batches(Breaking())))
    assert [len(next(loader)[0]) for _ in range(2)] == [1, 1]
    kind: type[Exception] = MismatchError if here.rank else RuntimeError
    with pytest.raises(kind, match="the index is broken"):
        next(loader)
    told = (
        "rank 0 could not draw.*ArgumentError: the loader's batch sampler drew a batch without"
        if here.rank
        else "drew a batch"
    )
    fails(MismatchError if here.rank else ArgumentError, told, through(batches(Drawing())))


def test_data_that_differ_between_ranks() -> None:
    """`distribute` compares a few samples and reports different data.

    It ignores data that are random by intention, and draws no random numbers.
    """
    run_ranks(distribute_unlike_data, 3)


class Augmented(Dataset[float]):
    """Equal samples on all ranks, plus noise.

    The noise comes from the global generators and, with `has_own`, from a generator of the data set.
    """

    def __init__(self, *, has_own: bool) -> None:
        self.own = random.Random() if has_own else random  # noqa: S311 -- no secret

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return index + self.own.random() + float(torch.rand(())) + np.random.rand()  # noqa: NPY002 -- used by data sets


class Keyed(Dataset[float]):
    """A data set with keys instead of numbers."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, key: Any) -> float:
        return {"a": 1.0, "b": 2.0, "c": 3.0}[key]


def distribute_unlike_data(here: Here) -> None:
    join(here)
    differ = "data sets differ, first in sample 0 of 22: rank 1: [0-9a-f]{16}; ranks 0, 2: .* sharded=True"
    for workers in ({}, {"num_workers": 1, "multiprocessing_context": "fork"}):
        loader = DataLoader(data(seed=9 if here.rank == 1 else 5), 5, **workers)  # type: ignore[arg-type]
        fails(MismatchError, differ, partial(made, loader))
        made(loader, check=False)
    numbers: Any = [0.0] * 11 + [float(here.rank == 2)]
    fails(MismatchError, r"sample 11 of 12: rank 2: .*; ranks 0, 1: ", partial(made, DataLoader(numbers, 2)))
    made(DataLoader(Augmented(has_own=True), 2))
    made(DataLoader(Keyed(), batch_sampler=[["a", "b"], ["c"]]))
    model = network()
    optimizer = sgd(model.parameters())
    draws = []
    for distributes in (False, True):
        seed(3)
        np.random.seed(3)  # noqa: NPY002 -- as above
        if distributes:
            made(DataLoader(Augmented(has_own=False), 2), model=model, optimizer=optimizer)
        draws.append((float(torch.rand(())), random.random(), np.random.rand()))  # noqa: NPY002, S311 -- as above
    assert draws[0] == draws[1]


def test_loops_that_take_batches_ahead() -> None:
    """A gradient has the weight of the newest batch, so a loop must not take the next batch before the backward."""
    run_ranks(take_batches_ahead, 2)


class Records(logging.Handler):
    """Keeps the messages of multiring's logger."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []
        logging.getLogger("multiring").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


Step = Callable[[Any], None]


def ready(count: int, *, is_own: bool = False) -> tuple[Any, Step]:
    """Return a loader of `count` samples in batches of 4, torch's or multiring's own, and a step for a batch."""
    model = network()
    optimizer = sgd(model.parameters())
    arrays = dict(zip(("x", "y"), (each.numpy() for each in data(count).tensors), strict=True))
    plain: Any = mt.DataLoader(ArrayDataset(arrays), 4) if is_own else DataLoader(data(count), 4)
    loader = mt.distribute(model, optimizer, plain)[2]

    def step(batch: Any) -> None:
        points, labels = (batch["x"], batch["y"]) if is_own else batch
        optimizer.zero_grad()
        backward(nn.functional.cross_entropy(model(points), labels))
        optimizer.step()

    return loader, step


def prefetch(loader: Any, step: Step) -> None:
    batches = iter(loader)
    waiting = next(batches)
    for batch in batches:
        step(waiting)
        waiting = batch
    step(waiting)


def take_all(loader: Any, step: Step) -> None:
    for batch in list(loader):
        step(batch)


def look_and_skip(loader: Any, step: Step) -> None:
    """Look at a batch, then train on all batches but the last: nothing is out of order."""
    next(iter(loader))
    for number, batch in enumerate(loader):
        if number != 5:
            step(batch)


def evaluate(*, is_around: bool) -> None:
    """Look at all batches without a backward, with the gradients switched off around the loop or in it."""
    model = network()
    loader = made(DataLoader(data(21), 4), model=model)
    model.train(is_around)
    with torch.set_grad_enabled(not is_around):
        for points, _ in loader:
            with torch.no_grad():
                model(points)


def take_batches_ahead(here: Here) -> None:
    join(here)
    records = Records()
    for is_own, loop in product((False, True), (prefetch, take_all)):
        loop(*ready(24, is_own=is_own))  # every batch has the weights 1
    look_and_skip(*ready(21))
    for is_around in (False, True):
        evaluate(is_around=is_around)
    assert not records.told
    told = "after the end of the pass.*Run the backward of a batch before you take"
    for is_own, loop in product((False, True), (prefetch, take_all)):
        fails(StateError, told, partial(loop, *ready(21, is_own=is_own)))
    assert len(records.told) == (here.rank == 0), records.told
    assert all("two batches were taken before the first backward" in each for each in records.told)
    loader, _ = ready(21)
    assert (loader.batch_size, loader.drop_last, type(loader.sampler)) == (4, False, SequentialSampler)


def test_options_that_become_different_between_ranks() -> None:
    """A schedule that follows a rank's own loss is found at the next pass; options may differ from the beginning."""
    run_ranks(schedule_alone, 2)


def schedule_alone(here: Here) -> None:
    join(here)
    arrays = dict(zip(("x", "y"), (each.numpy() for each in data(8).tensors), strict=True))
    for plain in (DataLoader(data(8), 4), mt.DataLoader(ArrayDataset(arrays), 4)):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
        loader = mt.distribute(model, optimizer, plain, check=False)[2]
        optimizer.param_groups[0]["betas"] = (0.9, 0.9 + here.rank / 100)
        for _ in range(2):
            assert len(list(loader)) == 2  # different from the beginning, and no reason to let others become different
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        for loss in (1.0, 0.5):
            schedule.step(loss * (1 + here.rank))
            assert len(list(loader)) == 2
        schedule.step(0.4 if here.rank else 0.6)
        told = r"values of 'lr' of parameter group 0: rank 0: 0\.05; rank 1: 0\.5\..*from loader.global_loss or mt.mean"
        for _ in range(2):
            fails(MismatchError, told, lambda each=loader: list(each))  # type: ignore[misc] # a default binds it now
        schedule.step(0.6 if here.rank else 0.4)
        for rate in (0.25, np.float32(0.125), torch.tensor(0.0625)):
            optimizer.param_groups[0]["lr"] = rate
            assert len(list(loader)) == 2
            optimizer.param_groups[0]["lr"] = rate * (1 + here.rank)
            fails(MismatchError, r"values of 'lr'", lambda each=loader: list(each))  # type: ignore[misc] # as above
        optimizer.param_groups[0]["lr"] = 0.25
        optimizer.param_groups[0]["betas"] = (0.9, 0.99)
        assert len(list(loader)) == 2


def test_options_that_stay_equal_are_left_alone() -> None:
    """Schedules of torch, numbers as tensors, groups that come later, and a rank that has compared nothing yet."""
    run_ranks(schedule_together, 2)


Schedule = Callable[[Tensor], object]


def schedules(optimizer: Any) -> Iterator[Schedule]:
    """Yield what sets the learning rate after a pass, given the loss of the last global batch."""
    rates = torch.optim.lr_scheduler
    for each in (
        rates.OneCycleLR(optimizer, 0.1, total_steps=8),
        rates.SequentialLR(optimizer, [rates.LinearLR(optimizer, 0.1), rates.CosineAnnealingLR(optimizer, 4)], [1]),
        rates.CyclicLR(optimizer, 0.01, 0.1, 2),
    ):
        yield lambda _, one=each: one.step()  # type: ignore[misc] # a default binds it now
    yield rates.ReduceLROnPlateau(optimizer, patience=0).step


def schedule_together(here: Here) -> None:
    join(here)
    for rate in (0.1, torch.tensor(0.1)):
        model, late = network(), nn.Parameter(torch.zeros(()))
        groups = [{"params": [each], "lr": rate * (1 + number)} for number, each in enumerate(model.parameters())]
        optimizer = torch.optim.Adam(groups, foreach=False)
        loader = mt.distribute(model, optimizer, DataLoader(data(9), 4))[2]
        for schedule in schedules(optimizer):
            for _ in range(2):
                for points, labels in loader:
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(points), labels)
                    backward(loss)
                    optimizer.step()
                schedule(loader.global_loss(loss))
        optimizer.add_param_group({"params": [late]})
        assert len(list(loader)) == 3
    optimizer.param_groups[0]["eps"] = 1e-8 * (1 + here.rank)
    options = AgreedOptions(optimizer)
    options.require_equal()
    options = AgreedOptions(optimizer) if here.rank else options  # of a rank that has joined a running job
    options.require_equal()
    options.require_equal()
    options = AgreedOptions(optimizer) if here.rank else options
    optimizer.param_groups[0]["weight_decay"] = here.rank
    fails(MismatchError, r"values of 'weight_decay' of parameter group 0: rank 0: 0; rank 1: 1", options.require_equal)
