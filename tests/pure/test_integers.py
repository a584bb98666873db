"""Averages and products of integers, compared with Python's unbounded integers."""

import random
from fractions import Fraction

import numpy as np
import pytest

from multiring._frontend.dtype_conversion import converted, converted_back, dtype_conversion, scaled
from multiring._frontend.reduce_ops import Average
from multiring.errors import ArgumentError

TYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def drawn(rng: random.Random, dtype: str, count: int) -> list[int]:
    """Return numbers of a type, many of them near its limits."""
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    return [
        rng.choice([low, high, high - 1, rng.randint(low, high), rng.randint(max(low, -9), 9)]) for _ in range(count)
    ]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 64])
def test_averages_are_exact_and_truncated(dtype: str, ranks: int) -> None:
    conversion = dtype_conversion(dtype, Average, 1.0, ranks)
    if conversion.op == "average":
        assert dtype in {"uint8", "uint16", "uint32"}  # the Group averages these types itself, in 64 bits
        return
    rng = random.Random(f"{dtype} {ranks}")  # noqa: S311 -- reproducible
    every = [drawn(rng, dtype, 60) for _ in range(ranks)]
    total = sum(converted(np.array(each, dtype).reshape(3, 20), conversion) for each in every)
    found = converted_back(np.asarray(total), conversion, np.dtype(dtype))
    assert found.dtype == dtype
    assert found.shape == (3, 20)
    assert found.reshape(-1).tolist() == [int(Fraction(sum(each), ranks)) for each in zip(*every, strict=True)]


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
@pytest.mark.parametrize("factor", [0.5, 0.25, 3.0, -1.0])
def test_large_integers_are_scaled_exactly(dtype: str, factor: float) -> None:
    numbers = drawn(random.Random(dtype), dtype, 60)  # noqa: S311 -- reproducible
    fits = [each for each in numbers if np.iinfo(dtype).min <= int(each * Fraction(factor)) <= np.iinfo(dtype).max]
    found = scaled(np.array(fits, dtype), factor)
    assert found.dtype == dtype
    assert found.tolist() == [int(each * Fraction(factor)) for each in fits]
    ranks = 3
    conversion = dtype_conversion(dtype, Average, factor, ranks)
    total = sum(converted(np.array(fits, dtype), conversion) for _ in range(ranks))
    averages = converted_back(np.asarray(total), conversion, np.dtype(dtype))
    assert averages.tolist() == [int(each * Fraction(factor)) for each in fits]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
def test_integers_times_what_is_no_number_are_refused(dtype: str, factor: float) -> None:
    conversion = dtype_conversion(dtype, Average, factor, 3)
    sent = converted(np.ones(2, dtype), conversion)
    with pytest.raises(ArgumentError, match="for integers"):
        scaled(np.ones(2, dtype), factor)
    with pytest.raises(ArgumentError, match="for integers"):
        converted_back(sent, conversion, sent.dtype)


def test_complex_arrays_of_nothing_keep_their_shape() -> None:
    conversion = dtype_conversion("complex64", Average, 1.0, 3)
    sent = converted(np.zeros((0, 3), np.complex64), conversion)
    assert sent.shape == (0, 3, 2)
    assert converted_back(sent, conversion, np.dtype(np.complex64)).shape == (0, 3)


def test_scalars_do_not_warn_of_what_wraps() -> None:
    conversion = dtype_conversion("int64", Average, 1.0, 2)
    least = np.array(np.iinfo(np.int64).min)
    total = converted(least, conversion) + converted(least, conversion)
    assert converted_back(total, conversion, np.dtype(np.int64)) == least
