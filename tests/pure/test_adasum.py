"""Adasum of vectors: the formula for two, and the tree for more."""

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from multiring._frontend.adasum import adasum, combine, products, rounds
from multiring.errors import ArgumentError

Vector = NDArray[Any]
BOUNDS = {"float64": 1e-13, "float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2}
TYPES = {name: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in BOUNDS}


def of_two(a: Vector, b: Vector) -> Vector:
    """Return Adasum of two vectors by the paper's formula."""
    ab = float((a * b).sum())
    return (1 - ab / (2 * float((a * a).sum()))) * a + (1 - ab / (2 * float((b * b).sum()))) * b


def of_all(vectors: Sequence[Vector]) -> Vector:
    """Return Adasum of many vectors, computed from the tree's root; `rounds` starts at its leaves."""
    power = 2 ** int(math.log2(len(vectors)))
    leaves = [
        of_two(vector, vectors[power + i]) if power + i < len(vectors) else vector
        for i, vector in enumerate(vectors[:power])
    ]

    def of_tree(part: Sequence[Vector]) -> Vector:
        half = len(part) // 2
        return of_two(of_tree(part[:half]), of_tree(part[half:])) if half else part[0]

    return of_tree(leaves)


def near(found: Vector, wanted: Vector, bound: float) -> bool:
    error = np.linalg.norm(found.astype(np.float64) - wanted.astype(np.float64))
    return bool(error <= bound * np.linalg.norm(wanted.astype(np.float64)))


@given(st.integers(1, 70))
def test_every_vector_is_combined_once(ranks: int) -> None:
    left = set(range(ranks))
    found = rounds(ranks)
    for pairs in found:
        used = [index for pair in pairs for index in pair]
        assert len(set(used)) == len(used)
        assert set(used) <= left
        left -= {j for _, j in pairs}
    assert left == {0}
    assert len(found) == math.ceil(math.log2(ranks))


def test_which_vectors_are_combined() -> None:
    assert rounds(1) == []
    assert rounds(2) == [[(0, 1)]]
    assert rounds(5) == [[(0, 4)], [(0, 1), (2, 3)], [(0, 2)]]
    assert rounds(7) == [[(0, 4), (1, 5), (2, 6)], [(0, 1), (2, 3)], [(0, 2)]]


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("count", range(1, 10))
def test_as_the_formula_has_it(name: str, count: int) -> None:
    generator = np.random.default_rng(count)
    for size in (1, 3, 40_000):
        vectors = [(generator.normal(size=size) * 2.0**i).astype(TYPES[name]) for i in range(count)]
        before = [vector.copy() for vector in vectors]
        found = adasum(vectors)
        assert found.dtype == TYPES[name]
        assert near(found, of_all([vector.astype(np.float64) for vector in vectors]), BOUNDS[name])
        assert all(np.array_equal(each, kept) for each, kept in zip(vectors, before, strict=True))


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_orthogonal_vectors_are_added_and_parallel_ones_averaged(name: str, count: int) -> None:
    generator = np.random.default_rng(count)
    basis = np.linalg.qr(generator.normal(size=(count + 50, count)))[0]
    vectors = [column.astype(TYPES[name]) for column in basis.T]
    exact = [vector.astype(np.float64) for vector in vectors]
    assert near(adasum(vectors), np.sum(exact, 0), 4 * BOUNDS[name])  # rounding makes the vectors slightly oblique
    # Parallel vectors of any lengths and signs are averaged in pairs. If each has a partner, the result is the mean.
    parallel = [(exact[0] * factor).astype(TYPES[name]) for factor in (1.0, -3.0, 0.25, 10.0, 2.0)[: 2 * (count // 2)]]
    wanted = np.mean([vector.astype(np.float64) for vector in parallel], 0)
    assert near(adasum(parallel), wanted, 8 * BOUNDS[name])


def test_vectors_of_unlike_magnitude() -> None:
    direction = np.random.default_rng(0).normal(size=100)
    for low, high in ((1e-37, 1e18), (1e-30, 1e-30), (1e18, 1e-37)):
        vectors = [(direction * low).astype(np.float32), (direction * high).astype(np.float32)]
        assert near(adasum(vectors), np.mean([each.astype(np.float64) for each in vectors], 0), 1e-5)


@given(st.lists(st.tuples(st.integers(-999, 999), st.integers(-999, 999)), min_size=1, max_size=8))
@example([(0, 166), (42, 172), (0, 1)])  # NumPy 1.26 adds these squares in an order that depends on their alignment
def test_it_does_not_matter_which_is_first(pairs: list[tuple[int, int]]) -> None:
    a, b = np.array(pairs, np.float64).T / 7
    assert np.array_equal(adasum([a, b]), adasum([b, a]))


def test_vectors_of_nothing() -> None:
    some, nothing = np.array([1.0, -2.0], np.float32), np.zeros(2, np.float32)
    assert np.array_equal(adasum([some, nothing]), some)
    assert np.array_equal(adasum([nothing, some, nothing]), some)
    assert np.array_equal(adasum([nothing, nothing]), nothing)
    assert adasum([np.zeros(0), np.zeros(0)]).shape == (0,)


def test_what_is_no_number_stays_so() -> None:
    assert np.isnan(adasum([np.array([1.0, np.nan]), np.array([1.0, 1.0])])).all()
    beyond = adasum([np.array([6e4, 6e4], np.float16), np.array([6e4, -6e4], np.float16)])
    assert beyond.tolist() == [np.inf, 0.0]


def test_parts_give_what_the_whole_gives() -> None:
    generator = np.random.default_rng(3)
    a, b = generator.normal(size=(2, 1000))
    dots = products(a[:300], b[:300]) + products(a[300:], b[300:])
    assert np.allclose(dots, products(a, b), rtol=1e-13)
    whole = adasum([a, b])
    for part in (slice(0, 300), slice(300, None)):
        combine(a[part], b[part], dots)
    assert near(a, whole, 1e-13)


def test_what_has_no_adasum() -> None:
    with pytest.raises(ArgumentError, match="Adasum of no vectors: want at least one"):
        adasum([])
    with pytest.raises(ArgumentError, match="Adasum of int64: want one of float64, float32, float16, bfloat16"):
        adasum([np.arange(3)])
