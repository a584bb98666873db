"""Checks of the values that collectives return."""

from collections.abc import Callable
from typing import Any

import numpy as np

from multiring._frontend.object_collectives import allgather_object
from multiring._runtime.arrays import numpy_dtype
from multiring.adapters.conformance.adapter import Array, require, require_equal
from multiring.adapters.conformance.rank import Rank

TYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
_HUGE = (1 << 23) + 5  # the number of float32 elements: slightly more than 32 MiB
_CALLS = 60


def check_type(dtype: str) -> Callable[[Rank], None]:
    """Return a check that arrays of `dtype` are combined as NumPy would combine them."""

    def check(here: Rank) -> None:
        for op in ("sum", "average", "min", "max", "product"):
            if _has_meaning(dtype, op):
                every = [_values(dtype, op, rank) for rank in range(here.size)]
                require_equal(here.reduced(every[here.rank], op), _combined(every, op), f"{op} of {dtype}")

    check.__doc__ = f"Sum, average, minimum, maximum and product of {dtype} equal NumPy's, if they are defined."
    return check


def _has_meaning(dtype: str, op: str) -> bool:
    if dtype.startswith("complex"):
        return op in {"sum", "average"}
    return dtype != "bool" or op != "average"


def _values(dtype: str, op: str, rank: int) -> Array:
    """Return 35 elements whose combinations `dtype` represents exactly, except averages of integers, which truncate.

    For averages, integers reach the limits of their type. There a sum needs more bits, and float64 rounds.
    """
    numbers: Array = (np.arange(35) + 7 * rank).reshape(7, 5)
    if dtype == "bool":
        return np.asarray(numbers % (3 + rank) == 0)
    if op == "product":
        return np.asarray(numbers % 3 + 1, numpy_dtype(dtype))
    small: Array = numbers % 9 - (0 if dtype.startswith("u") else 4)
    if dtype.startswith("complex"):
        return np.asarray(3 * small + 3j * (small - 1), dtype)
    found: Array = np.asarray(small if "int" in dtype else 3 * small, numpy_dtype(dtype))
    if op == "average" and "int" in dtype:
        limits = np.iinfo(dtype)
        near = [limits.max, limits.min, limits.max // 2, limits.max // 1024, limits.min // 3]
        for column, each in enumerate(near):
            found[-2:, column] = [each + (-1) ** (each > 0) * rank, each // (rank + 1)]
    return found


def _combined(every: list[Array], op: str) -> Array:
    dtype = every[0].dtype
    if dtype == np.bool_:
        found: Array = np.logical_or.reduce(every) if op in {"sum", "max"} else np.logical_and.reduce(every)
        return found
    if op == "average" and dtype.kind in "iu":
        sums = np.stack(every).astype(object).sum(0)
        whole = [abs(each) // len(every) * (-1 if each < 0 else 1) for each in sums.flat]
        return np.asarray(np.array(whole, dtype).reshape(sums.shape))
    wide = np.stack(every).astype(np.complex128 if dtype.kind == "c" else np.float64)
    found = {
        "sum": lambda: wide.sum(0),
        "average": lambda: wide.sum(0) / len(every),
        "min": lambda: wide.min(0),
        "max": lambda: wide.max(0),
        "product": lambda: wide.prod(0),
    }[op]()
    return np.asarray(found.astype(dtype))


def shapes(here: Rank) -> None:
    """Arrays with zero, one and many dimensions keep their shape."""
    for shape in ((), (1,), (1, 1, 1), (2, 3, 4, 5)):
        own = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
        wanted = np.asarray(own * here.size + _ranks(here), np.float32)
        own += here.rank
        require_equal(here.reduced(own), wanted, f"sum of shape {shape}")


def zero_size(here: Rank) -> None:
    """Arrays without elements keep their shape and type."""
    for shape in ((0,), (0, 3), (3, 0, 2)):
        for op in ("sum", "average", "max"):
            require_equal(here.reduced(np.zeros(shape, np.float32), op), np.zeros(shape, np.float32), f"{op}, {shape}")


def non_contiguous(here: Rank) -> None:
    """Transposed arrays, and arrays with gaps, are combined element by element."""
    numbers = np.arange(60, dtype=np.float32).reshape(5, 12) + 100 * here.rank
    every = 100 * _ranks(here)
    for name, view in _views(numbers).items():
        wanted = _views(np.arange(60, dtype=np.float32).reshape(5, 12))[name] * here.size + every
        require_equal(here.reduced(view), wanted.astype(np.float32), f"sum of an array that is {name}")


def _views(array: Array) -> dict[str, Array]:
    return {
        "transposed": array.T,
        "every other column": array[:, ::2],
        "a block": array[1:4, 3:9],
        "backwards": array[::-1],
        "broadcast": np.broadcast_to(array[0], (4, 12)),
    }


def huge(here: Rank) -> None:
    """An array of 32 MiB with an odd number of elements is summed up to its last element."""
    numbers = np.arange(_HUGE, dtype=np.float32) % 1000
    found = here.reduced(numbers + here.rank)
    require_equal(found, numbers * here.size + np.float32(_ranks(here)), "sum of 32 MiB")


def infinities(here: Rank) -> None:
    """NaN and infinities are kept, and appear nowhere else."""
    numbers = np.zeros(6, np.float32)
    if here.rank == 1:
        numbers[:3] = np.nan, np.inf, -np.inf
    elif here.rank == 0:
        numbers[3] = np.inf
    wanted = np.array([np.nan, np.inf, -np.inf, np.inf, 0, 0], np.float32)
    require_equal(here.reduced(numbers), wanted, "sum with NaN and infinities")


def same_bits(here: Rank) -> None:
    """All ranks get the same bits, even if the sum of the numbers depends on their order."""
    numbers = np.random.default_rng(here.rank).standard_normal(10_007).astype(np.float32)
    for op in ("sum", "average"):
        found = here.reduced(numbers, op)
        require(len(set(allgather_object(found.tobytes(), name="same_bits"))) == 1, f"{op}: ranks have different bits")
        every = [np.random.default_rng(rank).standard_normal(10_007) for rank in range(here.size)]
        wanted = np.asarray(np.sum(every, axis=0) / (here.size if op == "average" else 1), np.float32)
        require_equal(found, wanted, op, rtol=1e-5)


def inputs_intact(here: Rank) -> None:
    """The combined arrays stay unchanged, and so do the NumPy arrays that they were made from."""
    for dtype in ("float32", "int32"):
        numbers = np.asarray(np.arange(1000) + here.rank, dtype)
        made = here.adapter.make(numbers)
        for op in ("sum", "average", "max"):
            here.adapter.all_reduce(made, op)
        kept: Any = np.asarray(np.arange(1000) + here.rank, dtype)
        require_equal(here.adapter.back(made), kept, f"the {dtype} array afterwards")
        require_equal(numbers, kept, f"the {dtype} array that it was made of")


def order(here: Rank) -> None:
    """Many calls in a row, of different shapes and operations, each get their own result."""
    made = [here.adapter.make(np.full(1 + k % 7, k + here.rank, np.float32)) for k in range(_CALLS)]
    ops = [("sum", "max", "average")[k % 3] for k in range(_CALLS)]
    found = [here.adapter.all_reduce(array, op) for array, op in zip(made, ops, strict=True)]
    for k, (result, op) in enumerate(zip(found, ops, strict=True)):
        every = [k + rank for rank in range(here.size)]
        wanted = {"sum": sum(every), "max": max(every), "average": sum(every) / here.size}[op]
        require_equal(here.adapter.back(result), np.full(1 + k % 7, wanted, np.float32), f"call {k}, {op}")


def _ranks(here: Rank) -> int:
    return sum(range(here.size))
