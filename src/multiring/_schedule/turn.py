"""Rotations of a line: rank 0's moves rotated by `by` become the moves of the rank `by` coordinates further.

Rank r becomes r + by, modulo the number of ranks. A chunk rotates within its cycle. In a cycle with as many chunks as
ranks, part c becomes part c + by; a cycle of one chunk is unchanged.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from multiring._schedule.kinds import Kind
from multiring._schedule.layout import Layout
from multiring._schedule.moves import NOWHERE, Moves


@dataclass(frozen=True, eq=False, slots=True)
class Turn:
    """How the ranks and chunks of a line rotate."""

    ranks: int
    first: NDArray[np.int64]  # (chunks,): the first chunk of each chunk's cycle
    length: NDArray[np.int64]  # (chunks,): the length of each chunk's cycle

    @classmethod
    def of_parts(cls, ranks: int, parts: int) -> "Turn":
        """Return the rotation of the part numbers of a pattern: all parts form one cycle."""
        return cls(ranks, np.zeros(parts, np.int64), np.full(parts, parts, np.int64))

    @classmethod
    def of_chunks(cls, ranks: int, layout: Layout) -> "Turn":
        """Return the rotation of the chunks of a line: each buffer with one block per rank forms a cycle."""
        first, length = np.arange(len(layout.space)), np.ones(len(layout.space), np.int64)
        starts = np.flatnonzero(np.diff(layout.space.astype(np.int8), prepend=-1))
        for start, stop in zip(starts, np.append(starts[1:], len(layout.space)), strict=True):
            if (stop - start) % ranks == 0:
                first[start:stop] = start + (first[start:stop] - start) // ranks * ranks
                length[start:stop] = ranks
        return cls(ranks, first, length)

    @classmethod
    def of_ranks(cls, ranks: int, layout: Layout) -> "Turn":
        """Return the rotation that changes ranks only: every chunk stays as it is."""
        return cls(ranks, np.arange(len(layout.space)), np.ones(len(layout.space), np.int64))

    def chunk(self, chunk: int, by: int) -> int:
        """Return `chunk` rotated by `by`."""
        first = int(self.first[chunk])
        return first + (chunk - first + by) % int(self.length[chunk])

    def chunks(self, chunks: NDArray[np.int32], by: int) -> NDArray[np.int64]:
        """Return `chunks` rotated by `by`; NOWHERE is unchanged."""
        first, length = self.first[chunks], self.length[chunks]
        return np.where(chunks == NOWHERE, NOWHERE, first + (chunks - first + by) % length)


class Likeness:
    """Compare the moves of other ranks with rank 0's moves, rotated.

    `is_fixed` says for each move whether all compared ranks take its operands in the same order of ranks, so that the
    order does not rotate with the ranks.
    """

    def __init__(self, moves: Moves, turn: Turn) -> None:
        self.moves = moves
        self.turn = turn
        counts = np.diff(moves.peer_start)
        self._counts = counts
        self._row = np.repeat(np.arange(len(moves)), counts)  # the move of every peer
        self.is_fixed = (moves.kind == Kind.REDUCE) & (counts > 0)

    def differs(self, other: Moves, by: int) -> int | None:
        """Return the first of `other`'s moves that is not `moves` rotated by `by`, ignoring the order of peers."""
        mine, count = self.moves, min(len(self.moves), len(other))
        if len(mine) == len(other) and np.array_equal(mine.peer_start, other.peer_start):
            alike = (mine.kind == other.kind) & (mine.channel == other.channel) & (mine.span == other.span)
            alike &= (mine.last == other.last) & (mine.wire == other.wire)
            alike &= self.turn.chunks(mine.src, by) == other.src
            alike &= self.turn.chunks(mine.dst, by) == other.dst
            self._compare_peers(other.peers, by, alike)
            return None if alike.all() else int(alike.argmin())
        # The programs have different lengths: compare the moves that both have.
        common = np.arange(count)
        less = Likeness(mine.take(common), self.turn)
        wanted = np.diff(other.peer_start)[:count]
        unequal = np.flatnonzero(wanted != less._counts)
        count = int(unequal[0]) if len(unequal) else count
        found = Likeness(mine.take(common[:count]), self.turn).differs(other.take(common[:count]), by)
        return count if found is None else found

    def _compare_peers(self, peers: NDArray[np.int32], by: int, alike: NDArray[np.bool_]) -> None:
        """Clear the entries of `alike` and `is_fixed` for the moves whose peers differ."""
        wanted = (self.moves.peers + by) % self.turn.ranks
        if self.is_fixed.any():
            self.is_fixed[self._row[self.moves.peers != peers]] = False
        moved = np.zeros(len(self.moves), np.bool_)
        moved[self._row[wanted != peers]] = True
        if not moved.any():
            return
        among = moved[self._row]
        rows = self._row[among].astype(np.int64) * self.turn.ranks
        if not ((peers[among] >= 0) & (peers[among] < self.turn.ranks)).all():
            alike[moved] = False
            return
        unequal = np.sort(rows + wanted[among]) != np.sort(rows + peers[among])
        alike[self._row[among][unequal]] = False
