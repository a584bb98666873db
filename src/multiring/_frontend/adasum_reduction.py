"""The Adasum of all ranks' arrays, computed by all ranks together.

Each rank receives one slice of every rank's arrays and combines these slices. All slices of a rank together have as
many elements as the rank's own arrays. The formula needs the dot products of the whole arrays, so the ranks sum the
products of their slices once per round. Each slice is computed on one rank only, so all ranks get the same bits.

    all_to_all              the slices           (p - 1) / p of the arrays' bytes per rank
    all_reduce, each round  the dot products     24 bytes per array and pair; ceil(log2 p) rounds
    all_gather              the slices' results  (p - 1) / p of the arrays' bytes per rank

An all_reduce moves the same number of bytes, for any number of ranks. While it runs, the operation needs twice the
memory of the arrays, or four times if they have a 16-bit type.
"""

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring._frontend.adasum import combine, held_type, products, rounds
from multiring._runtime import Group, Handle
from multiring._runtime.group.handles import in_background
from multiring.errors import ArgumentError

Array = NDArray[Any]


def start_adasum(group: Group, arrays: Sequence[Array], *, label: str = "") -> Handle:
    """Start to overwrite every rank's `arrays` with their Adasum; each array is one vector.

    Args:
        group: the ranks. All of them call this, in the same order as the group's other operations.
        arrays: writeable arrays of one floating-point type in host memory, with the same type and shapes on all ranks.
            Do not use them until the operation has ended. They are written at the very end, so a mismatch leaves them
            unchanged.
        label: as for the Group's collectives.

    Raises:
        ArgumentError: `arrays` have different types, or a type that is not floating-point.
    """
    kinds = {array.dtype for array in arrays}
    if len(kinds) > 1:
        raise ArgumentError(f"Adasum of {', '.join(sorted(kind.name for kind in kinds))} in one call: want one type")
    kind = kinds.pop() if kinds else np.dtype(np.float32)
    held_type(kind)
    reduction = _Reduction(group, arrays, kind)
    shapes = ", ".join(str(array.shape) for array in arrays)
    line = _line_of(group)
    with line.lock:
        slices = group.all_to_all_async(reduction.memory, label=label or f"Adasum of shapes {shapes}")
        turn = line.next_turn()
    return in_background(lambda: reduction.finish(slices, turn), "Adasum")


class _Line:
    """The order of the second and later steps of one group's reductions.

    All ranks start the first steps in the same order. These steps end at different times on different ranks. The group
    may have posted other operations by then. The later steps therefore run on a separate group of the same ranks, one
    reduction after the other.
    """

    def __init__(self, group: Group) -> None:
        self.group = group.twin_for("Adasum")
        self.number = 0  # counts reductions whose first step has ended
        self.lock = threading.Lock()  # held while a reduction posts its first step and gets its turn
        self._latest = threading.Event()
        self._latest.set()

    def next_turn(self) -> "_Turn":
        turn = _Turn(self, self._latest)
        self._latest = turn.is_over
        return turn


class _Turn:
    """The turn of one reduction to run its later steps."""

    def __init__(self, line: _Line, before: threading.Event) -> None:
        self.line = line
        self.is_over = threading.Event()
        self._before = before

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for the earlier reductions, then run the block.

        Later reductions wait until the block returns or raises.
        """
        self._before.wait()
        try:
            yield
        finally:
            self.is_over.set()


_lines: "weakref.WeakKeyDictionary[Group, _Line]" = weakref.WeakKeyDictionary()
_lines_lock = threading.Lock()


def _line_of(group: Group) -> _Line:
    with _lines_lock:
        found = _lines.get(group)
        if found is None:
            found = _lines[group] = _Line(group)
        return found


class _Reduction:
    """One call of `start_adasum` on this rank."""

    def __init__(self, group: Group, arrays: Sequence[Array], kind: np.dtype[Any]) -> None:
        self._size = group.size
        self._rank = group.rank
        self._arrays = arrays
        ends = np.cumsum([array.size for array in arrays], dtype=np.int64).tolist()
        self._extents = [(end - array.size, end) for end, array in zip(ends, arrays, strict=True)]
        count = ends[-1] if ends else 0
        self._each = -(-count // group.size)  # elements of a slice; the last slices are padded with zeros
        self.memory = group.allocate(group.size * self._each, kind.name)
        for (start, end), array in zip(self._extents, arrays, strict=True):
            self.memory[start:end] = array.reshape(-1)
        self.memory[count:] = 0

    def finish(self, slices: Handle, turn: _Turn) -> None:
        """Run all steps after the first step, whose handle is `slices`."""
        with turn.taken():
            rows = slices.wait().reshape(self._size, self._each)
            turn.line.number += 1
            what = f"Adasum {turn.line.number}"
            own = self._combine(rows, turn.line.group, what)
            whole = turn.line.group.all_gather(own, self.memory, label=f"result of {what}")
        for (start, end), array in zip(self._extents, self._arrays, strict=True):
            array[...] = whole[start:end].reshape(array.shape)

    def _combine(self, rows: Array, group: Group, what: str) -> Array:
        """Return this rank's slice of the result.

        `rows` has this rank's slices of all ranks' arrays, and is overwritten.
        """
        kind = rows.dtype
        held = rows.astype(held_type(kind), copy=False)
        pieces = self._pieces()
        for index, pairs in enumerate(rounds(self._size)):
            dots = np.zeros((len(pairs), len(self._arrays), 3))
            for (i, j), by_array in zip(pairs, dots, strict=True):
                for array, piece in pieces:
                    by_array[array] = products(held[i, piece], held[j, piece])
            group.all_reduce(dots, label=f"round {index} of {what}")
            for (i, j), by_array in zip(pairs, dots, strict=True):
                for array, piece in pieces:
                    combine(held[i, piece], held[j, piece], by_array[array])
        with np.errstate(over="ignore", invalid="ignore"):
            found: Array = held[0].astype(kind, copy=False)
        return found

    def _pieces(self) -> list[tuple[int, slice]]:
        """Yield the number of each array that overlaps this rank's slice, and the overlap within the slice."""
        first = self._rank * self._each
        last = first + self._each
        return [
            (array, slice(max(start, first) - first, min(end, last) - first))
            for array, (start, end) in enumerate(self._extents)
            if max(start, first) < min(end, last)
        ]
