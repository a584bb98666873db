"""Operations work in place on arrays of other libraries and with other memory layouts."""

import array
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import CONFORMING, Here, run_ranks

import multiring


def layouts(here: Here) -> list[Any]:
    """Reduce arrays of several dense layouts; elements with equal indices must be combined."""
    group = here.join()
    plain = np.arange(24, dtype=np.float32).reshape(2, 3, 4) * (1 + here.rank)
    total = np.arange(24, dtype=np.float32).reshape(2, 3, 4) * sum(range(1, here.size + 1))
    views = [
        np.asfortranarray(plain),
        np.ascontiguousarray(plain.transpose(1, 2, 0)).transpose(2, 0, 1),
        plain.copy()[:, np.newaxis],
        plain.copy()[np.newaxis].transpose(3, 2, 1, 0),
    ]
    for view in views:
        group.all_reduce(view)
    np.testing.assert_array_equal(views[0], total)
    np.testing.assert_array_equal(views[1], total)
    np.testing.assert_array_equal(views[2][:, 0], total)
    np.testing.assert_array_equal(views[3][..., 0], total.transpose(2, 1, 0))
    sent = np.asfortranarray(plain)
    group.broadcast(sent, root=1)
    np.testing.assert_array_equal(sent, np.arange(24, dtype=np.float32).reshape(2, 3, 4) * 2)
    part = np.zeros((6, 4), np.float32)
    part[2:4] = 1  # a block of whole rows of a larger array is dense
    group.all_reduce(part[2:4])
    return part.tolist()


@pytest.mark.parametrize("engine", CONFORMING)
def test_layouts(engine: str) -> None:
    want = [[0.0] * 4] * 2 + [[3.0] * 4] * 2 + [[0.0] * 4] * 2
    assert run_ranks(layouts, 3, engine=engine) == [want] * 3


def outputs(here: Here) -> list[Any]:
    """Write results to `out` arrays of the caller, and pass read-only inputs."""
    group = here.join()
    mine = np.full((2, 2), here.rank, np.int16)
    mine.setflags(write=False)
    gathered = np.empty((2 * here.size, 2), np.int16)
    assert group.all_gather(mine, out=gathered) is gathered
    own = group.allocate((1, 3), "float64")
    assert group.reduce_scatter(np.ones((here.size, 3)), out=own, op="average") is own
    swapped = array.array("q", [0] * here.size)
    assert group.all_to_all(array.array("q", range(here.size)), out=swapped) is swapped
    group.broadcast(mine if here.rank == 0 else gathered[:2])  # the root's array is only read
    return [gathered.tolist(), own.tolist(), swapped.tolist()]


@pytest.mark.parametrize("engine", CONFORMING)
def test_outputs(engine: str) -> None:
    for rank, (gathered, own, swapped) in enumerate(run_ranks(outputs, 2, engine=engine)):
        assert gathered[2:] == [[1, 1], [1, 1]]
        assert own == [[1.0, 1.0, 1.0]]
        assert swapped == [rank, rank]


SPECIAL = np.array([[1, np.nan, np.inf, -np.inf, 0.0, 3e4], [np.nan, 1, -np.inf, -np.inf, -0.0, 3e4]])


def special_values(here: Here) -> list[str]:
    """Reduce NaN, infinities and values that overflow; return the bits of the results."""
    group = here.join()
    found = []
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        for op in ("sum", "min", "max", "product", "average"):
            values = group.allocate(6, dtype)
            values[:] = np.array([[1, np.nan, np.inf, -np.inf, 0.0, 3e4], [np.nan, 1, -np.inf, -np.inf, -0.0, 3e4]])[
                here.rank
            ]
            group.all_reduce(values, op)
            found.append(values.tobytes().hex())
    return found


def test_special_values() -> None:
    shm, tcp = (run_ranks(special_values, 2, engine=engine) for engine in ("shm", "tcp"))
    assert shm[0] == shm[1] == tcp[0] == tcp[1]
    single = np.frombuffer(bytes.fromhex(shm[0][10]), np.float32)
    np.testing.assert_array_equal(single, np.array([np.nan, np.nan, np.nan, -np.inf, 0.0, 6e4], np.float32))
    largest = np.frombuffer(bytes.fromhex(shm[0][12]), np.float32)
    np.testing.assert_array_equal(largest, np.array([np.nan, np.nan, np.inf, -np.inf, 0.0, 3e4], np.float32))


def arena(here: Here) -> list[Any]:
    """Check that arena memory is 64-byte aligned, is freed with its last view, and is not reused before."""
    group = here.join()
    context = group._calls.services.context
    start = context.arena_bytes()
    arrays = [group.allocate(count, "float32") for count in (1, 17, 100_000, 0)]
    assert all(each.ctypes.data % 64 == 0 and context.holds(each.ctypes.data, each.nbytes) for each in arrays)
    for number, each in enumerate(arrays):
        each[...] = number
    assert [set(each.tolist()) for each in arrays] == [{0.0}, {1.0}, {2.0}, set()]
    held = context.arena_bytes() - start
    view = arrays[2][10:20]
    del each
    arrays.clear()
    less = context.arena_bytes() - start
    del view
    return [held >= 400_000, less >= 400_000, context.arena_bytes() - start, context.holds(id(group), 1)]


def test_arena() -> None:
    assert run_ranks(arena, 1) == [[True, True, 0, False]]


def full_arena(here: Here) -> str:
    group = here.join(segment_bytes=1 << 27)
    with pytest.raises(multiring.errors.ArgumentError) as refused:
        group.allocate(1 << 27, "uint8")
    total = np.ones(100)
    group.all_reduce(total)  # the group stays usable
    assert (total == here.size).all()
    return str(refused.value)


def test_full_arena() -> None:
    for text in run_ranks(full_arena, 2):
        assert "no room for 134217728 bytes" in text
        assert "MULTIRING_SEGMENT_BYTES" in text
