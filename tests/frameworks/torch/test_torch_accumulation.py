"""Accumulated backward passes, and accumulation groups that end early."""

import itertools
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.frameworks.horovod.test_horovod_programs import forked
from tests.support.distribute_cases import Stream, data, seed
from tests.support.distribute_cases import network as classifier
from tests.support.plain import backward, join, loss_of, network
from tests.support.ranks import Here, run_ranks
from tests.support.sharing import expect, sgd
from torch import nn
from torch.utils.data import DataLoader

import multiring.torch as mt
from multiring.errors import StateError

# ---- with `distribute`: its loader marks the last batch ----

ACCUMULATED = ("mean", "sum")
LOADERS: dict[str, Any] = {
    "map": lambda: DataLoader(data(), 5),
    "stream": lambda: DataLoader(Stream(data()), 5),
}


def trained(reduction: str, source: str, ranks: int, *, steps: str) -> list[float]:
    """Train two epochs of five batches, two batches per step, with hard clipping.

    Return the gradient norms and the parameters.
    """
    seed(7)
    model = classifier()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = LOADERS[source]()
    if ranks:
        op = mt.Sum if reduction == "sum" else mt.Average
        optimizer = mt.DistributedOptimizer(optimizer, model.named_parameters(), op=op, backward_passes_per_step=2)
        model, optimizer, loader = mt.distribute(model, optimizer, loader, reduction=reduction)
    norms: list[float] = []
    count = 0
    for _ in range(2):
        for number, (points, labels) in enumerate(loader, 1):
            count += 1
            backward(nn.functional.cross_entropy(model(points), labels, reduction=reduction) / 2)
            # Some programs end a short group with the epoch; others continue it in the next epoch.
            if (number % 2 == 0 or number == 5) if steps == "each epoch" else count % 2 == 0:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
                optimizer.step()
                optimizer.zero_grad()
    return [*norms, *nn.utils.parameters_to_vector([each.detach() for each in model.parameters()]).tolist()]


@pytest.mark.parametrize("steps", ["each epoch", "across epochs"])
def test_short_groups_under_distribute_are_clipped_as_in_one_process(steps: str) -> None:
    cases = list(itertools.product(ACCUMULATED, LOADERS))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = [trained(*case, 0, steps=steps) for case in cases]
    torch.set_num_threads(threads)
    for found in run_ranks(train_all, 3, cases, steps):
        for case, own, wanted in zip(cases, found, alone, strict=True):
            assert own == pytest.approx(wanted, rel=1e-9, abs=1e-12), case


def train_all(here: Here, cases: list[tuple[str, str]], steps: str) -> list[list[float]]:
    join(here)
    return [trained(*case, here.size, steps=steps) for case in cases]


def test_what_the_next_batch_raises_comes_after_this_one() -> None:
    run_ranks(take_until_it_raises, 2)


def take_until_it_raises(here: Here) -> None:
    join(here)
    model = classifier()
    optimizer = mt.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), backward_passes_per_step=2
    )
    points = data(8)[:][0]
    samples: Any = [*points[:6], None, None]
    _, _, loader = mt.distribute(model, optimizer, DataLoader(samples, 2))
    taken = iter(loader)
    for _ in range(3):
        next(taken)
    with pytest.raises(TypeError):
        next(taken)


# ---- without `distribute` ----


def test_a_step_refuses_gradients_that_were_clipped_before_they_were_reduced() -> None:
    run_ranks(clip_too_early, 2)


def clip_too_early(here: Here) -> None:
    join(here)
    model = network()
    optimizer = sgd(model, backward_passes_per_step=2, bucket_bytes=300)
    start = [each.detach().clone() for each in model.parameters()]
    for change in (clip, replace):
        backward(loss_of(model, here.rank))
        change(model)
        with pytest.raises(
            StateError, match=r"step 1 has had 1 of .*_per_step=2 backwards.* optimizer\.synchronize\(\) after the last"
        ):
            optimizer.step()
        assert all(map(torch.equal, start, model.parameters()))
        optimizer.synchronize()
        optimizer.zero_grad()
    # Do what the error says.
    backward(loss_of(model, here.rank))
    optimizer.synchronize()
    expect(model, [0, 1])
    norm = clip(model)
    assert mt.allreduce(norm, op="min") == mt.allreduce(norm, op="max")
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.zero_grad()
    # A complete group, and a short group whose gradients nobody changed, need no call of synchronize.
    for seeds in ([0, 10], [20]):
        for each in seeds:
            backward(loss_of(model, here.rank + each))
        if len(seeds) == 2:
            clip(model)
        optimizer.step()
        optimizer.zero_grad()


def clip(model: nn.Module) -> Any:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def replace(model: nn.Module) -> None:
    for each in model.parameters():
        assert each.grad is not None
        each.grad = each.grad.clamp(-0.01, 0.01)


def test_a_loss_scaler_decides_by_what_is_reduced() -> None:
    """If one rank overflows in a short group, all ranks skip the step.

    No rank may wait for another.
    """
    for kept, moved in run_ranks(scale_short_groups, 2):
        assert kept
        assert moved


def scale_short_groups(here: Here) -> tuple[bool, bool]:
    join(here)
    model = network(torch.float32)
    optimizer = sgd(model, backward_passes_per_step=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    start = [each.detach().clone() for each in model.parameters()]
    found = []
    for factor in (torch.inf if here.rank else 1.0, 1.0):
        backward(scaler.scale(loss_of(model, here.rank) * factor))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(all(map(torch.equal, start, model.parameters())))
    backward(scaler.scale(loss_of(model, here.rank)))
    scaler.unscale_(optimizer)
    with pytest.raises(StateError, match=r"optimizer\.synchronize\(\)"):
        scaler.step(optimizer)
    return found[0], not found[1]


HOROVOD = """
import warnings

import torch

import horovod.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), backward_passes_per_step=2)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(3) + hvd.rank()).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
print([str(each.message) for each in caught])
"""


def test_horovods_programs_are_warned_once(tmp_path: Path) -> None:
    script = tmp_path / "clips.py"
    script.write_text(HOROVOD)
    for told in forked(2, script):
        [line] = re.findall(r"^(\[.*\])$", told, re.MULTILINE)
        assert line.count("optimizer.synchronize()") == 1
        assert "as in Horovod" in line


def test_no_warning_without_a_change() -> None:
    run_ranks(accumulate_quietly, 2)


def accumulate_quietly(here: Here) -> None:
    """Cause no warning by a short group, zeroed gradients, or unused parameters."""
    join(here)
    model = network()
    optimizer = sgd(model, backward_passes_per_step=3, bucket_bytes=300)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for used in (3, 8, 8):
            backward(loss_of(model[:5] if used == 3 else model, here.rank))
        optimizer.step()
        optimizer.zero_grad()
        backward(loss_of(model[:5], here.rank))
        model.zero_grad()
        backward(loss_of(model[:5], here.rank))
        optimizer.step()
