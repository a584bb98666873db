"""allreduce: new tensors and in place, with gradients."""

from typing import Any

import pytest
import torch
from tests.frameworks.plain import backward, join
from tests.wire.ranks import Here, run_ranks

import multiring.torch as mt
from multiring.errors import ArgumentError, MismatchError, UnsupportedError

COMBINED: dict[str, Any] = {
    "average": lambda tensors: torch.stack(tensors).double().mean(0),
    "sum": lambda tensors: torch.stack(tensors).sum(0),
    "min": lambda tensors: torch.stack(tensors).amin(0),
    "max": lambda tensors: torch.stack(tensors).amax(0),
    "product": lambda tensors: torch.stack(tensors).prod(0),
}


def tensors(dtype: torch.dtype, shape: tuple[int, ...], ranks: int) -> list[torch.Tensor]:
    """Return each rank's tensor: small integers, so that every type holds every result."""
    return [
        torch.randint(1, 4, shape, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(ranks)
    ]


def test_combines() -> None:
    run_ranks(combine, 3)


def combine(here: Here) -> None:
    join(here)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        for op, combined in COMBINED.items():
            if op == "average" and not dtype.is_floating_point:
                continue
            for shape in ((), (0, 3), (5,), (4, 3, 2)):
                everyones = tensors(dtype, shape, here.size)
                own, wanted = everyones[here.rank], combined(everyones).to(dtype)
                before = own.clone()
                for given in (own, own.movedim(0, -1).clone().movedim(-1, 0) if shape else own):
                    reduced = mt.allreduce(given, op=op)
                    assert reduced.dtype == dtype
                    assert torch.equal(reduced, wanted)
                    assert torch.equal(given, before)
                assert mt.allreduce_(own, op=op) is own
                assert torch.equal(own, wanted)
    with_gaps = torch.arange(12.0).reshape(3, 4)[:, ::2] * here.rank
    assert torch.equal(mt.allreduce(with_gaps, op="sum"), 3 * torch.arange(12.0).reshape(3, 4)[:, ::2])


def test_is_differentiable() -> None:
    assert run_ranks(differentiate, 3) == [[2.0, 1.0 + 2 + 3]] * 3


def differentiate(here: Here) -> list[float]:
    join(here)
    found = []
    for op in ("average", "sum"):
        value = torch.ones(2, requires_grad=True)
        backward((mt.allreduce(value, op=op) * (1 + here.rank)).sum())
        assert value.grad is not None
        found.append(value.grad[0].item())
    with torch.no_grad():
        assert not mt.allreduce(value, op="max").requires_grad
        mt.allreduce_(value)
    return found


def test_autograd_learns_of_changes_in_place() -> None:
    run_ranks(change_in_place, 2)


def change_in_place(here: Here) -> None:
    join(here)
    factor, weight = torch.ones(3), torch.ones(3, requires_grad=True)
    product = (factor * weight).sum()
    mt.allreduce_(factor)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(product)


def test_bad_arguments() -> None:
    run_ranks(misuse, 2)


def misuse(here: Here) -> None:
    join(here)
    good = torch.full((2,), float(here.rank))
    bad: list[tuple[Any, str, type[Exception], str]] = [
        (
            torch.ones(2, requires_grad=True),
            "max",
            UnsupportedError,
            r"allreduce 'max' of a tensor that requires a gradient",
        ),
        (torch.ones(2, device="meta"), "sum", UnsupportedError, "tensor is on meta; multiring moves host memory only"),
        (torch.eye(2).to_sparse(), "sum", UnsupportedError, "tensor is sparse_coo; want a dense tensor"),
        (torch.ones(2, dtype=torch.complex64), "sum", ArgumentError, "complex64: want one of"),
        (torch.ones(2), "mean", ArgumentError, "'mean'"),
        (torch.ones(2 + here.rank), "sum", MismatchError, r"rank 0: .*\(2,\).*rank 1: .*\(3,\)"),
    ]
    for tensor, op, kind, text in bad:
        before = tensor.clone()
        with pytest.raises(kind, match=text):
            mt.allreduce(tensor, op=op)
        if not tensor.is_sparse and tensor.device.type == "cpu":
            assert torch.equal(tensor, before)
    with pytest.raises(UnsupportedError, match="allreduce_ of a tensor that requires a gradient"):
        mt.allreduce_(torch.ones(2, requires_grad=True))
    with pytest.raises(ArgumentError, match="has gaps"):
        mt.allreduce_(torch.ones(4)[::2])
    assert mt.allreduce(good).tolist() == [0.5, 0.5]
