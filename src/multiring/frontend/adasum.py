"""Adasum: a sum of gradients that counts what they have in common once, not once a rank.

Of two vectors:

    adasum(a, b) = (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b

Orthogonal vectors are added, parallel ones averaged, and what lies in between gets what lies in between; so the step
keeps a sensible length however many ranks there are, and the learning rate need not follow their number. Of more than
two vectors it is taken pair by pair, along the tree that `rounds` gives: it is commutative, but not associative.

Source: Maleki, Musuvathi, Mytkowicz, Saarikivi, Xu, Eksarevskiy, Ekanayake & Barsoum, "Scaling distributed training
with adaptive summation", MLSys 2021, arXiv 2006.02924.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.errors import ArgumentError

# Elements worked on at a time: two blocks of float64 stay in a cache, and OpenBLAS does not give the dot product of one
# to several threads, as it does beyond 10,000 elements: among ranks that share cores that took ten times as long.
_BLOCK = 8192
# In what type vectors of each type are held between two combinations: the 16-bit ones are rounded once, at the end.
_HELD = {"float64": np.float64, "float32": np.float32, "float16": np.float32, "bfloat16": np.float32}

Vector = NDArray[Any]


def rounds(ranks: int) -> list[list[tuple[int, int]]]:
    """Return which vectors are combined, round by round: pairs (i, j) whose Adasum takes the place of vector i.

    With 2^k the largest power of two up to `ranks`, the first round combines vector 2^k + i into vector i where there
    is one; then follows the binary tree of the first 2^k: neighbours, pairs of neighbours, and so on. All end in
    vector 0.
    """
    power = 1 << (ranks.bit_length() - 1)
    found = [[(i, power + i) for i in range(ranks - power)]] if ranks > power else []
    step = 1
    while step < power:
        found.append([(i, i + step) for i in range(0, power, 2 * step)])
        step *= 2
    return found


def held_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which vectors of `dtype` are combined.

    Raises:
        ArgumentError: `dtype` is none of floating numbers, of which alone there is an Adasum.
    """
    if dtype.name not in _HELD:
        raise ArgumentError(f"Adasum of {dtype.name}: want one of {', '.join(_HELD)}")
    return np.dtype(_HELD[dtype.name])


def products(a: Vector, b: Vector) -> NDArray[np.float64]:
    """Return a.b, a.a and b.b, of float64 numbers.

    Those of parts of two vectors add up to those of the vectors. Squares beyond 1e308 are infinities, and then Adasum
    is NaN; only float64 vectors come that far.
    """
    found = np.zeros(3)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for _, x, y in _blocks(a, b):
            found += np.dot(x, y), np.dot(x, x), np.dot(y, y)
    return found


def combine(a: Vector, b: Vector, dots: NDArray[np.float64]) -> None:
    """Set `a` to the Adasum of `a` and `b`, or to that of parts of two vectors.

    Args:
        a: shape (n,).
        b: shape (n,).
        dots: what `products` gives for the whole vectors.
    """
    scale_a, scale_b = _scales(*dots.tolist())
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for place, x, y in _blocks(a, b):
            np.multiply(x, scale_a, out=x)
            np.multiply(y, scale_b, out=y)
            np.add(x, y, out=a[place], casting="same_kind")


def adasum(vectors: Sequence[Vector]) -> Vector:
    """Return the Adasum of `vectors`, of one type and shape (n,), along the tree of `rounds`.

    Raises:
        ArgumentError: there is none, or they are of no floating type.
    """
    if not vectors:
        raise ArgumentError("Adasum of no vectors: want at least one")
    kind = vectors[0].dtype
    held = [np.array(vector, held_type(kind)) for vector in vectors]
    for pairs in rounds(len(held)):
        for i, j in pairs:
            combine(held[i], held[j], products(held[i], held[j]))
    with np.errstate(over="ignore", invalid="ignore"):
        return held[0].astype(kind)


def _blocks(a: Vector, b: Vector) -> Iterator[tuple[slice, NDArray[np.float64], NDArray[np.float64]]]:
    """Yield, block by block, its place and what `a` and `b` have there in float64; each until the next is asked for."""
    scratch = np.empty((2, min(_BLOCK, a.size)))
    for start in range(0, a.size, _BLOCK):
        place = slice(start, min(start + _BLOCK, a.size))
        x, y = scratch[:, : place.stop - start]
        x[:], y[:] = a[place], b[place]
        yield place, x, y


def _scales(ab: float, aa: float, bb: float) -> tuple[float, float]:
    # A vector of nothing has nothing in common with the other one.
    return 1.0 - ab / (2.0 * aa) if aa else 1.0, 1.0 - ab / (2.0 * bb) if bb else 1.0
