"""`distribute(shares="speed")`: parts by the ranks' speeds, and the losses of one process."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.distribute_cases import CASES, SAMPLES, Case, Curve, curve_of, data, distributed, network, seed, sgd
from tests.support.plain import backward, join
from tests.support.ranks import Here, run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

import multiring.torch as mt
from multiring.data import ArrayDataset
from multiring.errors import ArgumentError, UnsupportedError
from multiring.torch.distributing import measuring
from multiring.torch.distributing.measuring import summed

NAMES = ("shuffled", "summed", "accumulated", "normalised", "workers", "ragged", "many batches", "per rank")
FAST_S, SLOW_S = 0.0005, 0.1  # of each sample


def cases() -> dict[str, Case]:
    found = {name: CASES[name] for name in NAMES[:-1]}
    found["per rank"] = Case(
        lambda: DataLoader(data(), 3, shuffle=True), rules={"batch": "per_rank", "learning_rate": "keep"}
    )
    return {name: replace(case, rules=case.rules | {"shares": "speed"}) for name, case in found.items()}


class Clock:
    """A clock that shows what the models need, whatever else the machine does."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def test_curves_are_those_of_one_process() -> None:
    """Rank 0 is slow, and gets fewer samples in the second pass."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = {}
    for name, case in cases().items():
        seed(7)
        # A batch of each rank is a large batch of all.
        alone[name] = curve_of(case if name != "per rank" else Case(lambda: DataLoader(data(), 6, shuffle=True)))
    torch.set_num_threads(threads)
    by_rank = run_ranks(train_all, 2, deadline_s=240)
    for found in by_rank:
        for name, ((losses, parameters), _) in found.items():
            for one, other in ((losses, alone[name][0]), (parameters, alone[name][1])):
                assert one == pytest.approx(other, rel=1e-10, abs=1e-12), name
    for name in NAMES:
        slow, fast = (found[name][1] for found in by_rank)
        steps = len(slow) // 2
        if name == "many batches":  # of one sample each
            continue
        assert sum(slow[:steps]) >= sum(fast[:steps]), name  # equal parts at first
        assert sum(slow[steps:]) < 0.7 * sum(fast[steps:]), name


def train_all(here: Here) -> dict[str, tuple[Curve, list[int]]]:
    join(here)
    clock = Clock()
    vars(measuring)["time"] = clock
    found = {}
    for name, case in cases().items():
        seed(7 if here.rank == 0 else 1000 + here.rank)
        sizes: list[int] = []
        seconds = FAST_S if here.rank else SLOW_S
        found[name] = curve_of(case, slowed(distributed(case), seconds, clock, sizes)), sizes
    mt.shutdown()
    return found


def slowed(prepare: Callable[..., Any], seconds: float, clock: Clock, sizes: list[int]) -> Callable[..., Any]:
    """Return `prepare`, changed: its model needs so long by the clock for each sample, and notes its batches."""

    def made(*arguments: Any) -> Any:
        model, optimizer, loader = prepare(*arguments)

        def wait(_: nn.Module, inputs: tuple[Tensor]) -> None:
            sizes.append(len(inputs[0]))
            clock.now_s += seconds * len(inputs[0])

        model.register_forward_pre_hook(wait)
        return model, optimizer, loader

    return made


def fed(passes: int, seconds: float, **rules: Any) -> tuple[list[float], list[int]]:
    """Train with a loader of multiring; return the losses, and the sizes of this rank's parts."""
    seed(7)
    model = network()
    points, labels = data()[:]
    samples = ArrayDataset({"points": points.numpy(), "labels": labels.numpy(), "number": np.arange(SAMPLES)})
    model, optimizer, loader = mt.distribute(model, sgd(model.parameters()), mt.DataLoader(samples, 5), **rules)
    losses, parts = [], []
    for _ in range(passes):
        for batch in loader:
            parts.append(len(batch["number"]))
            time.sleep(seconds * len(batch["number"]))
            loss = nn.functional.cross_entropy(model(batch["points"]), batch["labels"])
            optimizer.zero_grad()
            losses.append(float(loader.global_loss(loss)))  # it waits for the slow rank
            backward(loss)
            optimizer.step()
    return losses, parts


def train_fed(here: Here) -> tuple[list[float], list[float], list[int]]:
    join(here)
    equal, _ = fed(2, 0.0)
    losses, parts = fed(2, FAST_S if here.rank else SLOW_S, shares="speed")
    return equal, losses, parts


def test_a_loader_of_multiring_by_the_real_clock() -> None:
    """Rank 1 waits for rank 0 in each step, and does not seem as slow."""
    (equal, losses, slow), (_, _, fast) = run_ranks(train_fed, 2)
    assert losses == pytest.approx(equal, rel=1e-10)
    assert [one + other for one, other in zip(slow, fast, strict=True)] == [5, 5, 5, 5, 2] * 2
    assert sum(slow[:5]) >= sum(fast[:5])
    assert sum(slow[5:]) < 0.7 * sum(fast[5:])


def test_what_cannot_have_shares_by_speed() -> None:
    run_ranks(refuse, 1)


def refuse(here: Here) -> None:
    join(here)
    model, meta = network(), network().to("meta")
    stream = CASES["stream"].loader()
    for kind, text, one, loader, rules in (
        (ArgumentError, "shares='fast': want 'equal' or 'speed'", model, DataLoader(data(), 5), {"shares": "fast"}),
        (
            ArgumentError,
            "shares='speed' with sharded=True: each rank's loader already gives",
            model,
            DataLoader(data(), 5),
            {"shares": "speed", "sharded": True, "batch": "per_rank", "learning_rate": "keep"},
        ),
        (UnsupportedError, "shares='speed' with an iterable data set, Stream", model, stream, {"shares": "speed"}),
        (UnsupportedError, "with parameters on meta: ", meta, DataLoader(data(), 5), {"shares": "speed"}),
    ):
        with pytest.raises(kind, match=text):
            mt.distribute(one, sgd(one.parameters()), loader, **rules)


def test_one_long_step_changes_no_speed() -> None:
    samples, seconds = summed([(4, 0.4), (2, 0.2), (4, 9.0)])
    assert samples == 10
    assert seconds == pytest.approx(1.0)
    assert summed([]) == (0, 0.0)
