"""Check the form of each move by itself, independent of all other moves."""

import numpy as np

from multiring._schedule.kinds import Kind
from multiring._schedule.layout import Layout
from multiring._schedule.moves import NOWHERE, Move, Moves
from multiring.errors import ScheduleError


class ChunkSpans:
    """The spans of chunks that are contiguous memory in a layout."""

    def __init__(self, layout: Layout) -> None:
        self.chunks = len(layout.slot)
        breaks = np.ones(self.chunks + 1, np.int64)  # 1: a gap before this chunk
        breaks[1:-1] = (np.diff(layout.slot) != 1) | (np.diff(layout.space.astype(np.int8)) != 0)
        self._passed = np.cumsum(breaks)

    def prove(self, moves: Moves, rank: int) -> None:
        """Raise ScheduleError unless every span of `rank`'s moves is contiguous memory."""
        for first in (moves.src, moves.dst):
            rows = np.flatnonzero(first != NOWHERE)
            start, stop = first[rows], first[rows].astype(np.int64) + moves.span[rows]
            bad = (start < 0) | (moves.span[rows] < 1) | (stop > self.chunks)
            bad |= self._passed[np.where(bad, 0, stop - 1)] != self._passed[np.where(bad, 0, start)]
            if bad.any():
                row = int(rows[bad.argmax()])
                raise ScheduleError(
                    f"rank {rank}, move {row}: the {int(moves.span[row])} chunks from chunk {int(first[row])}"
                    f" are not contiguous memory within the schedule's {self.chunks} chunks"
                )


def prove_form(move: Move, rank: int, index: int, limits: tuple[int, int]) -> None:
    """Raise ScheduleError unless move `index` of `rank` fits its kind.

    `limits`: numbers of ranks and channels.
    """
    ranks, channels = limits
    wrong = ""
    if not all(0 <= peer < ranks for peer in move.peers):
        wrong = f"there are {ranks} ranks"
    elif move.channel >= channels:
        wrong = f"there are {channels} channels"
    elif move.last and move.kind is not Kind.REDUCE:
        wrong = "only a REDUCE can be the last"
    else:
        wrong = _wrong_in_send(move, rank) if move.kind is Kind.SEND else _wrong_in_receive(move, rank)
    if wrong:
        raise ScheduleError(f"rank {rank}, move {index}: {text_of(move)}: {wrong}")


def _wrong_in_send(move: Move, rank: int) -> str:
    if rank in move.peers or not move.peers or move.src == NOWHERE:
        return "a SEND has other ranks as peers, and a src"
    if move.dst != NOWHERE and (not move.wire or move.dst != move.src):
        return "a SEND has a dst only to keep what it codes, which is its src"
    return ""


def _wrong_in_receive(move: Move, rank: int) -> str:
    own = move.peers.count(rank)
    has_src, has_dst = move.src != NOWHERE, move.dst != NOWHERE
    if move.kind is Kind.COPY and (len(move.peers) != 1 or not has_dst or has_src != bool(own)):
        return "a COPY has one peer, a dst, and a src only if it is local"
    if move.kind is Kind.REDUCE and (len(move.peers) < 2 or own > 1 or not has_dst or has_src != bool(own)):
        return "a REDUCE has two peers or more, itself at most once, a dst, and a src only with itself"
    if has_src and move.src != move.dst and abs(move.src - move.dst) < move.span:
        return "src and dst overlap"
    if move.kind is Kind.COPY and move.src == move.dst:
        return "it copies chunks onto themselves"
    if move.kind is Kind.COPY and own and move.wire:
        return "nothing travels within a rank, so nothing is coded"
    return ""


def text_of(move: Move) -> str:
    """Return a description of `move` for error messages."""
    arrow = f"{'' if move.src == NOWHERE else move.src} -> {'' if move.dst == NOWHERE else move.dst}"
    wire = f", wire {move.wire.name.lower()}" if move.wire else ""
    return (
        f"{move.kind.name} chunk {arrow.strip()} x {move.span}, peers {list(move.peers)}, channel {move.channel}{wire}"
    )
