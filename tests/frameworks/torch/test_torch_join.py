"""join: ranks without data beside ranks with data, and operations in any order."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.plain import enter
from tests.support.ranks import Here, run_ranks
from torch import Tensor

import multiring.torch as mt

# The results of operations in which one of three ranks has joined and the others contribute 2.
JOINED: dict[str, Callable[[torch.dtype], Tensor]] = {
    "Average": lambda dtype: torch.tensor(4 / 3, dtype=torch.float64).to(dtype),
    "Sum": lambda dtype: torch.tensor(4).to(dtype),
    "Min": lambda dtype: torch.tensor(2).to(dtype),
    "Max": lambda dtype: torch.tensor(2).to(dtype),
    "Product": lambda dtype: torch.tensor(4).to(dtype),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
REFUSED: dict[str, Callable[[Tensor], object]] = {
    "allgather": mt.allgather,
    "broadcast": lambda tensor: mt.broadcast(tensor, 1),
    "alltoall": mt.alltoall,
    "reducescatter": mt.reducescatter,
    "allreduce": lambda tensor: mt.allreduce(tensor, op=mt.Adasum),
}


def test_who_has_joined_changes_nothing() -> None:
    lasts = run_ranks(join_early, 3)
    assert lasts == lasts[:1] * 3
    assert all(last != first for first, last in enumerate(lasts[0]))


def join_early(here: Here) -> list[int]:
    enter()
    lasts = []
    for first in range(3):
        if here.rank != first:
            reduce_beside_joined()
        lasts.append(mt.join())
        # All ranks take part again, and their unnamed operations still match.
        assert mt.allreduce(torch.ones(1), op=mt.Sum).item() == 3.0
    return lasts


def reduce_beside_joined() -> None:
    for dtype in DTYPES:
        for name, wanted in JOINED.items():
            tensor = torch.full((2, 3), 2, dtype=dtype)
            op = getattr(mt, name)
            found = [mt.allreduce(tensor, op=op), *mt.grouped_allreduce([tensor, tensor[0]], op=op, name=name)]
            for each in found:
                assert torch.allclose(each, wanted(dtype).expand_as(each)), (name, dtype, each)
    bools = torch.tensor([True, False])
    assert mt.allreduce(bools, op=mt.Min).tolist() == [True, False]
    assert mt.allreduce(bools, op=mt.Max).tolist() == [True, False]
    complex_sum = mt.allreduce(torch.full((2,), 1 + 2j), op=mt.Sum, prescale_factor=0.5, postscale_factor=2.0)
    assert complex_sum.tolist() == [2 + 4j] * 2
    assert mt.allreduce(torch.full((2,), -3), op=mt.Average, postscale_factor=2.0).tolist() == [-4, -4]
    mt.barrier()


def test_what_needs_everybody_says_so() -> None:
    run_ranks(refuse_beside_joined, 2)


def refuse_beside_joined(here: Here) -> None:
    enter()
    if here.rank:
        for name, call in REFUSED.items():
            with pytest.raises(mt.HorovodInternalError, match=f"{name} is not supported with Join at this time"):
                call(torch.ones(2))
        with pytest.raises(mt.HorovodInternalError, match="sparse allreduce is not supported with Join"):
            mt.sparse_allreduce_async(torch.eye(2).to_sparse(), None, mt.Sum)()
        assert mt.allreduce(torch.ones(1), op=mt.Sum).item() == 1.0
    assert mt.join() in (0, 1)
    assert mt.allgather(torch.ones(1)).tolist() == [1.0, 1.0]


def test_orders_may_differ() -> None:
    run_ranks(submit_in_any_order, 3)


def submit_in_any_order(here: Here) -> None:
    enter()
    names = ["a", "b", "c", "d"]
    for turn in range(6):
        order = names[(here.rank * turn) % 4 :] + names[: (here.rank * turn) % 4]
        handles: dict[str, Any] = {}
        for name in order:
            handles[name] = mt.allreduce_async(torch.full((3,), float(ord(name))), op=mt.Sum, name=name)
        for name, handle in handles.items():
            assert mt.synchronize(handle).tolist() == [3.0 * ord(name)] * 3
    with pytest.raises(mt.HorovodInternalError, match="Mismatched data types"):
        mt.allreduce(torch.ones(1, dtype=torch.float64 if here.rank else torch.float32), name="type")
    assert mt.allreduce(torch.ones(1)).item() == 1.0


def test_the_last_to_join_is_named_though_nothing_came_between() -> None:
    orders = [(2, 0, 1), (1, 2, 0), (0, 1, 2), (1, 0, 2)]
    assert run_ranks(join_in_turn, 3, orders) == [[order[-1] for order in orders]] * 3


def join_in_turn(here: Here, orders: list[tuple[int, ...]]) -> list[int]:
    enter()
    lasts = []
    for order in orders:
        mt.barrier()
        time.sleep(0.5 * order.index(here.rank))  # a busy machine may hold a rank for a while
        lasts.append(mt.join())
    return lasts
