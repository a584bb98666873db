"""An error of CUDA that does not stay, at any call of an engine on one rank, ends on all ranks in bounded time."""

from typing import Any

import numpy as np
import pytest
from tests.standin.build import built
from tests.standin.loading import runtime
from tests.support.cuda_ranks import device_array, open_engine
from tests.support.ranks import Here, run_ranks

from multiring import Group
from multiring._runtime.engines.nccl import NcclEngine
from multiring._runtime.engines.staged import StagedEngine
from multiring.errors import MultiringError

ENGINES = {"nccl": NcclEngine, "staged": StagedEngine}
INVALID_VALUE = 1
STRIDE = {"nccl": 3, "staged": 1}  # an engine of NCCL polls its device, so that its calls differ from turn to turn
MOST_CALLS = 240


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    built()


def turn(here: Here, host: Group, name: str, after: int) -> tuple[str, bool]:
    """Open an engine and use it; return this rank's error, and whether CUDA has not come to the call that fails."""
    engine: Any = ENGINES[name]
    error, is_over = "", False
    twin = host.twin()
    if here.rank == 1:
        runtime().standin_fail(INVALID_VALUE, after)
    try:
        group = twin.on_engine(engine.open(twin, here.rank))
        left = runtime().standin_fail_left() if here.rank == 1 else 0
        runtime().standin_fail(0, -1)  # not the copies of the arrays, which are the program's
        array = device_array(group, np.full(1000, here.rank + 1.0, np.float32))
        if here.rank == 1:
            runtime().standin_fail(INVALID_VALUE, left)
        group.all_reduce(array)  # one operation: an error after its start is this rank's alone
        if here.rank == 1:
            is_over = runtime().standin_fail_left() >= 0
        runtime().standin_fail(0, -1)
        assert (array.get() == 3).all()
    except MultiringError as caught:
        error = f"{type(caught).__name__}: {caught}"
    runtime().standin_fail(0, -1)
    assert "StallError" not in error, (name, after, error)
    return error, is_over


def fail_everywhere(here: Here, name: str) -> int:
    host, _, _ = open_engine(here)
    told = 0
    for after in range(0, MOST_CALLS, STRIDE[name]):
        error, is_over = turn(here, host, name, after)
        told += "rank 1" in error
        ends = np.zeros((2, 2), np.int64)
        ends[here.rank] = bool(error), is_over
        host.all_reduce(ends)
        if ends[1, 1]:
            assert not ends[:, 0].any(), (name, after, error)
            return told
        assert ends[1, 0] or not ends[0, 0], (name, after, error)
    raise AssertionError(f"{name}: more than {MOST_CALLS} calls")


@pytest.mark.parametrize("name", ENGINES)
def test_a_call_that_fails_on_one_rank_leaves_none_waiting(name: str) -> None:
    told = run_ranks(fail_everywhere, 2, name, deadline_s=240.0)
    assert told[0] > 0
