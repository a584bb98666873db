"""Gradient lag on ranks: reductions overlap the next step and change no result."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.faults import kill
from tests.support.large_batch_cases import scaled_and_lagged
from tests.support.lossy import expect_same_bits, residuals
from tests.support.plain import backward, join, loss_of, network
from tests.support.ranks import Here, report_of, run_ranks
from torch import Tensor, nn

import multiring.torch as mt
from multiring._frontend.errors import LoopOrderError
from multiring.errors import PeerLostError, StateError

STEPS = 7

OPTIONS: dict[str, dict[str, Any]] = {
    "average": {},
    "sum": {"op": mt.Sum},
    "predivided": {"gradient_predivide_factor": 2.0},
    "bf16 wire": {"compression": mt.Compression.bf16},
    "int8 wire": {"compression": mt.Compression.int8, "error_feedback": True},
    "PowerSGD": {"compression": mt.PowerSGD(rank=1)},
    "accumulation": {"backward_passes_per_step": 2},
    "small buckets": {"bucket_bytes": 256},
}


class Embedded(nn.Module):
    """A network with an embedding.

    Its gradients may become sparse on one rank in some step, and all other ranks must detect this.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(9, 16, dtype=torch.float64)
        self.rest = network()

    def forward(self, images: Tensor) -> Tensor:
        numbers = images.flatten(1).argmax(1) % 9
        found: Tensor = self.rest(images + self.rows(numbers).view_as(images))
        return found


def train(here: Here, options: dict[str, Any], *, waits: bool, make: Callable[[], nn.Module] = network) -> list[Tensor]:
    """Train with lag; return the weights.

    With `waits`, each step waits for its own gradient.
    """
    torch.manual_seed(5)
    model = make()
    if "compression" in options:
        model.float()
    is_sparse = isinstance(model, Embedded)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.0 if is_sparse else 0.5)
    # Lag may be set before or after the ranks share gradients.
    lag = mt.gradient_lag(optimizer) if "op" in options else None
    shared: Any = mt.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    lag = lag or mt.gradient_lag(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        if isinstance(model, Embedded):
            model.rows.sparse = step > 1 and here.rank == 1
        for part in range(options.get("backward_passes_per_step", 1)):
            backward(loss_of(model, 100 * step + 10 * part + here.rank))
        if waits:
            shared.synchronize()
            with shared.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        assert all(each.grad is None for each in model.parameters())
    if options.get("error_feedback") or isinstance(options.get("compression"), mt.PowerSGD):
        assert any(each.abs().sum() > 0 for each in residuals(optimizer).values())
    lag.flush()
    return [each.detach().clone() for each in model.parameters()]


def test_lag_hides_what_it_does_not_change() -> None:
    run_ranks(compare, 2, engine="tcp", deadline_s=240.0)
    run_ranks(compare_few, 3)


def compare(here: Here) -> None:
    group = join(here)
    for name, options in OPTIONS.items():
        own = train(here, options, waits=False)
        expect_same_bits(group, own)
        for one, other in zip(own, train(here, options, waits=True), strict=True):
            assert torch.equal(one, other), name
    for sparse_as_dense in (False, True):
        own = train(here, {"sparse_as_dense": sparse_as_dense}, waits=False, make=Embedded)
        for one, other in zip(own, train(here, {}, waits=True, make=Embedded), strict=True):
            assert (one - other).abs().max() < 1e-12  # rows are added up in another order
    for one, other in zip(train(here, {}, waits=False), by_hand(here), strict=True):
        assert torch.equal(one, other)


def compare_few(here: Here) -> None:
    join(here)
    for name in ("average", "int8 wire", "PowerSGD"):
        for one, other in zip(
            train(here, OPTIONS[name], waits=False), train(here, OPTIONS[name], waits=True), strict=True
        ):
            assert torch.equal(one, other), name


def by_hand(here: Here) -> list[Tensor]:
    """Return the weights after SGD with the previous step's averaged gradients."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.5)
    waiting: list[Tensor] = []
    for step in range(STEPS + 1):
        own = torch.autograd.grad(loss_of(model, 100 * step + here.rank), list(model.parameters()))
        for each, gradient in zip(model.parameters(), waiting, strict=False):
            each.grad = gradient
        if waiting:
            optimizer.step()
        waiting = [mt.allreduce(each, name=f"{step}.{number}") for number, each in enumerate(own)]
    return [each.detach() for each in model.parameters()]


def test_a_step_does_not_wait_for_other_ranks() -> None:
    run_ranks(go_ahead, 2)


def go_ahead(here: Here) -> None:
    """Rank 1 starts its first backward pass only after rank 0's first step.

    Without overlap, both ranks would wait for each other.
    """
    join(here)
    model = network()
    optimizer: Any = mt.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.05), model.named_parameters())
    lag = mt.gradient_lag(optimizer)
    if here.rank == 1:
        mt.broadcast(torch.zeros(1), 0, name="go")
    backward(loss_of(model, here.rank))
    optimizer.step()
    if here.rank == 0:
        mt.broadcast(torch.zeros(1), 0, name="go")
    # Lag reduces copies, so a change of the gradients during the reduction would have no effect.
    backward(loss_of(model, 2 + here.rank))
    with pytest.raises(LoopOrderError, match="more than backward_passes_per_step times"):
        backward(loss_of(model, 2 + here.rank))
    optimizer = mt.DistributedOptimizer(optimizer, model.named_parameters())
    assert lag.is_pending  # the old gradient; the new DistributedOptimizer dropped later gradients
    for each in model.parameters():
        each.grad = None
    optimizer.synchronize()
    optimizer.zero_grad()
    backward(loss_of(model, 2 + here.rank))
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with optimizer.skip_synchronize():
        optimizer.step()
    before = [each.detach().clone() for each in model.parameters()]
    lag.flush()
    moved = sum(float(((one - each) ** 2).detach().sum()) for one, each in zip(model.parameters(), before, strict=True))
    assert math.sqrt(moved) == pytest.approx(0.05 * 0.01, rel=1e-3)
    backward(loss_of(model, 9))
    optimizer.step()
    backward(loss_of(model, 9))  # no step uses these gradients
    with pytest.raises(LoopOrderError, match=r"zero_grad\(\) was called after"):
        lag.flush()


def test_a_step_refuses_gradients_that_the_program_changed() -> None:
    run_ranks(change, 2)


def change(here: Here) -> None:
    join(here)
    model = network()
    optimizer: Any = mt.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.05), model.named_parameters())
    lag = mt.gradient_lag(optimizer)

    def step_and_flush() -> None:
        optimizer.step()
        # On a device, torch does not count what `unscale_` changes, and a step does not wait to find out.
        assert device != "cpu"
        lag.flush()

    device = next(model.parameters()).device.type
    changes: list[Callable[[], object]] = [
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
        lambda: unscale(optimizer, device),
    ]
    for each in changes:
        optimizer.synchronize()
        optimizer.zero_grad()
        backward(loss_of(model, 2 + here.rank))
        each()
        with pytest.raises(StateError, match="but gradient lag is already reducing copies of them while"):
            step_and_flush()


def unscale(optimizer: torch.optim.Optimizer, device: str) -> None:
    scaler = torch.amp.GradScaler(device, init_scale=8.0)
    scaler.scale(torch.zeros((), device=device))
    scaler.unscale_(optimizer)


def test_lag_and_a_grad_scaler_on_ranks() -> None:
    run_ranks(scale, 2)


def scale(here: Here) -> None:
    """As in one process, one rank's overflow drops only that gradient, on all ranks."""
    join(here)
    weight = nn.Parameter(torch.zeros(2))
    optimizer = mt.DistributedOptimizer(torch.optim.SGD([weight], 1.0), [("weight", weight)])
    assert scaled_and_lagged(optimizer, weight, math.inf if here.rank else 1.0) == [0.0, 1.0, 1.0, 5.0, 13.0]


def test_lag_where_ranks_have_unlike_numbers_of_steps() -> None:
    run_ranks(train_unevenly, 3)


def train_unevenly(here: Here) -> None:
    join(here)
    for make in (network, Embedded):
        torch.manual_seed(3)
        model = make()
        optimizer = mt.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.05), model.named_parameters())
        lag = mt.gradient_lag(optimizer)
        for step in range(2 + 2 * here.rank):
            optimizer.zero_grad()
            if isinstance(model, Embedded):  # sparse in some steps only, because gathered rows need every rank
                model.rows.sparse = here.rank == 2 and step > 3
            backward(loss_of(model, 10 * step + here.rank))
            optimizer.step()
        assert lag.is_pending
        assert mt.join() >= 0
        lag.flush()
        assert all(each.isfinite().all() for each in model.parameters())


def test_a_gradient_that_is_not_finite_is_in_no_checkpoint() -> None:
    run_ranks(lose, 2)


def lose(here: Here) -> None:
    join(here)
    model = network(torch.float32)
    optimizer = mt.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.05), model.named_parameters())
    lag = mt.gradient_lag(optimizer)
    precision = mt.mixed_precision(optimizer, "float32")
    for step in range(3):
        optimizer.zero_grad()
        precision.backward(loss_of(model, step + here.rank) * (math.nan if (step, here.rank) == (2, 1) else 1.0))
        optimizer.step()
    weights, state = model.state_dict(), optimizer.state_dict()
    assert lag.is_pending
    assert state["multiring_stages"]["lag"]["pending"] == {}
    backward(loss_of(model, 8 + here.rank))
    with pytest.raises(StateError, match=r"step 2: the loss is nan on rank 1. The weights are those of the step bef"):
        optimizer.step()
    again = network(torch.float32)
    other = mt.DistributedOptimizer(torch.optim.SGD(again.parameters(), 0.05), again.named_parameters())
    mt.gradient_lag(other)
    mt.mixed_precision(other, "float32")
    again.load_state_dict(weights)
    other.load_state_dict(state)
    for step in range(3, 5):
        other.zero_grad()
        backward(loss_of(again, step + here.rank))
        other.step()
    assert all(each.isfinite().all() for each in again.parameters())


def test_death_while_a_gradient_is_on_its_way() -> None:
    report = report_of(train_until_death, 3, faults=[kill(1).at("training").after(0.1)])
    for outcome in report.outcomes:
        if outcome.rank != 1:
            assert isinstance(outcome.error, PeerLostError)
            assert "rank 1" in str(outcome.error)


def train_until_death(here: Here) -> None:
    join(here)
    model = network()
    optimizer = mt.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.05), model.named_parameters())
    mt.gradient_lag(optimizer)
    here.reach("training")
    while True:
        optimizer.zero_grad()
        backward(loss_of(model, here.rank))
        optimizer.step()


def test_a_job_may_end_with_a_gradient_on_its_way() -> None:
    """No call asks for the last gradient."""
    run_ranks(end_early, 2)


def end_early(here: Here) -> None:
    join(here)
    model = network()
    optimizer = mt.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.05), model.named_parameters())
    mt.gradient_lag(optimizer)
    for step in range(3):
        optimizer.zero_grad()
        backward(loss_of(model, step + here.rank))
        optimizer.step()
