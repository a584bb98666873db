"""The Adasum of every rank's arrays, worked out by all ranks together.

Each rank gets one slice of all ranks' arrays, and combines those: as many elements as its own arrays have. What the
formula needs to know of the whole arrays, their dot products, the ranks add up once a round. Every slice is worked out
on one rank only, so all get the same bits.

    all_to_all              the slices           (p - 1) / p of the arrays' bytes a rank
    all_reduce, each round  the dot products     24 bytes an array and pair; ceil(log2 p) rounds
    all_gather              the slices' results  (p - 1) / p of the arrays' bytes a rank

That is what an all_reduce moves, at any number of ranks. Meanwhile it holds twice the arrays' memory, or four times
where they are of a 16-bit type.
"""

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.errors import ArgumentError
from multiring.frontend.adasum import combine, held_type, products, rounds
from multiring.runtime import Group, Handle
from multiring.runtime.group.handles import in_background

Array = NDArray[Any]


def start_adasum(group: Group, arrays: Sequence[Array], *, label: str = "") -> Handle:
    """Start to overwrite every rank's `arrays` with their Adasum; each of them is one vector.

    Args:
        group: the ranks; for all of them this is one operation of the group.
        arrays: of one floating type, writeable, in host memory; the same shapes and type on all ranks. They are the
            operation's until it has ended, and are written last of all: after a mismatch they are what they were.
        label: as for the Group's collectives.

    Raises:
        ArgumentError: `arrays` are of different types, or of no floating type.
    """
    kinds = {array.dtype for array in arrays}
    if len(kinds) > 1:
        raise ArgumentError(f"Adasum of {', '.join(sorted(kind.name for kind in kinds))} at once: want one type")
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
    """The second and later steps of one group's reductions, which have an order of their own.

    All ranks come to the first steps in one order, but to the end of them at different times, with other operations of
    the group behind. So the later steps are taken on a twin of the group, one reduction after the other.
    """

    def __init__(self, group: Group) -> None:
        self.group = group.twin_for("Adasum")
        self.number = 0  # of reductions whose first step all ranks have taken
        self.lock = threading.Lock()  # held while a first step is posted and its turn is given out
        self._latest = threading.Event()
        self._latest.set()

    def next_turn(self) -> "_Turn":
        turn = _Turn(self, self._latest)
        self._latest = turn.is_over
        return turn


class _Turn:
    """One reduction's place in its line."""

    def __init__(self, line: _Line, before: threading.Event) -> None:
        self.line = line
        self.is_over = threading.Event()
        self._before = before

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for the reductions before this one; those behind it wait until the block has ended, in whatever way."""
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
        self._each = -(-count // group.size)  # elements of a slice; of the last ones some are there to fill it up
        self.memory = group.allocate(group.size * self._each, kind.name)
        for (start, end), array in zip(self._extents, arrays, strict=True):
            self.memory[start:end] = array.reshape(-1)
        self.memory[count:] = 0

    def finish(self, slices: Handle, turn: _Turn) -> None:
        """Take all steps but the first, whose handle is `slices`."""
        with turn.taken():
            rows = slices.wait().reshape(self._size, self._each)
            turn.line.number += 1
            what = f"Adasum {turn.line.number}"
            own = self._combine(rows, turn.line.group, what)
            whole = turn.line.group.all_gather(own, self.memory, label=f"result of {what}")
        for (start, end), array in zip(self._extents, self._arrays, strict=True):
            array[...] = whole[start:end].reshape(array.shape)

    def _combine(self, rows: Array, group: Group, what: str) -> Array:
        """Return this rank's slice of the result; `rows` are its slices of all ranks' arrays, and scratch."""
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
        """Return the arrays, by number, of which something lies in this rank's slice, and what of it that is."""
        first = self._rank * self._each
        last = first + self._each
        return [
            (array, slice(max(start, first) - first, min(end, last) - first))
            for array, (start, end) in enumerate(self._extents)
            if max(start, first) < min(end, last)
        ]
