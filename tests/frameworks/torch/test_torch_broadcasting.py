"""Tests of broadcast_parameters and broadcast_optimizer_state."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.plain import backward, join, loss_of, network
from tests.support.ranks import Here, run_ranks
from torch import nn

import multiring.torch as mt
from multiring.errors import ArgumentError, MismatchError, UnsupportedError


def test_parameters_become_the_roots() -> None:
    run_ranks(broadcast, 3)


def broadcast(here: Here) -> None:
    join(here)
    passed: list[Callable[[nn.Module], Any]] = [
        lambda model: model.state_dict(),
        lambda model: list(model.parameters()),
        lambda model: list(model.named_parameters()),
    ]
    for root, params in enumerate(passed):
        model = network(seed=here.rank)
        mt.broadcast_parameters(params(model), root)
        for parameter, wanted in zip(model.parameters(), network(seed=root).parameters(), strict=True):
            assert torch.equal(parameter, wanted)
            assert parameter.requires_grad


def everything(rank: int) -> dict[str, torch.Tensor]:
    """Return a tensor of every kind that a state_dict may have."""
    generator = torch.Generator().manual_seed(rank)
    found = {
        str(dtype): (torch.randn(3, 5, generator=generator) * 50).to(dtype)
        for dtype in (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.complex64)
    }
    return found | {
        "scalar": torch.randn((), generator=generator),
        "empty": torch.randn(0, 3, generator=generator),
        "with gaps": torch.randn(4, 6, generator=generator)[:, ::2],
        "in another order": torch.randn(2, 3, generator=generator).t()
        if rank
        else torch.randn(3, 2, generator=generator),
    }


def test_every_kind_of_tensor() -> None:
    run_ranks(broadcast_everything, 2)


def broadcast_everything(here: Here) -> None:
    join(here)
    own = everything(here.rank)
    layouts = {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in own.items()}
    mt.broadcast_parameters(own, root_rank=0)
    for name, wanted in everything(0).items():
        assert torch.equal(own[name], wanted), name
        assert (own[name].data_ptr(), own[name].stride()) == layouts[name]


def test_autograd_learns_of_the_change() -> None:
    run_ranks(broadcast_in_forward, 2)


def broadcast_in_forward(here: Here) -> None:
    join(here)
    model = network(seed=here.rank)
    loss = loss_of(model, 0)
    mt.broadcast_parameters(list(model.named_parameters()), root_rank=0)
    if here.rank:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            backward(loss)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, betas=(0.7, 0.8), amsgrad=True),
    "tensor lr": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1)),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_becomes_the_roots(name: str) -> None:
    run_ranks(broadcast_state, 2, name)


def broadcast_state(here: Here, name: str) -> None:
    join(here)
    for has_stepped in ([1], [0], [0, 1], []):
        model = network().to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch lacks a type
        optimizer = OPTIMIZERS[name](model.parameters())
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9 - here.rank / 10)
        if here.rank in has_stepped:
            backward(loss_of(model, here.rank))
            optimizer.step()
        if here.rank == 0:
            optimizer.param_groups[0]["lr"] = 0.001
        kinds = {key: type(value) for key, value in optimizer.param_groups[0].items()}
        if here.rank == 1:
            optimizer.param_groups[0]["lr"] *= 2
        mt.broadcast_optimizer_state(optimizer, root_rank=1)
        mt.broadcast_parameters(model.state_dict(), root_rank=1)
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.2)
        assert optimizer.param_groups[0]["initial_lr"] == pytest.approx(0.1)
        assert {key: type(value) for key, value in optimizer.param_groups[0].items()} | {"lr": 0} == kinds | {"lr": 0}
        # From here on both ranks take the same steps.
        model.zero_grad()
        backward(loss_of(model, 7))
        optimizer.step()
        for parameter in model.parameters():
            assert torch.equal(mt.allreduce(parameter.detach(), op="min"), mt.allreduce(parameter.detach(), op="max"))
            for each in optimizer.state[parameter].values():
                if isinstance(each, torch.Tensor):
                    assert torch.equal(mt.allreduce(each, op="min"), mt.allreduce(each, op="max"))


def test_bad_parameters() -> None:
    run_ranks(misuse_parameters, 3)


def misuse_parameters(here: Here) -> None:
    join(here)
    here_only = [{"a": torch.ones(2)}, {"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(1)}][here.rank]
    shapes = {"a": torch.ones(1), "b": torch.ones(2 + (here.rank == 1))}
    types = {"a": torch.ones(1, dtype=torch.float64 if here.rank == 0 else torch.float32)}
    mixed: dict[str, Any] = {"a": torch.ones(1), "b": "text"}
    copied: dict[str, Any] = {"a": torch.ones(1), "layer._extra_state": torch.ones(1)}
    bad: list[tuple[Any, int, type[Exception], str]] = [
        (
            here_only,
            0,
            MismatchError,
            r"the ranks differ in item 3 of 3: rank 2: b, float32 of shape \(1,\).*; ranks 0, 1: nothing more",
        ),
        (shapes, 0, MismatchError, r"rank 1: b, float32 of shape \(3,\).*; ranks 0, 2: b, float32 of shape \(2,\)"),
        (types, 0, MismatchError, r"rank 0: a, float64 of shape \(1,\).*; ranks 1, 2: a, float32"),
        ({}, here.rank, MismatchError, r"rank 0: root_rank=0; rank 1: root_rank=1; rank 2: root_rank=2"),
        ({}, 3, ArgumentError, r"root_rank=3: want one of the set's ranks, \[0, 1, 2\]"),
        (mixed, 0, ArgumentError, "b is a str; want a tensor"),
        (copied, 0, ArgumentError, "layer._extra_state is a copy .* pass the model itself"),
        (
            (each for each in ""),
            0,
            ArgumentError,
            "invalid params of type: generator; want a model, a state_dict, or a list",
        ),
        ({"a": torch.ones(1, device="meta")}, 0, UnsupportedError, "a is on meta"),
        ({"a": torch.eye(2).to_sparse()}, 0, UnsupportedError, "a is sparse_coo"),
    ]
    for params, root, kind, text in bad:
        with pytest.raises(kind, match=text):
            mt.broadcast_parameters(params, root)
    # If only one rank is wrong, the other ranks get an error, too.
    with pytest.raises(ArgumentError if here.rank == 1 else MismatchError, match="want a tensor"):
        mt.broadcast_parameters(mixed if here.rank == 1 else {"a": torch.ones(1)}, 0)
    value = torch.full((2,), float(here.rank))
    mt.broadcast_parameters({"a": value}, 2)
    assert value.tolist() == [2.0, 2.0]


def test_bad_optimizers() -> None:
    run_ranks(misuse_optimizers, 2)


def misuse_optimizers(here: Here) -> None:
    join(here)
    weight = nn.Parameter(torch.ones(3))
    other = nn.Parameter(torch.ones(3 + here.rank))
    classes = torch.optim.Adam([weight]) if here.rank else torch.optim.SGD([weight])
    strange = torch.optim.SGD([weight])
    strange.param_groups[0]["mine"] = [{"deep": {1, 2}}]
    bad: list[tuple[torch.optim.Optimizer, int, type[Exception], str]] = [
        (classes, 0, MismatchError, "rank 0: root_rank=0, optimizer SGD; rank 1: root_rank=0, optimizer Adam"),
        (torch.optim.SGD([other]), 0, MismatchError, r"rank 0: group 0, parameter of float32 of shape \(3,\)"),
        (torch.optim.LBFGS([weight]), 0, ArgumentError, "cannot broadcast torch.optim.LBFGS state"),
        (classes, 2, ArgumentError, r"root_rank=2: want one of the set's ranks, \[0, 1\]"),
    ]
    for optimizer, root, kind, text in bad:
        with pytest.raises(kind, match=text):
            mt.broadcast_optimizer_state(optimizer, root)
    with pytest.raises(
        MismatchError if here.rank else UnsupportedError, match=r"\['mine'\]\[0\]\['deep'\] is a set; want"
    ):
        mt.broadcast_optimizer_state(strange, 0)
