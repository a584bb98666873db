"""Collectives with read-only inputs and separate outputs, as frameworks with immutable arrays need them."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.ranks import Here, run_ranks

from multiring.errors import ArgumentError, MismatchError

Array = NDArray[Any]


def frozen(
    array: Array,
) -> Array:
    array.flags.writeable = False
    return array


def reduce_and_broadcast(here: Here) -> None:
    group = here.join()
    for shape in [(0,), (5,), (3, 4), (300, 1000)]:
        for order in ("C", "F"):
            own: Array = frozen(np.full(shape, here.rank + 1.0, np.float32, "C" if order == "C" else "F"))
            out: Array = group.allocate(shape, np.float32) if order == "C" else np.empty(shape, np.float32, "F")
            for _ in range(3):  # a repeated call runs on another code path
                assert group.all_reduce(own, out=out) is out
                assert (out == here.size * (here.size + 1) / 2).all()
                out[...] = own
                group.all_reduce(out)
                assert (out == here.size * (here.size + 1) / 2).all()
            assert group.broadcast_async(own, here.size - 1, out=out).wait() is out
            assert (out == here.size).all()
            assert (own == here.rank + 1).all()
    # One rank reduces in place and the others do not: the results are the same.
    own = np.full(100, here.rank + 1.0)
    out = own if here.rank else np.empty(100)
    group.all_reduce_async(own, "max", out=out).wait()
    assert (out == here.size).all()
    own = np.arange(4.0) + here.rank
    assert group.all_reduce(own, out=own) is own


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_arrays_are_only_read(engine: str) -> None:
    run_ranks(reduce_and_broadcast, 3, engine=engine)


def bring_what_does_not_fit(here: Here) -> None:
    group = here.join()
    own = np.zeros((6, 4), np.float32)
    whole = np.zeros(48, np.float32)
    for out, words in [
        (np.zeros((4, 6), np.float32), "want shape"),
        (np.zeros((6, 4), np.float64), "want shape"),
        (np.zeros((6, 4), np.float32, order="F"), "order of"),
        (frozen(np.zeros((6, 4), np.float32)), "read-only"),
    ]:
        with pytest.raises(ArgumentError if here.rank == 0 else MismatchError, match=words):
            group.all_reduce(own, out=out if here.rank == 0 else np.empty_like(own))
    with pytest.raises(ArgumentError, match="shares a part"):
        group.broadcast(whole[:24], out=whole[4:28])
    group.all_reduce(own)


def test_what_does_not_fit_is_told_to_all() -> None:
    run_ranks(bring_what_does_not_fit, 2)
