"""Training loops with shared gradients, and the optimizer that shares them."""

import copy
import pickle

import torch
import torch.utils.checkpoint
from tests.support.plain import backward, join, loss_of, mean_gradients, network, samples
from tests.support.ranks import Here, run_ranks
from tests.support.sharing import expect, expect_same_parameters, sgd
from torch import nn

import multiring
import multiring.torch as mt


def test_clipping_sees_averages() -> None:
    norms = run_ranks(clip, 2)
    model = network()
    for parameter, mean in zip(
        model.parameters(),
        mean_gradients(network, [lambda model: loss_of(model, 0), lambda model: loss_of(model, 1)]),
        strict=True,
    ):
        parameter.grad = mean
    plain = float(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
    assert norms[0] == norms[1]
    assert abs(norms[0][0] - plain) < 1e-12
    assert abs(norms[0][1] - 0.01) < 1e-6


def clip(here: Here) -> tuple[float, float]:
    join(here)
    model = network()
    sgd(model, bucket_bytes=256)
    backward(loss_of(model, here.rank))
    before = float(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
    return before, float(nn.utils.clip_grad_norm_(model.parameters(), 0.01))


def test_loss_scaling_sees_averages() -> None:
    """One rank's overflow makes all ranks skip: unscaling finds it in the average."""
    assert run_ranks(scale_losses, 2) == [[True, False, True]] * 2


def scale_losses(here: Here) -> list[bool]:
    join(here)
    model = network(torch.float32)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    stepped = []
    for step in range(3):
        before = next(model.parameters()).detach().clone()
        factor = float("inf") if (step, here.rank) == (1, 1) else 1.0
        optimizer.zero_grad()
        backward(scaler.scale(loss_of(model, here.rank)) * factor)
        scaler.step(optimizer)
        scaler.update()
        stepped.append(not torch.equal(before, next(model.parameters())))
    return stepped


def test_schedulers_made_before_and_after() -> None:
    rates = run_ranks(schedule, 2)
    assert rates[0] == rates[1]
    assert [round(rate, 9) for rate in rates[0]] == [0.05, 0.025, 0.0125]


def schedule(here: Here) -> list[float]:
    join(here)
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    before = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
    optimizer = mt.DistributedOptimizer(plain, model.named_parameters())
    after = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    rates = []
    for _ in range(3):
        optimizer.zero_grad()
        backward(loss_of(model, here.rank))
        optimizer.step()
        before.step()
        after.step()
        rates.append(optimizer.param_groups[0]["lr"])
    expect_same_parameters(model)
    return rates


def test_optimizer_stays_what_it_was() -> None:
    run_ranks(use_as_optimizer, 2)


def use_as_optimizer(here: Here) -> None:
    join(here)
    model = network()
    plain = torch.optim.Adam(model[:4].parameters(), lr=0.1)
    optimizer = mt.DistributedOptimizer(plain, model.named_parameters())
    assert optimizer is plain
    assert isinstance(optimizer, torch.optim.Adam)
    assert repr(optimizer).startswith("Adam (")
    optimizer.add_param_group({"params": list(model[4:].parameters()), "lr": 0.01})
    backward(loss_of(model, here.rank))
    expect(model, [0, 1])
    optimizer.step()
    state = optimizer.state_dict()
    assert len(state["state"]) == len(list(model.parameters()))
    optimizer.load_state_dict(state)
    optimizer.zero_grad()
    backward(loss_of(model, here.rank))
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):  # noqa: S301 -- our own
        assert type(other) is torch.optim.Adam
        assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
        other.step()
    optimizer.step()
    expect_same_parameters(model)


def test_closures() -> None:
    run_ranks(step_with_closure, 2)


def step_with_closure(here: Here) -> None:
    join(here)
    model = network()
    optimizer = sgd(model, op="sum")

    def closure() -> float:
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of(model, here.rank)
        backward(loss)
        return loss.item()

    optimizer.step(closure)
    expect(model, [0, 1], scale=2.0)
    optimizer.step(closure=closure)
    expect_same_parameters(model)


def test_wrapping_again_shares_what_was_frozen() -> None:
    run_ranks(unfreeze, 2)


def unfreeze(here: Here) -> None:
    join(here)
    model = network()
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    backward(loss_of(model, here.rank))
    assert model[0].weight.grad is None
    optimizer.synchronize()
    optimizer.zero_grad(set_to_none=False)
    model[0].requires_grad_(True)
    optimizer = mt.DistributedOptimizer(optimizer, model.named_parameters(), op="sum")
    assert isinstance(optimizer, torch.optim.SGD)
    backward(loss_of(model, here.rank))
    expect(model, [0, 1], scale=2.0)
    model[5].requires_grad_(False)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1, dtype=torch.float64))]})
    # A second optimizer takes over the parameters; the first optimizer may still step.
    second = torch.optim.Adam([*model.parameters(), optimizer.param_groups[1]["params"][0]])
    second = mt.DistributedOptimizer(second)
    for each in (optimizer, second):
        model.zero_grad()
        multiring.drain_events()
        backward(loss_of(model, here.rank))
        # NCCL's bucket needs small agreements beside it.
        names = [event.name for event in multiring.drain_events() if event.kind == "operation"]
        assert [name for name in names if name != "agreement"] == ["all_reduce"]
        expect_of_trained(model)
        each.step()
    expect_same_parameters(model)


def expect_of_trained(model: nn.Module) -> None:
    assert model[5].weight.grad is None  # type: ignore[index]
    for parameter in model.parameters():
        if parameter.grad is not None:
            assert torch.equal(mt.allreduce(parameter.grad, op="min"), mt.allreduce(parameter.grad, op="max"))


def test_compiled_model() -> None:
    run_ranks(train_compiled, 2)


def train_compiled(here: Here) -> None:
    join(here)
    model = network()
    sgd(model, bucket_bytes=256)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        images, labels = samples(here.rank, 6)
        backward(nn.functional.cross_entropy(compiled(images), labels))
        expect(model, [0, 1])
        model.zero_grad()


def test_checkpointed_model() -> None:
    run_ranks(train_checkpointed, 2)


def train_checkpointed(here: Here) -> None:
    join(here)
    for use_reentrant in (False, True):
        model = network()
        sgd(model, bucket_bytes=256)
        for _ in range(2):
            images, labels = samples(here.rank, 6)
            between = torch.utils.checkpoint.checkpoint(model[:4], images.requires_grad_(), use_reentrant=use_reentrant)
            outputs = torch.utils.checkpoint.checkpoint(model[4:], between, use_reentrant=use_reentrant)
            backward(nn.functional.cross_entropy(outputs, labels))
            expect(model, [0, 1])
            model.zero_grad()
