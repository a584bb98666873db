"""op=Adasum: each rank steps alone, and the ranks' changes are combined.

The reference is one process that plays all ranks.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.plain import backward, join, loss_of, network
from tests.support.ranks import Here, run_ranks
from tests.support.sharing import expect_same_parameters
from torch import Tensor

import multiring.torch as mt
from multiring._frontend.adasum import adasum

STEPS = 3
Made = Callable[[Any], Any]  # makes an optimizer of parameters


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


def adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=0.02, eps=1e-3)


def played(make: Made, ranks: int) -> list[Tensor]:
    """Return the parameters after the steps of `ranks` ranks, played by one process."""
    models = [network() for _ in range(ranks)]
    optimizers = [make(model.parameters()) for model in models]
    for step in range(STEPS):
        starts = [each.detach().clone() for each in models[0].parameters()]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            backward(loss_of(model, rank + 10 * step))
            optimizer.step()
        for start, *parameters in zip(starts, *(model.parameters() for model in models), strict=True):
            deltas = [(each.detach() - start).flatten().numpy() for each in parameters]
            end = start + torch.from_numpy(adasum(deltas)).view(start.shape)
            for each in parameters:
                with torch.no_grad():
                    each.copy_(end)
    return [each.detach() for each in models[0].parameters()]


@pytest.mark.parametrize("ranks", [2, 3])
def test_steps_are_combined(ranks: int) -> None:
    run_ranks(combine, ranks)


def combine(here: Here) -> None:
    join(here)
    for make in (sgd, adam):
        wanted = played(make, here.size)
        for compression, bound in ((mt.Compression.none, 1e-12), (mt.Compression.fp16, 1e-2)):
            for step_of in (plain_step, closure_step):
                model = network()
                optimizer = make(model.parameters())
                mt.DistributedOptimizer(optimizer, model.named_parameters(), compression, op=mt.Adasum)
                for step in range(STEPS):
                    step_of(model, optimizer, here.rank + 10 * step)
                    expect_same_parameters(model)
                for parameter, expected in zip(model.parameters(), wanted, strict=True):
                    assert (parameter - expected).abs().max() <= bound * expected.abs().max()
    assert mt.gradient_bytes(optimizer) == sum(each.nbytes for each in model.parameters())
    optimizer.synchronize()
    with pytest.raises(AssertionError, match="not supported when using Adasum"), optimizer.skip_synchronize():
        pass
    check_overflow(here, {})
    check_overflow(here, {"fused": True})
    check_derived(here)


def plain_step(model: Any, optimizer: Any, seed: int) -> None:
    optimizer.zero_grad()
    backward(loss_of(model, seed))
    optimizer.step()


def closure_step(model: Any, optimizer: Any, seed: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, seed)
        backward(loss)
        return loss

    optimizer.step(closure)


def check_overflow(here: Here, settings: dict[str, Any]) -> None:
    """If one rank overflows, all ranks skip the step; otherwise all ranks unscale."""
    model, plain = network(torch.float32), network(torch.float32)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, **settings)
    mt.DistributedOptimizer(optimizer, model.named_parameters(), op="adasum")
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
    for step, unscales in enumerate((False, False, True)):
        before = [each.detach().clone() for each in model.parameters()]
        backward(scaler.scale(loss_of(model, 1)) * (float("inf") if (step, here.rank) == (0, 1) else 1.0))
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert all(each.grad is not None for each in model.parameters())
        scaler.update()
        optimizer.zero_grad()
        if step == 0:
            assert all(torch.equal(one, each) for one, each in zip(before, model.parameters(), strict=True))
            continue
        # Adasum of equal changes is the same change.
        backward(loss_of(plain, 1))
        for each, own in zip(plain.parameters(), model.parameters(), strict=True):
            assert each.grad is not None
            with torch.no_grad():
                each.sub_(0.1 * each.grad)
            assert np.allclose(each.detach(), own.detach(), rtol=1e-4, atol=1e-6)
        plain.zero_grad()


def check_derived(here: Here) -> None:
    """Changes that a derived class's step makes are combined, too."""

    class Drifting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            found = super().step(closure)
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.add_(0.01 * (here.rank + 1))
            return found

    model = network()
    optimizer = Drifting(model.parameters(), lr=0.1)
    mt.DistributedOptimizer(optimizer, model.named_parameters(), op=mt.Adasum)
    for _ in range(2):
        plain_step(model, optimizer, here.rank)
        expect_same_parameters(model)
