"""Adasum in multiring.torch: each tensor is one vector in every call and order."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.plain import enter
from tests.support.ranks import Here, run_ranks
from torch import Tensor

import multiring.torch as mt
from multiring._frontend.adasum import adasum
from multiring.errors import ArgumentError

BOUNDS = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
SHAPES: tuple[tuple[int, ...], ...] = ((4, 3), (), (700,), (0,))


def tensors_of(rank: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def wanted_of(ranks: list[int], dtype: torch.dtype) -> list[Tensor]:
    """Return NumPy's Adasum of all ranks' tensors, computed in float64."""
    columns = zip(*(tensors_of(rank, dtype) for rank in ranks), strict=True)
    return [
        torch.from_numpy(adasum([each.double().reshape(-1).numpy() for each in column])).view(column[0].shape)
        for column in columns
    ]


def check(found: Tensor, wanted: Tensor) -> None:
    error = float((found.double() - wanted).norm())
    assert error <= BOUNDS[found.dtype] * float(wanted.norm())
    if found.numel():
        assert torch.equal(mt.allreduce(found, op=mt.Min), mt.allreduce(found, op=mt.Max))


def test_adasum_of_tensors() -> None:
    run_ranks(add_up, 3)


def add_up(here: Here) -> None:
    pair = mt.ProcessSet([0, 2])
    enter(process_sets=[pair])
    for dtype in BOUNDS:
        wanted = wanted_of([0, 1, 2], dtype)
        mine = tensors_of(here.rank, dtype)
        handles = [mt.allreduce_async(each, op=mt.Adasum) for each in mine]
        results: list[Any] = [mt.synchronize(handle) for handle in handles]
        results += mt.grouped_allreduce(mine, op=mt.Adasum)
        for found, exact in zip(results, 2 * wanted, strict=True):
            assert found.dtype == dtype
            check(found, exact)
        for each, before in zip(mine, tensors_of(here.rank, dtype), strict=True):
            assert torch.equal(each, before)
            assert mt.allreduce_(each, op="adasum") is each
        for found, exact in zip(mine, wanted, strict=True):
            check(found, exact)
        mine[0] = mine[0].t()  # not contiguous, so multiring copies it
        mt.allreduce_(mine[0], op=mt.Adasum)
    if here.rank != 1:
        for each, exact in zip(tensors_of(here.rank, torch.float32), wanted_of([0, 2], torch.float32), strict=True):
            found = mt.allreduce(each, op=mt.Adasum, process_set=pair)
            assert float((found.double() - exact).norm()) <= 1e-6 * float(exact.norm())
    with pytest.raises(ArgumentError, match="floating"):
        mt.allreduce(torch.ones(2, dtype=torch.int32), op=mt.Adasum)


def test_ranks_in_different_orders() -> None:
    run_ranks(add_up_in_any_order, 3)


def add_up_in_any_order(here: Here) -> None:
    enter()
    wanted = wanted_of([0, 1, 2], torch.float32)
    for turn in range(3):
        mine = dict(enumerate(tensors_of(here.rank, torch.float32)))
        order = np.random.default_rng([here.rank, turn]).permutation(len(mine)).tolist()
        handles = {index: mt.allreduce_async(mine[index], name=f"tensor {index}", op=mt.Adasum) for index in order}
        results = {index: mt.synchronize(handle) for index, handle in handles.items()}
        for index, exact in enumerate(wanted):
            error = float((results[index].double() - exact).norm())
            assert error <= 1e-6 * float(exact.norm())
    # If the ranks' operations differ, they raise an error, and the next operation works.
    with pytest.raises(mt.HorovodInternalError, match="Mismatched"):
        mt.allreduce(torch.ones(3), name="odd", op=mt.Sum if here.rank == 1 else mt.Adasum)
    assert mt.allreduce(torch.full((2,), 2.0), op=mt.Adasum).tolist() == [2.0, 2.0]
