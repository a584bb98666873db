"""Sets of pixels as run lengths, column by column as COCO counts them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring._arguments import is_of, shown, whole
from multiring.errors import ArgumentError, DataError

# COCO's compressed text has 6 bits a character: 5 of the number, one for "more follows". 48 is the character "0".
_FIRST, _BITS, _MORE, _SIGN = 48, 5, 0x20, 0x10
_MOST_BITS = 40  # no run of a picture is longer


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLengths:
    """A set of pixels of a picture.

    Attributes:
        width: the picture's width in pixels.
        height: the picture's height in pixels.
        runs: the lengths of alternating runs of pixels that are out and in, starting with out, down the columns from
            left to right. Only the first may be 0, so that equal sets have equal runs.

    Raises:
        DataError: the runs are no such list.
    """

    width: int
    height: int
    runs: tuple[int, ...]

    def __post_init__(self) -> None:
        if not is_of(self.runs, tuple, list):
            raise DataError(f"run lengths of {shown(self.runs)}: want a tuple of whole numbers")
        numbers = (self.width, self.height, *self.runs)
        if is_of(self.runs, list) or any(type(each) is not int for each in numbers):
            # Of Python's type: labels are kept as JSON, and NumPy's numbers would wrap in the sum.
            width, height, *runs = map(_whole, numbers)
            for name, value in (("width", width), ("height", height), ("runs", tuple(runs))):
                object.__setattr__(self, name, value)
        if self.width < 1 or self.height < 1:
            raise DataError(f"mask of {self.width} x {self.height} pixels: want at least 1 x 1")
        if min(self.runs[1:], default=1) < 1 or min(self.runs[:1], default=0) < 0:
            raise DataError("run lengths: want numbers above 0; only the first may be 0")
        if sum(self.runs) != self.width * self.height:
            raise DataError(
                f"run lengths add up to {sum(self.runs)}: want {self.width} x {self.height} = "
                f"{self.width * self.height} pixels"
            )

    def area(self) -> int:
        """Return the number of pixels in the set."""
        return sum(self.runs[1::2])

    def bounds(self) -> tuple[float, float, float, float]:
        """Return left, top, right and bottom around the pixels; zeros if there are none."""
        pixels = self.pixels()
        columns, rows = np.flatnonzero(pixels.any(axis=0)), np.flatnonzero(pixels.any(axis=1))
        if not columns.size:
            return 0.0, 0.0, 0.0, 0.0
        return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)

    def pixels(self) -> NDArray[np.bool_]:
        """Return the set as an array (height, width)."""
        values = np.arange(len(self.runs)) % 2 == 1
        flat = np.repeat(values, self.runs)
        found: NDArray[np.bool_] = flat.reshape(self.width, self.height).T
        return found


def run_lengths_of(pixels: NDArray[np.bool_]) -> RunLengths:
    """Return the run lengths of an array (height, width) of booleans.

    Whole numbers count as in if they are not 0. Other numbers than 0 and 1 with fractions are refused: probabilities,
    for example, would nearly all count as in.

    Raises:
        ArgumentError: `pixels` has another shape, no pixel, or other values.
    """
    found = np.asarray(pixels)
    if found.ndim != 2 or not found.size:
        raise ArgumentError(f"pixels of shape {found.shape}: want an array (height, width) with at least one pixel")
    is_fraction = found.dtype.kind == "f"
    if found.dtype.kind not in "biuf" or (is_fraction and not ((found == 0) | (found == 1)).all()):
        raise ArgumentError(f"pixels of type {found.dtype}: want booleans, as from `probabilities > 0.5`")
    height, width = found.shape
    flat = np.asarray(pixels, bool).T.reshape(-1)
    edges = np.flatnonzero(np.diff(flat)) + 1
    runs = np.diff(np.concatenate([[0], edges, [flat.size]])).tolist()
    return RunLengths(width=width, height=height, runs=tuple([0, *runs] if flat[0] else runs))


def _whole(value: Any) -> int:
    found = whole(value)
    if found is None:
        raise DataError(f"run lengths of {shown(value)}: want whole numbers")
    return found


def joined_runs(width: int, height: int, counts: list[int]) -> RunLengths:
    """Return run lengths from counts that may have zeros in any place, as files of other programs have.

    Raises:
        DataError: a count is negative, or the counts do not add up to the picture's pixels.
    """
    if min(counts, default=0) < 0:
        raise DataError(f"run length {min(counts)}: want numbers of at least 0")
    runs: list[int] = [0]
    is_in = False
    for number, count in enumerate(counts):
        if count and (number % 2 == 1) != is_in:
            runs.append(0)
            is_in = not is_in
        runs[-1] += count
    return RunLengths(width=width, height=height, runs=tuple(runs))


def decompressed(text: str) -> list[int]:
    """Return the counts of COCO's compressed text.

    Each number after the second is stored as its difference from the number two places before.

    Raises:
        DataError: the text has a character outside the code, or ends inside a number.
    """
    counts: list[int] = []
    value = shift = 0
    for character in text:
        code = ord(character) - _FIRST
        if not 0 <= code < 2 * _MORE or shift > _MOST_BITS:
            raise DataError(f"compressed run lengths have {character!r}: want COCO's code, '0' to 'o'")
        value |= (code & (_MORE - 1)) << shift
        shift += _BITS
        if code & _MORE:
            continue
        if code & _SIGN:
            value -= 1 << shift
        counts.append(value + (counts[-2] if len(counts) > 2 else 0))
        value = shift = 0
    if shift:
        raise DataError("compressed run lengths end inside a number: the text is truncated")
    return counts


def compressed(runs: tuple[int, ...]) -> str:
    """Return COCO's compressed text of run lengths; the reverse of `decompressed`."""
    characters = []
    for number, run in enumerate(runs):
        left = run - runs[number - 2] if number > 2 else run
        while True:
            code = left & (_MORE - 1)
            left >>= _BITS
            is_end = left == (-1 if code & _SIGN else 0)
            characters.append(chr(_FIRST + (code if is_end else code | _MORE)))
            if is_end:
                break
    return "".join(characters)
