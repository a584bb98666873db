"""The content of `.grad` after each call.

Each test compares gradients with plain backward passes of all ranks' losses.
"""

import time
from functools import partial
from typing import Any

import pytest
import torch
from tests.support.plain import backward, join, loss_of, mean_gradients, network
from tests.support.ranks import Here, run_ranks
from tests.support.sharing import BOUNDS, expect, sgd
from torch import Tensor, nn

import multiring
import multiring.torch as mt
from multiring import Event


@pytest.mark.parametrize("engine", ["shm", "tcp"])
@pytest.mark.parametrize("bucket_bytes", [1, 700, 25 << 20])
def test_backward_leaves_average(bucket_bytes: int, engine: str) -> None:
    run_ranks(leave_average, 3, bucket_bytes, engine=engine)


def leave_average(here: Here, bucket_bytes: int) -> None:
    join(here)
    model = network()
    optimizer = sgd(model, bucket_bytes=bucket_bytes)
    for set_to_none in (True, False, True):
        backward(loss_of(model, here.rank))
        expect(model, [0, 1, 2])
        places = [each.grad.data_ptr() for each in model.parameters() if each.grad is not None]
        optimizer.synchronize()
        expect(model, [0, 1, 2])
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(loss_of(model, here.rank + 10))
        expect(model, [10, 11, 12])
        optimizer.synchronize()  # like a step, it allows the gradients to be dropped
        # Both times the gradients are in the arena; autograd's own tensors are neither kept nor reduced.
        assert places == [each.grad.data_ptr() for each in model.parameters() if each.grad is not None]
        assert all(place % 64 == 0 for place in places)
        model.zero_grad(set_to_none=not set_to_none)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types(dtype: torch.dtype) -> None:
    run_ranks(leave_average_of, 2, dtype)


def leave_average_of(here: Here, dtype: torch.dtype) -> None:
    join(here)
    model = network(dtype)
    sgd(model)
    backward(loss_of(model, here.rank))
    expect(model, [0, 1], lambda: network(dtype))


def test_types_in_one_model() -> None:
    run_ranks(leave_average_of_mixed_types, 2)


def mixed() -> nn.Module:
    model = network(torch.float32)
    model[5].to(torch.float64)
    model[0].to(torch.bfloat16)
    return model


def mixed_loss(model: nn.Module, seed: int) -> Tensor:
    value = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    for layer in model.children():
        value = layer(value.to(next((each.dtype for each in layer.parameters()), value.dtype)))
    return value.square().mean()


def leave_average_of_mixed_types(here: Here) -> None:
    join(here)
    model = mixed()
    sgd(model, bucket_bytes=64)
    backward(mixed_loss(model, here.rank))
    wanted = mean_gradients(mixed, [lambda model, seed=seed: mixed_loss(model, seed) for seed in range(2)])  # type: ignore[misc]
    for parameter, mean in zip(model.parameters(), wanted, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.dtype == parameter.dtype
        assert torch.allclose(parameter.grad, mean, rtol=BOUNDS[parameter.dtype], atol=1e-4)


def test_strides_are_the_parameters() -> None:
    run_ranks(leave_average_with_strides, 2)


def leave_average_with_strides(here: Here) -> None:
    join(here)
    model = network().to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch has no type for it
    transposed = nn.Linear(3, 5, dtype=torch.float64)
    transposed.weight = nn.Parameter(torch.ones(3, 5, dtype=torch.float64).t())
    model.append(transposed)
    optimizer = sgd(model)
    for _ in range(2):
        backward(loss_of(model[:-1], here.rank) + transposed(torch.full((3,), float(here.rank)).double()).sum())
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert parameter.grad.stride() == parameter.stride()
        expect(model[:-1], [0, 1])
        assert transposed.weight.grad is not None
        assert transposed.weight.grad.eq(0.5).all()
        optimizer.synchronize()
        model.zero_grad(set_to_none=False)


# ---- several backward passes, or none ----


def test_backwards_add_up() -> None:
    run_ranks(add_up, 2)


def add_up(here: Here) -> None:
    join(here)
    for op, scale in (("average", 1.0), ("sum", 2.0)):
        model = network()
        optimizer = sgd(model, op=op, backward_passes_per_step=3)
        for set_to_none in (True, False):
            backward(loss_of(model, here.rank))
            backward(loss_of(model, here.rank + 10))
            expect(model, [here.rank, here.rank + 10], scale=2.0)
            backward(loss_of(model, here.rank + 20))
            expect(model, [0, 1, 10, 11, 20, 21], scale=3 * scale)
            optimizer.synchronize()
            (model if set_to_none else optimizer).zero_grad(set_to_none=set_to_none)
        # Only two of the three backward passes come before the step.
        backward(loss_of(model, here.rank))
        backward(loss_of(model, here.rank + 10))
        optimizer.synchronize()
        expect(model, [0, 1, 10, 11], scale=2 * scale)


def test_backwards_after_a_step_that_was_left_out() -> None:
    run_ranks(leave_step_out, 2)


def leave_step_out(here: Here) -> None:
    """Skip a step without zeroing gradients, as loss scaling may after an overflow."""
    join(here)
    model = network()
    optimizer = sgd(model, backward_passes_per_step=2)
    for seed in (0, 10, 20):
        backward(loss_of(model, here.rank + seed))
        if seed == 10:
            optimizer.synchronize()
    optimizer.synchronize()
    expect(model, [0, 1, 10, 11, 20, 21], scale=3.0)


def test_two_backwards_that_reduce_each() -> None:
    run_ranks(reduce_twice, 3)


def reduce_twice(here: Here) -> None:
    join(here)
    model = network()
    optimizer = sgd(model, bucket_bytes=256)
    backward(loss_of(model, here.rank))
    optimizer.synchronize()
    backward(loss_of(model, here.rank + 10))
    expect(model, [0, 1, 2, 10, 11, 12], scale=2.0)


def test_rank_without_samples_gets_the_others_gradients() -> None:
    run_ranks(step_without_backward, 3)


def step_without_backward(here: Here) -> None:
    join(here)
    model = network()
    optimizer = sgd(model, op="sum")
    for step in range(3):
        if here.rank != step:
            backward(loss_of(model, here.rank))
        optimizer.synchronize()
        expect(model, [rank for rank in range(3) if rank != step], scale=2.0)
        optimizer.zero_grad()


def test_step_reduces_what_a_backward_did_not() -> None:
    digests = run_ranks(step_after_gradients_by_hand, 2)
    assert digests[0] == digests[1] == -0.15


def step_after_gradients_by_hand(here: Here) -> float:
    join(here)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = sgd(model)
    model.weight.grad = torch.full((1, 1), 1.0 + here.rank)
    optimizer.step()
    return round(model.weight.item(), 6)


class Branches(nn.Module):
    """Layers; each forward pass names the layers that it uses, in order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(2, 1, dtype=torch.float64) for _ in range(4))

    def slopes(self) -> list[float | None]:
        """Return one element of each layer's gradient, or None."""
        gradients = [layer.get_parameter("weight").grad for layer in self.layers]
        return [None if each is None else each[0, 0].item() for each in gradients]

    def forward(self, use: list[int], value: float) -> Tensor:
        at = torch.full((2,), value, dtype=torch.float64)
        return torch.stack([self.layers[layer](at).sum() for layer in use]).sum()


def test_parameters_without_a_gradient() -> None:
    run_ranks(use_some, 2)


def use_some(here: Here) -> None:
    join(here)
    for op, divisor in (("average", 2.0), ("sum", 1.0)):
        for bucket_bytes in (1, 100, 1 << 20):
            model = Branches()
            optimizer = sgd(model, op=op, bucket_bytes=bucket_bytes)
            for set_to_none in (True, True):
                backward(model([[0, 1], [2, 1]][here.rank], 1.0 + here.rank))
                # Rank 0 uses layer 0, both ranks use layer 1, rank 1 uses layer 2, and no rank uses layer 3.
                assert model.slopes() == [1 / divisor, 3 / divisor, 2 / divisor, None]
                optimizer.synchronize()
                optimizer.zero_grad(set_to_none=set_to_none)
            for each in model.parameters():
                each.grad = None if here.rank else torch.zeros_like(each)
            backward(model([0], 1.0))
            assert all(each.grad is not None for each in model.parameters())


def test_order_of_gradients_may_differ() -> None:
    run_ranks(arrive_in_any_order, 3)


def arrive_in_any_order(here: Here) -> None:
    join(here)
    model = Branches()
    optimizer = sgd(model, bucket_bytes=1)
    for step in range(4):
        order = [(layer * 3 + here.rank + step) % 4 for layer in range(4)]
        backward(model(order, 1.0 + here.rank))
        assert model.slopes() == [2.0] * 4
        optimizer.synchronize()
        optimizer.zero_grad(set_to_none=bool(step % 2))


def test_two_optimizers_do_not_mix() -> None:
    run_ranks(train_two_models, 2)


def first_layers(seed: int, count: int) -> nn.Module:
    return network(seed=seed)[:count]


def train_two_models(here: Here) -> None:
    group = join(here)
    first, second = network(seed=1), network(seed=2)
    optimizers = sgd(first, bucket_bytes=300), sgd(second, bucket_bytes=300)
    for step in range(4):
        # One backward pass serves both models, in an order that differs between the ranks. At its end, both models
        # still wait for the gradients of their last layers, which were not used.
        used = 7 + step % 2
        losses = {}
        for which in (0, 1) if here.rank else (1, 0):
            losses[which] = loss_of((first, second)[which][:used], here.rank + 5 * which)
        backward(losses[0] + losses[1])
        value = torch.ones(3)
        assert mt.allreduce(value, op="sum").tolist() == [2.0] * 3
        expect(first[:used], [0, 1], partial(first_layers, 1, used))
        expect(second[:used], [5, 6], partial(first_layers, 2, used))
        for optimizer in optimizers:
            optimizer.synchronize()
            optimizer.zero_grad()
    group.barrier()


# ---- during the backward pass ----


class Stamp(torch.autograd.Function):
    """Records the time of its backward pass.

    Before that, it waits until two earlier gradients have been reduced, and keeps the events of that time.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, times: list[float], events: list[Event]) -> Tensor:
        ctx.times, ctx.events = times, events
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        deadline_s = time.monotonic() + 100
        while len(reductions(ctx.events)) < 2:
            assert time.monotonic() < deadline_s, "gradients are not reduced while backward runs"
            time.sleep(0.001)
            ctx.events += multiring.drain_events()
        ctx.times.append(time.monotonic())
        return gradients[0], None, None


def reductions(events: list[Event]) -> list[Event]:
    """Return the all-reduces among the events, in the order of their starts."""
    found = [each for each in events if each.kind == "operation" and each.name == "all_reduce"]
    return sorted(found, key=lambda each: each.operation)


def test_buckets_are_reduced_while_backward_runs() -> None:
    for early, late in run_ranks(note_times, 2):
        assert early == [True, True]
        assert late == [True, True]


def note_times(here: Here) -> tuple[list[bool], list[bool]]:
    join(here)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.Sequential(first, second)
    sgd(model, bucket_bytes=100)
    multiring.drain_events()
    times: list[float] = []
    events: list[Event] = []
    backward(second(Stamp.apply(first(torch.ones(2, 4)), times, events)).sum())  # type: ignore[no-untyped-call]
    operations = reductions(events + multiring.drain_events())
    assert len(operations) == 4
    # The second layer's bias and weight have been reduced before backward reaches the first layer.
    return [each.end_s < times[0] for each in operations[:2]], [each.start_s > times[0] for each in operations[2:]]


def test_one_rank_is_left_alone() -> None:
    run_ranks(train_alone, 1)


def train_alone(here: Here) -> None:
    join(here)
    model = network()
    optimizer = sgd(model, op="sum")
    multiring.drain_events()
    backward(loss_of(model, 0))
    expect(model, [0])
    backward(loss_of(model, 1))
    expect(model, [0, 1], scale=2.0)
    optimizer.step()
    optimizer.zero_grad()
    assert multiring.drain_events() == []
    assert all(not each._post_accumulate_grad_hooks for each in model.parameters())


def test_after_shutdown_and_init() -> None:
    run_ranks(init_again, 2)


def init_again(here: Here) -> None:
    join(here)
    model = network()
    optimizer = sgd(model)
    backward(loss_of(model, here.rank))
    multiring.shutdown()
    expect(model, [0, 1])
    model.zero_grad()
    with pytest.raises(multiring.errors.StateError):
        backward(loss_of(model, here.rank))
    multiring.init()
    model.zero_grad()
    mt.DistributedOptimizer(optimizer, model.named_parameters())
    backward(loss_of(model, here.rank))
    expect(model, [0, 1])
