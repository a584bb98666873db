"""The proof, event by event: do these programs, one per rank, keep a promise under the executor's real order?

What the executor guarantees, and all that is used here: a rank executes its moves in its own order; a SEND never
blocks and copies nothing; a COPY or REDUCE waits for its messages and reads them out of the senders' memory at any
time up to its own end; a REDUCE may write before all its operands are in; the n-th message from one rank to another on
a channel meets the n-th receive. There is no global step and no buffer.

Sends never block and receives name their source, so any order of execution that respects program order and
messages gives one and the same outcome; this module executes one. What could still differ is *when* offered memory
is read: so a write to memory that was offered needs a chain of messages which proves that its reader is done.
Vector clocks carry those chains (Mattern, "Virtual time and global states of distributed systems", 1989).
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from multiring.errors import ScheduleError
from multiring.schedule.kinds import Kind, Space
from multiring.schedule.layout import Layout
from multiring.schedule.moves import NOWHERE, Move, Moves
from multiring.schedule.promise import Promise

_Route = tuple[int, int, int]  # sender, receiver, channel


class _Message(NamedTuple):
    masks: list[int]
    home: list[int]
    roundings: list[int]
    clock: NDArray[np.int32]  # of its sender, when it was offered
    executed: int  # moves its sender had executed then


def prove(promise: Promise, programs: Mapping[int, Moves]) -> None:
    """Raise ScheduleError unless `programs` keep `promise` in every order the executor may run them.

    Cost: linear in moves and messages, times the number of ranks for every message taken.
    """
    if sorted(programs) != list(range(len(promise.start))):
        raise ScheduleError(f"programs of ranks {sorted(programs)}: want 0 to {len(promise.start) - 1}")
    for rank, moves in programs.items():
        prove_spans(promise.layout, moves, rank)
    _Proof(promise, {rank: list(programs[rank].rows()) for rank in sorted(programs)}).run()


def prove_spans(layout: Layout, moves: Moves, rank: int) -> None:
    """Raise ScheduleError unless every span of `rank`'s moves is contiguous memory."""
    breaks = np.ones(len(layout.slot) + 1, np.int64)  # between a chunk and the one before
    breaks[1:-1] = (np.diff(layout.slot) != 1) | (np.diff(layout.space.astype(np.int8)) != 0)
    passed = np.cumsum(breaks)
    for first in (moves.src, moves.dst):
        rows = np.flatnonzero(first != NOWHERE)
        start, stop = first[rows], first[rows].astype(np.int64) + moves.span[rows]
        bad = (start < 0) | (moves.span[rows] < 1) | (stop > len(layout.slot))
        bad |= passed[np.where(bad, 0, stop - 1)] != passed[np.where(bad, 0, start)]
        if bad.any():
            row = int(rows[bad.argmax()])
            raise ScheduleError(
                f"rank {rank}, move {row}: chunks {int(first[row])} and on, {int(moves.span[row])} of them,"
                f" are not contiguous memory within the {len(layout.slot)} chunks there are"
            )


class _Proof:
    """One execution of all programs on bit masks."""

    def __init__(self, promise: Promise, programs: dict[int, list[Move]]) -> None:
        ranks = len(programs)
        self.promise = promise
        self.programs = programs
        self.masks = [list(start) for start in promise.start]
        self.roundings = [[0] * len(start) for start in promise.start]
        # For every chunk of every rank: who was offered it, and which of the reader's moves takes it.
        self.readers: list[list[list[tuple[int, int]]]] = [[[] for _ in start] for start in promise.start]
        # clock[r][q]: how many of q's moves are known to be executed before r's next one.
        self.clock = [np.zeros(ranks, np.int32) for _ in range(ranks)]
        self.next_move = [0] * ranks
        self.in_flight: dict[_Route, deque[_Message]] = {}
        self.takers = self._match()

    def _match(self) -> dict[_Route, deque[int]]:
        """Return, for each route, which moves of the receiver take its messages; refuse unequal numbers."""
        offered: dict[_Route, int] = {}
        takers: dict[_Route, deque[int]] = {}
        for rank, program in self.programs.items():
            for index, move in enumerate(program):
                self._check_form(rank, index, move)
                for peer in move.peers:
                    if move.kind is Kind.SEND:
                        route = (rank, peer, move.channel)
                        offered[route] = offered.get(route, 0) + 1
                    elif peer != rank:
                        takers.setdefault((peer, rank, move.channel), deque()).append(index)
        for route in sorted({*offered, *takers}):
            sent, taken = offered.get(route, 0), len(takers.get(route, ()))
            if sent != taken:
                raise ScheduleError(
                    f"rank {route[0]} sends {sent} messages to rank {route[1]} on channel {route[2]},"
                    f" which takes {taken}"
                )
        return takers

    def _check_form(self, rank: int, index: int, move: Move) -> None:
        own = move.peers.count(rank)
        has_src, has_dst = move.src != NOWHERE, move.dst != NOWHERE
        wrong = ""
        if not all(0 <= peer < len(self.programs) for peer in move.peers):
            wrong = f"there are {len(self.programs)} ranks"
        elif move.channel >= self.promise.channels:
            wrong = f"there are {self.promise.channels} channels"
        elif move.kind is Kind.SEND and (own or not move.peers or not has_src or has_dst):
            wrong = "a SEND has other ranks as peers, a src, and no dst"
        elif move.kind is Kind.COPY and (len(move.peers) != 1 or not has_dst or has_src != bool(own)):
            wrong = "a COPY has one peer, a dst, and a src only if it is local"
        elif move.kind is Kind.REDUCE and (len(move.peers) < 2 or own > 1 or not has_dst or has_src != bool(own)):
            wrong = "a REDUCE has two peers or more, itself at most once, a dst, and a src only with itself"
        elif move.last and move.kind is not Kind.REDUCE:
            wrong = "only a REDUCE can be the last"
        elif has_src and has_dst and move.src != move.dst and abs(move.src - move.dst) < move.span:
            wrong = "src and dst overlap"
        elif move.kind is Kind.COPY and move.src == move.dst:
            wrong = "it copies chunks onto themselves"
        if wrong:
            raise ScheduleError(f"rank {rank}, move {index}: {_text(move)}: {wrong}")

    def run(self) -> None:
        """Execute every move as soon as its messages are there, then compare with the promise."""
        ready = deque(self.programs)
        while ready:
            rank = ready.popleft()
            program = self.programs[rank]
            while self.next_move[rank] < len(program):
                index = self.next_move[rank]
                move = program[index]
                if move.kind is Kind.SEND:
                    ready.extend(self._offer(rank, index, move))
                elif not all(self.in_flight.get((peer, rank, move.channel)) or peer == rank for peer in move.peers):
                    break
                else:
                    self._take(rank, index, move)
                self.next_move[rank] += 1
        for rank, program in self.programs.items():
            if self.next_move[rank] < len(program):
                index = self.next_move[rank]
                raise ScheduleError(f"deadlock: rank {rank} waits for ever in move {index}: {_text(program[index])}")
        self._check_end()

    def _offer(self, rank: int, index: int, move: Move) -> list[int]:
        """Put one message on the way to every peer; return the peers, which may now have something to do."""
        message = self._contents(rank, move, index + 1)
        if 0 in message.masks:
            chunk = move.src + message.masks.index(0)
            raise ScheduleError(f"rank {rank}, move {index}: {_text(move)}: nothing is in chunk {chunk}")
        for peer in move.peers:
            route = (rank, peer, move.channel)
            self.in_flight.setdefault(route, deque()).append(message)
            reader = (peer, self.takers[route].popleft())
            for chunk in range(move.src, move.src + move.span):
                self.readers[rank][chunk].append(reader)
        return list(move.peers)

    def _take(self, rank: int, index: int, move: Move) -> None:
        before = self.clock[rank]
        try:
            operands = [self._operand(rank, peer, move) for peer in move.peers]
            after = before.copy() if any(peer != rank for peer in move.peers) else before
            for peer, operand in zip(move.peers, operands, strict=True):
                if peer != rank:
                    np.maximum(after, operand.clock, out=after)
                    after[peer] = max(after[peer], operand.executed)
            self.clock[rank] = after
            # A COPY's bytes exist only once its message was sent. A REDUCE may begin to write with its first operand.
            known = after if move.kind is Kind.COPY else before
            for at, chunk in enumerate(range(move.dst, move.dst + move.span)):
                self._check_write(rank, chunk, known)
                self._write(rank, chunk, move, [(o.masks[at], o.home[at], o.roundings[at]) for o in operands])
        except ScheduleError as error:
            raise ScheduleError(f"rank {rank}, move {index}: {_text(move)}: {error}") from None

    def _operand(self, rank: int, peer: int, move: Move) -> _Message:
        if peer == rank:
            return self._contents(rank, move, 0)
        message = self.in_flight[peer, rank, move.channel].popleft()
        if len(message.masks) != move.span:
            raise ScheduleError(f"rank {peer} sends {len(message.masks)} chunks, it takes {move.span}")
        return message

    def _contents(self, rank: int, move: Move, executed: int) -> _Message:
        """Return what is in the chunks at the move's src."""
        here = slice(move.src, move.src + move.span)
        return _Message(
            list(self.masks[rank][here]),
            list(self.promise.home[rank][here]),
            list(self.roundings[rank][here]),
            self.clock[rank],
            executed,
        )

    def _check_write(self, rank: int, chunk: int, clock: NDArray[np.int32]) -> None:
        if self.promise.layout.space[chunk] == Space.INPUT:
            raise ScheduleError(f"chunk {chunk} is INPUT, which nobody may write")
        for peer, taker in self.readers[rank][chunk]:
            if clock[peer] <= taker:
                raise ScheduleError(
                    f"overwrites chunk {chunk}, which rank {peer} may still be reading in its move {taker}"
                )
        self.readers[rank][chunk].clear()

    def _write(self, rank: int, chunk: int, move: Move, operands: list[tuple[int, int, int]]) -> None:
        result, roundings = 0, 0
        for mask, home, rounded in operands:
            if home != self.promise.home[rank][chunk]:
                raise ScheduleError(f"a piece of block {home} does not belong in chunk {chunk}")
            if mask == 0:
                raise ScheduleError("nothing is in its own operand")
            if mask & result:
                raise ScheduleError(f"ranks {_ranks(mask & result)} would be summed twice in chunk {chunk}")
            result |= mask
            roundings = max(roundings, rounded)
        if move.kind is Kind.REDUCE:
            roundings += 1
            if roundings > self.promise.roundings:
                raise ScheduleError(
                    f"chunk {chunk} is rounded {roundings} times, this accumulation allows {self.promise.roundings}"
                )
            if move.last != (result == self.promise.complete):
                raise ScheduleError(f"last is {move.last}, but ranks {_ranks(result)} are in chunk {chunk}")
        if self.masks[rank][chunk] == result:
            raise ScheduleError(f"chunk {chunk} holds that already")
        self.masks[rank][chunk] = result
        self.roundings[rank][chunk] = roundings

    def _check_end(self) -> None:
        for rank, want in enumerate(self.promise.want):
            for chunk, mask in enumerate(want):
                if mask and self.masks[rank][chunk] != mask:
                    raise ScheduleError(
                        f"rank {rank} ends with {_ranks(self.masks[rank][chunk])} in chunk {chunk}, want {_ranks(mask)}"
                    )
                if mask and self.promise.is_quiet:
                    self._check_write(rank, chunk, self.clock[rank])


def _ranks(mask: int) -> list[int]:
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]


def _text(move: Move) -> str:
    arrow = f"{'' if move.src == NOWHERE else move.src} -> {'' if move.dst == NOWHERE else move.dst}"
    return f"{move.kind.name} chunk {arrow.strip()} x {move.span}, peers {list(move.peers)}, channel {move.channel}"
