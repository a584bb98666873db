"""Adasum: a sum of gradients that counts their common component once instead of once per rank.

The Adasum of two vectors is:

    adasum(a, b) = (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b

Orthogonal vectors are added, and parallel vectors are averaged. The result for other vectors lies in between. The
length of a step therefore hardly depends on the number of ranks, and the learning rate need not be scaled by that
number. More than two vectors are combined pair by pair, along the tree that `rounds` returns. Adasum is commutative,
but not associative.

Source: Maleki, Musuvathi, Mytkowicz, Saarikivi, Xu, Eksarevskiy, Ekanayake & Barsoum, "Scaling distributed training
with adaptive summation", MLSys 2021, arXiv 2006.02924.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.errors import ArgumentError

# The number of elements of a block. Two float64 blocks of this size stay in a cache. OpenBLAS splits dot products of
# more than 10,000 elements over several threads, which took ten times as long when ranks shared cores.
_BLOCK = 8192
# The number of float64 elements in a cache line. The dot products of NumPy 1.26's OpenBLAS depend on the alignment of
# the operands, so a.a and b.b would differ for equal vectors, and from run to run.
_IN_A_LINE = 8
# The type in which vectors of each type are stored between two combinations. 16-bit results are rounded only once, at
# the end.
_HELD = {"float64": np.float64, "float32": np.float32, "float16": np.float32, "bfloat16": np.float32}

Vector = NDArray[Any]


def rounds(ranks: int) -> list[list[tuple[int, int]]]:
    """Return the pairs (i, j) of vectors that each round combines.

    The Adasum of a pair replaces vector i. Let 2^k be the largest power of two up to `ranks`. The first round combines
    each vector 2^k + i into vector i. The next rounds follow the binary tree of the first 2^k vectors: neighbours,
    pairs of neighbours, and so on. The result is in vector 0.
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
        ArgumentError: `dtype` is not a floating-point type.
    """
    if dtype.name not in _HELD:
        raise ArgumentError(f"Adasum of {dtype.name}: want one of {', '.join(_HELD)}")
    return np.dtype(_HELD[dtype.name])


def products(a: Vector, b: Vector) -> NDArray[np.float64]:
    """Return the dot products a.b, a.a and b.b as float64 numbers.

    The products of the parts of two vectors add up to the products of the vectors. If a square exceeds 1e308, the
    product is infinite and the Adasum is NaN. This can only happen with float64 vectors.
    """
    found = np.zeros(3)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for _, x, y in _blocks(a, b):
            found += np.dot(x, y), np.dot(x, x), np.dot(y, y)
    return found


def combine(a: Vector, b: Vector, dots: NDArray[np.float64]) -> None:
    """Set `a` to the Adasum of `a` and `b`.

    Args:
        a: a vector, or a part of it; shape (n,).
        b: the other vector, or the same part of it; shape (n,).
        dots: the result of `products` for the whole vectors.
    """
    scale_a, scale_b = _scales(*dots.tolist())
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for place, x, y in _blocks(a, b):
            np.multiply(x, scale_a, out=x)
            np.multiply(y, scale_b, out=y)
            np.add(x, y, out=a[place], casting="same_kind")


def adasum(vectors: Sequence[Vector]) -> Vector:
    """Return the Adasum of `vectors`, combined along the tree of `rounds`.

    Args:
        vectors: at least one; all of the same floating-point type and the same shape (n,).

    Raises:
        ArgumentError: `vectors` is empty, or its type is not a floating-point type.
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
    """Yield the slice of each block, and float64 copies of the block from `a` and `b`.

    The next block overwrites the copies, which always have the same alignment.
    """
    width = min(_BLOCK, -(-a.size // _IN_A_LINE) * _IN_A_LINE)
    memory = np.empty(2 * width + _IN_A_LINE)
    skipped = -memory.ctypes.data // memory.itemsize % _IN_A_LINE
    scratch = memory[skipped : skipped + 2 * width].reshape(2, width)
    for start in range(0, a.size, _BLOCK):
        place = slice(start, min(start + _BLOCK, a.size))
        x, y = scratch[:, : place.stop - start]
        x[:], y[:] = a[place], b[place]
        yield place, x, y


def _scales(ab: float, aa: float, bb: float) -> tuple[float, float]:
    # A zero vector has no component in common with the other vector.
    return 1.0 - ab / (2.0 * aa) if aa else 1.0, 1.0 - ab / (2.0 * bb) if bb else 1.0
