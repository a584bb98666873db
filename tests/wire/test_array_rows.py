"""Collectives of NumPy arrays that divide rows, and of several arrays, against NumPy in one process."""

import itertools
from typing import Any

import numpy as np
import pytest
from tests.support.nursery import Here
from tests.support.ranks import run_ranks

from multiring._frontend import array_collectives, array_rows, joining, lifecycle
from multiring._frontend.process_sets import ProcessSet
from multiring._frontend.requests import error_of
from multiring.errors import ArgumentError, MismatchError

RANKS = 3


def of_rank(rank: int, rows: int, dtype: str = "float32", seed: int = 0) -> Any:
    return np.random.default_rng([seed, rank]).integers(-50, 50, (rows, 2)).astype(dtype)


def everything(here: Here) -> None:
    pair = ProcessSet([0, 2])
    lifecycle.init(process_sets=[pair])
    scatter(here.rank, pair)
    exchange(here.rank)
    several(here.rank)
    refuse()
    if here.rank == 0:
        assert array_collectives.allreduce(np.ones(1), "sum").tolist() == [1.0]  # the other ranks have joined
    joining.join()


def scatter(own: int, pair: ProcessSet) -> None:
    for dtype, op in itertools.product(("float32", "int64", "float16"), ("sum", "average")):
        all_of = [of_rank(rank, 7, dtype) for rank in range(RANKS)]
        whole = np.sum(all_of, axis=0, dtype="f8") / (1 if op == "sum" else RANKS)
        wanted = np.array_split(np.trunc(whole) if dtype == "int64" else whole, RANKS)[own]
        found = array_rows.reducescatter(all_of[own], op)
        assert found.dtype == dtype
        np.testing.assert_allclose(found.astype("f8"), wanted, rtol=2e-3 if dtype == "float16" else 1e-6)
    np.testing.assert_allclose(array_rows.reducescatter(np.full((3, 1), own + 1.0)), [[2.0]])  # averages by default
    if own != 1:
        assert array_rows.reducescatter(np.arange(2.0), "sum", process_set=pair).tolist() == [2.0 * (own // 2)]
    with pytest.raises(MismatchError, match="average") as told:
        array_rows.reducescatter(np.ones(3), "average" if own else "sum")
    assert error_of(told.value) is told.value
    with pytest.raises(ArgumentError, match="want Average or Sum"):
        array_rows.reducescatter(np.ones(3), "max")


def exchange(own: int) -> None:
    splits = [[(sender + receiver) % 3 for receiver in range(RANKS)] for sender in range(RANKS)]
    sent = [of_rank(rank, sum(splits[rank]) + 1, seed=1) for rank in range(RANKS)]  # the last row is not sent
    starts = [np.cumsum([0, *each]) for each in splits]
    wanted = np.concatenate([sent[rank][starts[rank][own] : starts[rank][own + 1]] for rank in range(RANKS)])
    rows, counts = array_rows.alltoall(sent[own], splits[own])
    np.testing.assert_array_equal(rows, wanted)
    assert counts.tolist() == [each[own] for each in splits]
    again, _ = array_rows.alltoall(sent[own], np.array(splits[own]))
    np.testing.assert_array_equal(again, wanted)
    assert array_rows.alltoall(np.arange(3) + 10 * own).tolist() == [own, 10 + own, 20 + own]
    wrongs: list[Any] = [[1, 2], [1, -1, 0], [9, 9, 9], [1.5, 0, 0], np.ones(3)]
    for wrong in wrongs:
        with pytest.raises(ArgumentError, match="splits="):
            array_rows.alltoall(sent[own], wrong)
    with pytest.raises(ArgumentError, match="want a multiple of 3"):
        array_rows.alltoall(np.ones(4))


def several(own: int) -> None:
    both = [np.full(2, own), np.full((1, 2), own + 0.5)]
    assert [each.tolist() for each in array_rows.grouped_allreduce(both, "sum")] == [[3, 3], [[4.5, 4.5]]]
    assert [len(each) for each in array_rows.grouped_allgather(both)] == [6, 3]
    assert [len(each) for each in array_rows.grouped_reducescatter([np.ones(3), np.ones(6)])] == [1, 2]
    for _ in range(2):  # the names of a failed call can be used again
        with pytest.raises(MismatchError, match="shape"):
            array_rows.grouped_allreduce([np.ones(2 + own), np.ones(3)], name="same")
        with pytest.raises(MismatchError, match="shape"):
            array_rows.grouped_reducescatter([np.ones((3, 1 + own)), np.ones(3)], name="same")
    with pytest.raises(ArgumentError):  # refused at its second array
        array_rows.grouped_allreduce([np.ones(2), np.array(["text"])], name="same")
    memory = np.full(2, own)
    assert array_rows.broadcast_(memory, 2) is memory
    assert memory.tolist() == [2, 2]
    found = array_rows.gather({"b": np.full(own, own), "a": ([own], np.ones((0, 2)))})
    assert found["b"].tolist() == [1, 2, 2]
    assert found["a"][0] == [0, 1, 2]
    assert found["a"][1].shape == (0, 2)


def refuse() -> None:
    formers: dict[str, tuple[Any, str]] = {
        "wire": (array_collectives.allreduce, "compression"),
        "root": (array_collectives.broadcast, "root_rank"),
    }
    for name, (call, now) in formers.items():
        with pytest.raises(TypeError, match=f"no argument '{name}', which is called '{now}' now: write {now}=1"):
            call(np.ones(1), **{name: 1})
    with pytest.raises(ArgumentError, match="compression='fp8': want one of none, fp16, bf16, int8"):
        array_collectives.allreduce(np.ones(1, "f4"), compression="fp8")


def test_rows_and_groups_are_numpys() -> None:
    run_ranks(everything, RANKS)
