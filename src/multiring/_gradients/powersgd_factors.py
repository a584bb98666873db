"""The local arithmetic of PowerSGD, with bit-identical results on all ranks.

Ranks may run on different processors, or with different numbers of threads. A BLAS then adds in a different order.
Therefore this module uses only elementwise additions, multiplications, divisions and roots, which IEEE 754 defines
exactly. Their order depends on the shapes alone.
"""

import numpy as np
from numpy.typing import NDArray

# If less than this share of a column is left after the previous columns are subtracted, the rest is a rounding error of
# float32.
_NEGLIGIBLE = 1e-6
# Elements of a block: two float32 blocks fit into a second-level cache.
_BLOCK = 32768


def orthonormalise(matrix: NDArray[np.float32]) -> list[bool]:
    """Make the columns of `matrix` orthonormal, in place, by Gram-Schmidt in float64.

    Args:
        matrix: shape (n, columns), finite.

    Returns:
        For each column, whether it was independent of the previous columns. A dependent column is set to zero.
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
    with np.errstate(all="ignore"):  # an overflow becomes an infinity, like one in the gradients
        for start in range(0, len(left), rows):
            block = out[start : start + rows]
            piece = left[start : start + rows]
            product = scratch[: len(block)]
            np.multiply(piece[:, :1], lines[0], out=block)
            for k in range(1, len(lines)):
                np.multiply(piece[:, k : k + 1], lines[k], out=product)
                np.add(block, product, out=block)


def _sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return sums along the last dimension, by repeatedly adding the second half to the first."""
    while (count := values.shape[-1]) > 1:
        half = (count + 1) // 2
        folded = values[..., :half].copy()
        folded[..., : count - half] += values[..., half:]
        values = folded
    return values[..., 0]
