"""Errors of DistributedOptimizer and of backward passes, on every rank."""

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from tests.support.faults import kill
from tests.support.plain import backward, join, loss_of, network
from tests.support.ranks import Here, report_of, run_ranks
from tests.support.sharing import expect, sgd
from torch import Tensor, nn

import multiring
import multiring.torch as mt
from multiring._frontend.handles import submit_failure
from multiring._frontend.process_sets import members_of
from multiring.errors import ArgumentError, MismatchError, MultiringError, PeerLostError, StateError, UnsupportedError

Wrong = tuple[Callable[[], object], type[MultiringError], str]


def parameters(*shapes: tuple[int, ...], **options: Any) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape, **options)) for shape in shapes]


def wrap(shared: list[nn.Parameter], names: str = "abc", **options: Any) -> torch.optim.Optimizer:
    return mt.DistributedOptimizer(torch.optim.SGD(shared), list(zip(names, shared, strict=False)), **options)


def check(wrong: list[Wrong]) -> None:
    """Check that each call raises its error, and that the group works afterwards."""
    for call, kind, text in wrong:
        with pytest.raises(kind, match=text):
            call()
        assert mt.allreduce(torch.ones(1)).item() == 1.0


def test_ranks_that_differ() -> None:
    run_ranks(differ, 3)


def differ(here: Here) -> None:
    join(here)
    odd = here.rank == 1
    tail = r"ranks 0, 2: a, float32 of shape \(2,\) with strides \(1,\)"
    check(
        [
            (
                lambda: wrap(parameters((3 if odd else 2,))),
                MismatchError,
                rf"the ranks differ in item 2 of 2: rank 1: a, float32 of shape \(3,\).*; {tail}",
            ),
            (
                lambda: wrap(parameters((2,), dtype=torch.float64 if odd else None)),
                MismatchError,
                f"rank 1: a, float64.*; {tail}",
            ),
            (lambda: wrap(parameters((2,)), "x" if odd else "a"), MismatchError, f"rank 1: x, float32.*; {tail}"),
            (
                lambda: wrap(parameters((2,), *[(1,)] * odd)),
                MismatchError,
                "the ranks differ in item 3 of 3: rank 1: b, .*; ranks 0, 2: nothing more",
            ),
            (
                lambda: wrap([nn.Parameter(torch.ones(2, 3) if odd else torch.ones(3, 2).t())]),
                MismatchError,
                r"rank 1: a, float32 of shape \(2, 3\) with strides \(3, 1\).*; ranks 0, 2: .* with strides \(1, 2\)",
            ),
            (
                lambda: wrap(parameters((2,)), op="sum" if odd else "average"),
                MismatchError,
                "rank 1: op='sum', bucket_bytes=26214400, backward_passes_per_step=1; ranks 0, 2: op='average'",
            ),
            # If only one rank is wrong, the other ranks get an error, too.
            (
                lambda: wrap(parameters((2,)), op="max" if odd else "sum"),
                ArgumentError if odd else MismatchError,
                "op='max': want one of average, sum",
            ),
        ]
    )


def test_bad_arguments() -> None:
    run_ranks(misuse, 2)


def misuse(here: Here) -> None:
    join(here)
    shared = parameters((2,), (3,))
    unnamed: Any = shared
    check(
        [
            (lambda: wrap(shared, op="max"), ArgumentError, "op='max'"),
            (lambda: wrap(shared, bucket_bytes=0), ArgumentError, "bucket_bytes=0, backward_passes_per_step=1: want 1"),
            (lambda: wrap(shared, bucket_bytes=1.5), ArgumentError, "bucket_bytes=1.5"),
            (lambda: wrap(shared, backward_passes_per_step=-1), ArgumentError, "backward_passes_per_step=-1"),
            (lambda: wrap(shared, "aa"), ArgumentError, "named_parameters has a 2 times"),
            (
                lambda: wrap(shared, "a"),
                ArgumentError,
                re.escape('lacks the optimizer\'s param_groups[0]["params"][1], float32'),
            ),
            (
                lambda: mt.DistributedOptimizer(torch.optim.SGD(shared), unnamed),
                ArgumentError,
                r"named_parameters has a Parameter; want \(name, tensor\)",
            ),
            (lambda: wrap(parameters((2,), dtype=torch.complex64)), ArgumentError, "complex64: want one of"),
            (
                lambda: wrap(parameters((2,), device="meta")),
                UnsupportedError,
                "parameter a is on meta and has no values yet",
            ),
            (lambda: mt.DistributedOptimizer(torch.optim.LBFGS(shared)), UnsupportedError, "LBFGS decides by the loss"),
        ]
    )
    multiring.shutdown()
    with pytest.raises(StateError, match=r"call multiring\.init"):
        wrap(shared)


def test_parameters_of_two_optimizers() -> None:
    run_ranks(share_partly, 2)


def share_partly(here: Here) -> None:
    join(here)
    a, b, c = parameters((1,), (1,), (1,))
    first = wrap([a, b])
    check(
        [
            (
                lambda: wrap([b, c], "bc"),
                ArgumentError,
                "parameter b is shared by another DistributedOptimizer, which has a too",
            )
        ]
    )
    backward((a + b) * (1.0 + here.rank))
    assert (a.grad, b.grad) == (torch.tensor([1.5]), torch.tensor([1.5]))
    del first
    second = wrap([b, c], "bc")
    second.zero_grad()
    backward((a + b + c) * (1.0 + here.rank))
    assert (b.grad, c.grad) == (torch.tensor([1.5]), torch.tensor([1.5]))
    assert a.grad == torch.tensor([2.5 + here.rank])  # no optimizer shares `a` any more


def test_gradients_that_cannot_be_shared() -> None:
    run_ranks(refuse_gradients, 2)


def refuse_gradients(here: Here) -> None:
    join(here)
    model = network()
    sgd(model)
    halved = network()
    sgd(halved)
    halved.float()
    check(
        [
            (lambda: backward(loss_of(model, 0), create_graph=True), UnsupportedError, r"create_graph=True"),
            (
                lambda: backward(loss_of(halved, 0)),
                StateError,
                r"is float32 of shape .* but was float64 of shape .* was made; make it anew",
            ),
        ]
    )


def test_what_was_frozen_is_not_forgotten() -> None:
    run_ranks(step_with_unshared, 2)


def step_with_unshared(here: Here) -> None:
    join(here)
    model = network()
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    model[0].requires_grad_(True)
    backward(loss_of(model, here.rank))
    check([(optimizer.step, StateError, r"a parameter, float64 of shape \(3, 1, 3, 3\), has a gradient now")])


def test_sums_are_not_summed_again() -> None:
    run_ranks(sum_twice, 2)


def sum_twice(here: Here) -> None:
    join(here)
    for repeat in (lambda model, _: backward(loss_of(model, 1)), lambda _, optimizer: optimizer.step(), by_part):
        model = network()
        optimizer = sgd(model, op="sum")
        backward(loss_of(model, here.rank))
        optimizer.step()
        check([(lambda: repeat(model, optimizer), StateError, "is a sum over the ranks already; .* count it 2 times")])  # noqa: B023
    # Gradients that the optimizer zeroed, or that the program set to None, count as new.
    model = network()
    optimizer = sgd(model, op="sum")
    for zero in (lambda: optimizer.zero_grad(set_to_none=False), model.zero_grad, optimizer.zero_grad):
        backward(loss_of(model, here.rank))
        expect(model, [0, 1], scale=2.0)
        optimizer.synchronize()
        zero()


def by_part(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    """Compute new gradients for one part; the other part keeps the old sums."""
    model[7].zero_grad()  # type: ignore[index] # model is a Sequential
    backward(model[7](torch.ones(1, 7).double()).sum())  # type: ignore[index] # model is a Sequential


class Broken(torch.autograd.Function):
    """An identity function that raises an error in its backward pass."""

    @staticmethod
    def forward(_ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> Tensor:
        raise ZeroDivisionError


def test_backward_that_breaks_off() -> None:
    run_ranks(break_off, 2)


def break_off(here: Here) -> None:
    join(here)
    images = torch.randn(2, 1, 4, 4, dtype=torch.float64)
    for goes_on in (lambda model, _: backward(loss_of(model, 0)), lambda _, optimizer: optimizer.step()):
        model = network()
        optimizer = sgd(model, bucket_bytes=1)
        before = model.state_dict()
        with pytest.raises(ZeroDivisionError):
            backward(model[2:](Broken.apply(model[:2](images))).sum())  # type: ignore[no-untyped-call]
        check([(lambda: goes_on(model, optimizer), StateError, "make the DistributedOptimizer anew on every rank")])  # noqa: B023
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        mt.DistributedOptimizer(optimizer, model.named_parameters())
        model.zero_grad()
        backward(loss_of(model, here.rank))
        expect(model, [0, 1])


def test_reentrant_checkpoints_that_cannot_be_told_apart() -> None:
    run_ranks(reenter, 2)


def reenter(here: Here) -> None:
    join(here)
    layer, unused = nn.Linear(2, 2), nn.Linear(2, 2)
    value = torch.ones(1, 2, requires_grad=True)

    def run(use_reentrant: bool, times: int) -> None:  # noqa: FBT001
        found = value
        for _ in range(times):
            found = torch.utils.checkpoint.checkpoint(layer, found, use_reentrant=use_reentrant)
        backward(found.sum())

    optimizer = sgd(nn.ModuleList([layer, unused]))
    run(use_reentrant=False, times=2)
    optimizer.step()
    check(
        [
            (
                lambda: run(use_reentrant=True, times=2),
                StateError,
                "got a second gradient before the backward .* had ended",
            )
        ]
    )
    optimizer = mt.DistributedOptimizer(optimizer)
    optimizer.zero_grad()
    run(use_reentrant=True, times=1)
    check([(optimizer.step, StateError, r"ended within a reentrant checkpoint \(pass use_reentrant=False\)")])


def test_death_ends_backward_on_the_other_ranks() -> None:
    report = report_of(train_until_death, 3, faults=[kill(1).at("training").after(0.1)])
    for outcome in report.outcomes:
        if outcome.rank != 1:
            assert isinstance(outcome.error, PeerLostError)
            assert "rank 1" in str(outcome.error)


def train_until_death(here: Here) -> None:
    join(here)
    model = network()
    optimizer = sgd(model)
    here.reach("training")
    while True:
        backward(loss_of(model, here.rank))
        optimizer.step()
        optimizer.zero_grad()


def fail_twice(here: Here) -> list[str]:
    """Return the errors of two all-reduces of one name that rank 1 cannot prepare."""
    join(here)
    told = []
    for text in ("first", "second"):
        if here.rank == 1:  # the second report comes while the first one is in flight
            submit_failure(members_of(mt.global_process_set), "allreduce.x", f"allreduce that failed: {text}")
            continue
        time.sleep(0.5)
        with pytest.raises(MismatchError) as error:
            mt.allreduce(torch.ones(1), name="x")
        told.append(str(error.value))
    assert mt.allreduce(torch.ones(1), name="x", op=mt.Sum).item() == here.size
    return told


def test_two_reports_of_one_name_reach_the_others() -> None:
    first, none = run_ranks(fail_twice, 2)
    assert none == []
    assert ["allreduce that failed: first" in first[0], "allreduce that failed: second" in first[1]] == [True, True]
