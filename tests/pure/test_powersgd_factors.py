"""The arithmetic that every rank does on its own: accurate enough, and with the same bits on every machine."""

import numpy as np
import pytest

from multiring._gradients.powersgd_factors import multiply, orthonormalise

FLOAT32_ROUNDOFF = 2.0**-24


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 5), (64, 3), (1000, 8), (4097, 4)])
def test_columns_become_orthonormal_and_span_the_same(rows: int, columns: int) -> None:
    matrix = np.random.default_rng(rows).standard_normal((rows, columns), np.float32)
    # Nearly equal columns, for which Gram-Schmidt in float32 would fail.
    matrix[:, -1] = matrix[:, 0] + matrix[:, -1] / 64
    scaled = matrix * np.float32(1e-18)
    for given in (matrix, scaled):
        made = given.copy()
        assert orthonormalise(made) == [True] * columns
        wide = made.astype(np.float64)
        assert np.abs(wide.T @ wide - np.eye(columns)).max() < 8 * FLOAT32_ROUNDOFF
        wanted, _ = np.linalg.qr(given.astype(np.float64))
        shared = wanted.T @ wide  # a rotation if both span the same space
        assert np.abs(shared.T @ shared - np.eye(columns)).max() < 1e-5


def test_dependent_columns_become_zero() -> None:
    first, second = np.random.default_rng(0).standard_normal((2, 50, 1), np.float32)
    matrix = np.concatenate([first, 0 * first, -3 * first, second, first + second], axis=1)
    assert orthonormalise(matrix) == [True, False, False, True, False]
    assert not matrix[:, [1, 2, 4]].any()


@pytest.mark.parametrize(("rows", "columns", "rank"), [(1, 1, 1), (300, 257, 4), (3, 40_000, 2), (5, 0, 1)])
def test_product(rows: int, columns: int, rank: int) -> None:
    generator = np.random.default_rng(rank)
    left, right = (generator.standard_normal((count, rank), np.float32) for count in (rows, columns))
    out = np.empty((rows, columns), np.float32)
    multiply(left, right, out)
    exact = left.astype(np.float64) @ right.T.astype(np.float64)
    size = np.abs(left).astype(np.float64) @ np.abs(right.T).astype(np.float64)
    assert (np.abs(out - exact) <= rank * FLOAT32_ROUNDOFF * 1.01 * size).all()


def test_product_overflows_to_infinity() -> None:
    out = np.empty((1, 1), np.float32)
    multiply(np.full((1, 1), 1e30, np.float32), np.full((1, 1), 1e30, np.float32), out)
    assert np.isposinf(out[0, 0])


def test_bits_are_those_of_one_operation_at_a_time() -> None:
    """The oracle uses Python scalars (float64, never fused) in the stated order and rounds where float32 rounds."""
    generator = np.random.default_rng(5)
    left, right = generator.standard_normal((3, 2), np.float32), generator.standard_normal((7, 2), np.float32)
    out = np.empty((3, 7), np.float32)
    multiply(left, right, out)
    for i in range(3):
        for j in range(7):
            # The product of two float32 values is exact in float64, so rounding it equals float32 multiplication.
            first, second = (np.float32(float(left[i, k]) * float(right[j, k])) for k in range(2))
            assert out[i, j] == np.float32(float(first) + float(second))
    column = generator.standard_normal((6, 1), np.float32)
    made = column.copy()
    orthonormalise(made)
    squares = [float(each) ** 2 for each in column[:, 0]]
    folded = [squares[0] + squares[3], squares[1] + squares[4], squares[2] + squares[5]]
    size = (folded[0] + folded[2]) + folded[1]
    assert made[:, 0].tolist() == [float(np.float32(float(each) / np.sqrt(size))) for each in column[:, 0]]
