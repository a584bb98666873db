"""Find pictures that are the same: equal files, equal pixels, and near duplicates.

Two pictures are near duplicates if their outlines agree: the differences of neighbouring cells of their signatures
correlate. A brighter or darker copy has the same outlines, and so has one of another size or quality. The comparison is
in two steps, of which the first is a matrix product over all pairs:

1. Candidates: the correlation of the outlines in 16 x 16 cells is at least `CANDIDATE`.
2. Verification: the pictures' shapes agree to `SHAPE`; the correlation in 32 x 32 cells is at least `FINE`, or the one
   in 16 x 16 cells at least `COARSE`, because resizing a picture changes its finest outlines; and the colours agree.
   A picture with a side of fewer than `SMALL` pixels shows so little that other pictures look like it. It needs a
   correlation of `FINE_OF_SMALL` in 32 x 32 cells.

The thresholds were chosen on openclipart and handwritten digits: benchmarks/results/vision_202611.md.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from multiring.vision.signatures import CHROMA, LUMA, SIGNATURE_BYTES

CANDIDATE, FINE, COARSE = 0.75, 0.85, 0.95
SMALL, FINE_OF_SMALL = 40, 0.92
SHAPE = 0.03  # the largest difference of the logarithms of width / height; rounding of small sizes is allowed besides
# Mean difference of the colours of cells, of 255. A copy of other brightness has its colours scaled, so that a part of
# the colours' own strength is allowed, too.
_COLOUR, _COLOUR_SHARE = 10.0, 0.35
# A picture whose outlines are weaker than this, as a norm over the 32 x 32 cells in levels of 255, shows next to
# nothing: noise would decide.
_FLAT = 64.0
_BLOCK = 1024  # rows of a block of the matrix of all pairs
_COARSE_CELLS = 16

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NearPairs:
    """Pairs of near duplicates, by the pictures' positions.

    Attributes:
        first: int64, the smaller position of each pair, ascending.
        second: int64, the larger position.
        similarity: float32, the correlation of the outlines in 32 x 32 cells: 1 for equal ones.
    """

    first: NDArray[np.int64]
    second: NDArray[np.int64]
    similarity: Floats


def equal_groups(keys: Sequence[Hashable]) -> list[tuple[int, ...]]:
    """Return the positions of equal keys, for each key that occurs twice or more. None as a key equals nothing."""
    places: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        if key is not None:
            places.setdefault(key, []).append(position)
    return [tuple(each) for each in places.values() if len(each) > 1]


def near_pairs(signatures: Sequence[bytes], sizes: Sequence[tuple[int, int]]) -> NearPairs:
    """Return all pairs of near duplicates.

    The time grows with the square of the number of pictures: 60,000 need about 1.7e12 multiplications. The memory
    grows with the number of pictures and of pairs.

    Args:
        signatures: the value of `signature_of` for each picture.
        sizes: width and height of each picture in pixels.
    """
    cells = np.frombuffer(b"".join(signatures), np.uint8).reshape(len(signatures), SIGNATURE_BYTES)
    coarse = np.concatenate(
        [_coarse_outlines(cells[start : start + _BLOCK]) for start in range(0, len(cells), _BLOCK)]
        or [np.empty((0, 2 * _COARSE_CELLS * (_COARSE_CELLS - 1)), np.float32)]
    )
    shapes = np.array(sizes, np.float64).reshape(-1, 2)
    parts: list[tuple[NDArray[np.int64], NDArray[np.int64], Floats]] = []
    for low in range(0, len(cells), _BLOCK):
        for start in range(low, len(cells), _BLOCK):
            products = coarse[low : low + _BLOCK] @ coarse[start : start + _BLOCK].T
            row, column = np.nonzero(products >= CANDIDATE)
            first, second = row + low, column + start
            keep = (first < second) & _shapes_agree(shapes[first], shapes[second])
            first, second, agreement = first[keep], second[keep], products[row[keep], column[keep]]
            for at in range(0, len(first), _BLOCK):
                piece = slice(at, at + _BLOCK)
                fine, agrees = _verified(cells[first[piece]], cells[second[piece]])
                is_small = np.minimum(shapes[first[piece]], shapes[second[piece]]).min(axis=1) < SMALL
                is_near = (fine >= FINE) | (agreement[piece] >= COARSE)
                is_near = agrees & np.where(is_small, fine >= FINE_OF_SMALL, is_near)
                parts.append((first[piece][is_near], second[piece][is_near], fine[is_near]))
    if not parts:
        return NearPairs(first=np.empty(0, np.int64), second=np.empty(0, np.int64), similarity=np.empty(0, np.float32))
    first, second, similarity = (np.concatenate(each) for each in zip(*parts, strict=True))
    order = np.lexsort((second, first))
    return NearPairs(first=first[order], second=second[order], similarity=similarity[order])


def is_near(one: bytes, other: bytes, one_size: tuple[int, int], other_size: tuple[int, int]) -> bool:
    """Return whether two pictures are near duplicates. `near_pairs` finds the same pairs among many."""
    return bool(len(near_pairs([one, other], [one_size, other_size]).first))


def _luma(cells: NDArray[np.uint8]) -> Floats:
    return cells[:, : LUMA * LUMA].reshape(-1, LUMA, LUMA).astype(np.float32)


def _outlines(luma: Floats) -> Floats:
    """Return the differences of neighbouring cells, (pictures, differences)."""
    count = len(luma)
    return np.concatenate([np.diff(luma, axis=axis).reshape(count, -1) for axis in (1, 2)], axis=1)


def _coarse_outlines(cells: NDArray[np.uint8]) -> Floats:
    """Return outlines in 16 x 16 cells, each scaled to the norm 1; zeros for a flat picture."""
    luma = _luma(cells)
    step = LUMA // _COARSE_CELLS
    small = luma.reshape(-1, _COARSE_CELLS, step, _COARSE_CELLS, step).mean(axis=(2, 4))
    found = _outlines(small)
    norms = np.linalg.norm(found, axis=1)
    strength = np.linalg.norm(_outlines(luma), axis=1)
    scale = np.where((strength >= _FLAT) & (norms > 0), 1 / np.maximum(norms, 1e-6), 0).astype(np.float32)
    found *= scale[:, None]
    return found


def _shapes_agree(ones: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return whether width / height agrees, up to the rounding of each size to whole pixels."""
    difference = np.abs(np.log(ones[:, 0] / ones[:, 1]) - np.log(others[:, 0] / others[:, 1]))
    rounding = 1 / np.minimum(ones, others).min(axis=1)
    found: NDArray[np.bool_] = difference <= SHAPE + rounding
    return found


def _verified(ones: NDArray[np.uint8], others: NDArray[np.uint8]) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the correlation in 32 x 32 cells for each pair, and whether the colours agree."""
    one, other = _outlines(_luma(ones)), _outlines(_luma(others))
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    fine = np.einsum("ij,ij->i", one, other) / np.maximum(norms, 1e-6)
    a, b = (each[:, LUMA * LUMA :].astype(np.float32) - 128 for each in (ones, others))
    strength = np.maximum(np.abs(a), np.abs(b)).mean(axis=1)
    agrees = np.abs(a - b).mean(axis=1) <= _COLOUR + _COLOUR_SHARE * strength
    return fine, agrees


def connected(count: int, links: Iterable[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Return the connected groups of 0 ... count - 1, each ascending, in the order of their first members."""
    leader = list(range(count))

    def leader_of(member: int) -> int:
        while leader[member] != member:
            leader[member] = leader[leader[member]]
            member = leader[member]
        return member

    for one, other in links:
        low, high = sorted((leader_of(one), leader_of(other)))
        leader[high] = low
    groups: dict[int, list[int]] = {}
    for member in range(count):
        groups.setdefault(leader_of(member), []).append(member)
    return [tuple(each) for each in groups.values()]


def chained(groups: Iterable[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yield links that connect the members of each group."""
    for group in groups:
        yield from pairwise(group)


assert CHROMA * CHROMA * 2 + LUMA * LUMA == SIGNATURE_BYTES  # noqa: S101 -- the layout that this module reads
