"""Turning: what one rank of a line does, as another would do it that stands `by` coordinates further.

Rank r becomes r + by, modulo the ranks. A chunk turns within its cycle: with cycles of as many chunks as there are
ranks part c becomes part c + by; a cycle of one chunk stays as it is.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from multiring.schedule.kinds import Kind
from multiring.schedule.layout import Layout
from multiring.schedule.moves import NOWHERE, Moves


@dataclass(frozen=True, eq=False, slots=True)
class Turn:
    """How the ranks and chunks of a line turn."""

    ranks: int
    first: NDArray[np.int64]  # (chunks,): the first chunk of the cycle in which a chunk turns
    length: NDArray[np.int64]  # (chunks,): of that cycle

    @classmethod
    def of_parts(cls, ranks: int, parts: int) -> "Turn":
        """Return how the part numbers of a pattern turn: all in one cycle."""
        return cls(ranks, np.zeros(parts, np.int64), np.full(parts, parts, np.int64))

    @classmethod
    def of_chunks(cls, ranks: int, layout: Layout) -> "Turn":
        """Return how the chunks of a line turn: every buffer of a block for each rank is a cycle."""
        first, length = np.arange(len(layout.space)), np.ones(len(layout.space), np.int64)
        starts = np.flatnonzero(np.diff(layout.space.astype(np.int8), prepend=-1))
        for start, stop in zip(starts, np.append(starts[1:], len(layout.space)), strict=True):
            if (stop - start) % ranks == 0:
                first[start:stop] = start + (first[start:stop] - start) // ranks * ranks
                length[start:stop] = ranks
        return cls(ranks, first, length)

    @classmethod
    def of_ranks(cls, ranks: int, layout: Layout) -> "Turn":
        """Return the turn of the ranks in which all chunks stay."""
        return cls(ranks, np.arange(len(layout.space)), np.ones(len(layout.space), np.int64))

    def chunk(self, chunk: int, by: int) -> int:
        """Return what becomes of one chunk."""
        first = int(self.first[chunk])
        return first + (chunk - first + by) % int(self.length[chunk])

    def chunks(self, chunks: NDArray[np.int32], by: int) -> NDArray[np.int64]:
        """Return what becomes of chunks; NOWHERE stays."""
        first, length = self.first[chunks], self.length[chunks]
        return np.where(chunks == NOWHERE, NOWHERE, first + (chunks - first + by) % length)


class Likeness:
    """Whether ranks do what rank 0 does, turned.

    `is_fixed` says for each move whether all that were compared take its operands in one and the same order of ranks,
    and not in one that turns with them.
    """

    def __init__(self, moves: Moves, turn: Turn) -> None:
        self.moves = moves
        self.turn = turn
        counts = np.diff(moves.peer_start)
        self._counts = counts
        self._row = np.repeat(np.arange(len(moves)), counts)  # of every peer
        self.is_fixed = (moves.kind == Kind.REDUCE) & (counts > 0)

    def differs(self, other: Moves, by: int) -> int | None:
        """Return the first of `other`'s moves that is not this one's turned by `by`, up to the order of its peers."""
        mine, count = self.moves, min(len(self.moves), len(other))
        if len(mine) == len(other) and np.array_equal(mine.peer_start, other.peer_start):
            alike = (mine.kind == other.kind) & (mine.channel == other.channel) & (mine.span == other.span)
            alike &= (mine.last == other.last) & (mine.wire == other.wire)
            alike &= self.turn.chunks(mine.src, by) == other.src
            alike &= self.turn.chunks(mine.dst, by) == other.dst
            self._compare_peers(other.peers, by, alike)
            return None if alike.all() else int(alike.argmin())
        # Of another length: go by what both have.
        common = np.arange(count)
        less = Likeness(mine.take(common), self.turn)
        wanted = np.diff(other.peer_start)[:count]
        unequal = np.flatnonzero(wanted != less._counts)
        count = int(unequal[0]) if len(unequal) else count
        found = Likeness(mine.take(common[:count]), self.turn).differs(other.take(common[:count]), by)
        return count if found is None else found

    def _compare_peers(self, peers: NDArray[np.int32], by: int, alike: NDArray[np.bool_]) -> None:
        """Take out of `alike`, and of `is_fixed`, the moves whose peers are not the same."""
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
