"""Moves: one rank's steps in order, as arrays that the native executor reads directly."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from multiring._schedule.kinds import Kind, Wire

NOWHERE = -1  # stands for a chunk that a move does not have: a plain SEND's dst, a remote COPY's src


class Move(NamedTuple):
    """One row of `Moves`."""

    kind: Kind
    channel: int
    src: int
    dst: int
    span: int
    last: bool
    peers: tuple[int, ...]
    wire: Wire = Wire.NONE


@dataclass(frozen=True, eq=False, slots=True)
class Moves:
    """n moves as read-only arrays, one row per move, in the order the rank executes them.

    SEND offers `span` chunks, starting at `src`, to each of its peers. COPY takes chunks from its single peer and
    overwrites the `span` chunks starting at `dst`. If the peer is the rank itself, COPY takes the chunks at `src`.
    REDUCE takes one message from each peer and combines them left to right in the order of `peers`. If `peers` has the
    rank itself, its operand is the chunks at `src`. REDUCE writes the result at `dst`, possibly while operands still
    arrive. `last` marks the REDUCE that completes a chunk: an average divides there.

    If `wire` is not NONE, messages are encoded. A SEND encodes its chunks when it is executed; afterwards they may be
    overwritten. If a SEND has a dst (equal to its src), it stores there the values that its peers will decode, so that
    all ranks hold the same values. A REDUCE or COPY decodes messages from its peers; a REDUCE's own operand is exact.

    Messages from one rank to another match in order on each channel: the n-th SEND meets the n-th receive.
    A rank is done when its moves are done and its peers have taken all chunks that it offered.
    """

    kind: NDArray[np.uint8]  # (n,)
    channel: NDArray[np.uint16]  # (n,)
    src: NDArray[np.int32]  # (n,), NOWHERE if the move has no src
    dst: NDArray[np.int32]  # (n,), NOWHERE if the move has no dst
    span: NDArray[np.int32]  # (n,), consecutive chunks that are contiguous in memory
    last: NDArray[np.bool_]  # (n,)
    peer_start: NDArray[np.int32]  # (n + 1,): move i has peers[peer_start[i]:peer_start[i + 1]]
    peers: NDArray[np.int32]  # (m,), ranks of the group
    wire: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))  # (n,); by default all NONE

    def __post_init__(self) -> None:
        if len(self.wire) != len(self.kind):
            object.__setattr__(self, "wire", np.zeros(len(self.kind), np.uint8))
        for each in fields(self):
            getattr(self, each.name).setflags(write=False)

    def __len__(self) -> int:
        return len(self.kind)

    @classmethod
    def of(cls, rows: Iterable[Move]) -> "Moves":
        """Return the moves `rows`, in that order."""
        rows = list(rows)
        return cls(
            kind=np.array([row.kind for row in rows], np.uint8),
            channel=np.array([row.channel for row in rows], np.uint16),
            src=np.array([row.src for row in rows], np.int32),
            dst=np.array([row.dst for row in rows], np.int32),
            span=np.array([row.span for row in rows], np.int32),
            last=np.array([row.last for row in rows], np.bool_),
            peer_start=np.cumsum([0, *(len(row.peers) for row in rows)], dtype=np.int32),
            peers=np.array([peer for row in rows for peer in row.peers], np.int32),
            wire=np.array([row.wire for row in rows], np.uint8),
        )

    @classmethod
    def concatenate(cls, pieces: Sequence["Moves"]) -> "Moves":
        """Return the moves of all `pieces`, one piece after the other."""
        if not pieces:
            return cls.of(())
        columns = ("kind", "channel", "src", "dst", "span", "last", "peers", "wire")
        joined = {name: np.concatenate([getattr(piece, name) for piece in pieces]) for name in columns}
        counts = np.concatenate([np.diff(piece.peer_start) for piece in pieces])
        return cls(**joined, peer_start=_starts(counts))

    def take(self, rows: NDArray[np.intp]) -> "Moves":
        """Return the moves at `rows`, in that order; a row may occur several times."""
        counts = np.diff(self.peer_start)[rows]
        peer_start = _starts(counts)
        within = np.arange(peer_start[-1]) - np.repeat(peer_start[:-1], counts)
        return Moves(
            kind=self.kind[rows],
            channel=self.channel[rows],
            src=self.src[rows],
            dst=self.dst[rows],
            span=self.span[rows],
            last=self.last[rows],
            peer_start=peer_start,
            peers=self.peers[np.repeat(self.peer_start[:-1][rows], counts) + within],
            wire=self.wire[rows],
        )

    def rows(self) -> Iterator[Move]:
        """Yield the moves one by one."""
        starts, peers, kinds, wires = self.peer_start.tolist(), self.peers.tolist(), list(Kind), list(Wire)
        columns = (self.kind, self.channel, self.src, self.dst, self.span, self.last, self.wire)
        for index, (kind, channel, src, dst, span, last, wire) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            those = tuple(peers[starts[index] : starts[index + 1]])
            yield Move(kinds[kind], channel, src, dst, span, last, those, wires[wire])


def _starts(counts: NDArray[np.integer]) -> NDArray[np.int32]:
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts
