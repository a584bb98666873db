"""The arithmetic of PowerSGD that every rank does for itself, and that must give every rank the same bits.

Ranks may run on unlike processors, or with unlike numbers of threads, for which a BLAS adds up in unlike orders. So
here are additions, multiplications, divisions and roots of single elements only, which IEEE 754 defines to the last
bit, in an order that depends on the shapes alone.
"""

import numpy as np
from numpy.typing import NDArray

# How much of a column may be left once the columns before it were taken out; less is rounding of float32 values.
_NEGLIGIBLE = 1e-6
# Elements worked on at a time: two blocks of float32 stay in a second-level cache.
_BLOCK = 32768


def orthonormalise(matrix: NDArray[np.float32]) -> list[bool]:
    """Make the columns of `matrix` orthonormal, in place, by Gram-Schmidt in float64.

    Args:
        matrix: shape (n, columns), finite.

    Returns:
        By column, whether it was independent of those before it; one that was not is zero now.
    """
    columns = np.ascontiguousarray(matrix.T, np.float64)
    before = _sums(columns * columns)
    is_independent = []
    for k in range(len(columns)):
        size = _sums(columns[k] * columns[k])
        is_independent.append(bool(size > before[k] * _NEGLIGIBLE**2))
        columns[k] = columns[k] / np.sqrt(size) if is_independent[k] else 0.0
        columns[k + 1 :] -= _sums(columns[k + 1 :] * columns[k])[:, None] * columns[k]
    matrix[...] = columns.T
    return is_independent


def multiply(left: NDArray[np.float32], right: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Set `out` to `left` times the transpose of `right`.

    Args:
        left: shape (n, rank).
        right: shape (m, rank).
        out: shape (n, m).
    """
    rows = max(1, _BLOCK // max(1, len(right)))
    scratch = np.empty((min(rows, len(left)), len(right)), np.float32)
    lines = np.ascontiguousarray(right.T)
    with np.errstate(all="ignore"):  # what overflows is an infinity, as in the gradients it comes from
        for start in range(0, len(left), rows):
            block = out[start : start + rows]
            piece = left[start : start + rows]
            product = scratch[: len(block)]
            np.multiply(piece[:, :1], lines[0], out=block)
            for k in range(1, len(lines)):
                np.multiply(piece[:, k : k + 1], lines[k], out=product)
                np.add(block, product, out=block)


def _sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sums along the last dimension, the second half folded onto the first until one element is left."""
    while (count := values.shape[-1]) > 1:
        half = (count + 1) // 2
        folded = values[..., :half].copy()
        folded[..., : count - half] += values[..., half:]
        values = folded
    return values[..., 0]
