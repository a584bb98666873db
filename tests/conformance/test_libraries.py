"""Arrays of other libraries, through DLPack and the buffer protocol."""

import array
from typing import Any

import pytest
import torch
from tests.support.ranks import Here, run_ranks


def other_libraries(here: Here) -> list[Any]:
    """Sum `1 + rank` over the ranks in each kind of array, and check that the array was changed in place."""
    group = here.join()
    found: list[Any] = []
    tensors = [
        torch.full((2, 3), 1.0 + here.rank),
        torch.full((5,), 1.0 + here.rank, dtype=torch.bfloat16),
        torch.full((4,), 1 + here.rank, dtype=torch.int32),
        torch.full((), 1.0 + here.rank, dtype=torch.float64),
        torch.full((2, 3, 4, 5), 1.0 + here.rank).to(memory_format=torch.channels_last),
        torch.full((6, 4), 1.0 + here.rank).T,
    ]
    for tensor in tensors:
        address = tensor.data_ptr()
        group.all_reduce(tensor)
        assert tensor.data_ptr() == address
        found.append(set(tensor.to(torch.float64).reshape(-1).tolist()))
    numbers = array.array("f", [1.0 + here.rank] * 7)
    group.all_reduce(numbers)
    found.append(set(numbers))
    raw = bytearray([1 + here.rank] * 9)
    group.all_reduce(raw)
    found.append(set(raw))
    group.all_reduce(memoryview(raw)[3:6], "min")
    return found


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_other_libraries(engine: str) -> None:
    for found in run_ranks(other_libraries, 3, engine=engine):
        assert found == [{6}] * 8
