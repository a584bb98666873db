"""The proof, event by event: do these programs, one per rank, keep a promise in every order the executor may choose?

The proof uses only these guarantees of the executor. A rank executes its moves in its own order. A SEND never blocks
and copies nothing. A COPY or REDUCE waits for its messages and reads them out of the senders' memory at any time up to
its own end. A REDUCE may write before all its operands have arrived. The n-th message from one rank to another on a
channel meets the n-th receive. There is no global step and no buffer.

Sends never block and receives name their source, so every execution order that respects program order and messages has
the same outcome. This module executes one such order. Only the time at which offered memory is read can differ.
Therefore a write to offered memory needs a chain of messages which proves that its reader is done. Vector clocks carry
these chains (Mattern, "Virtual time and global states of distributed systems", 1989).

A mask names the ranks whose contributions a chunk holds. A *version* (versions.py) identifies how its bits were
computed. The proof ends when all ranks that want a chunk hold the same version of it: replicas never diverge.

This module accepts any programs, at a cost that grows with the messages of all ranks. If every program is a rotation of
rank 0's, turned.py proves them all by rank 0's moves.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from multiring._schedule.contents import Content, kept_of, result_of, wants
from multiring._schedule.form import ChunkSpans, prove_form, text_of
from multiring._schedule.kinds import Kind, Space, Wire
from multiring._schedule.moves import NOWHERE, Move, Moves
from multiring._schedule.promise import Promise
from multiring._schedule.versions import Version, Versions
from multiring.errors import ScheduleError

_Route = tuple[int, int, int]  # sender, receiver, channel


class _Message(NamedTuple):
    contents: list[Content]
    wire: Wire
    clock: NDArray[np.int32] | None  # the sender's, at the time of the offer
    executed: int  # how many moves the sender had executed at that time


def prove(promise: Promise, programs: Mapping[int, Moves]) -> None:
    """Raise ScheduleError unless `programs` keep `promise` in every order in which the executor may run them.

    Cost: linear in moves and messages. If offered memory is written again, the cost of each taken message grows with
    the number of ranks.
    """
    if sorted(programs) != list(range(promise.ranks)):
        raise ScheduleError(f"programs of ranks {sorted(programs)}: want 0 to {promise.ranks - 1}")
    spans = ChunkSpans(promise.layout)
    for rank, moves in programs.items():
        spans.prove(moves, rank)
    # Clocks are needed only if a chunk is written after it was offered: only such a write has readers to wait for.
    has_clocks = promise.is_quiet or any(_writes_what_it_offered(moves, spans.chunks) for moves in programs.values())
    _Proof(promise, {rank: list(programs[rank].rows()) for rank in sorted(programs)}, has_clocks=has_clocks).run()


def _writes_what_it_offered(moves: Moves, chunks: int) -> bool:
    """Return whether a chunk may be written after it was offered, or in the move that offers it."""
    rows = np.arange(len(moves))
    offered, written = np.full(chunks, len(moves)), np.full(chunks, -1)
    for first, touched, at, keep in (
        (moves.src, rows[moves.kind == Kind.SEND], offered, np.minimum),
        (moves.dst, rows[moves.dst != NOWHERE], written, np.maximum),
    ):
        for row in touched.tolist():
            span = slice(int(first[row]), int(first[row]) + int(moves.span[row]))
            at[span] = keep(at[span], row)
    return bool((written >= offered).any())


class _Proof:
    """One execution of all programs on bit masks instead of data."""

    def __init__(self, promise: Promise, programs: dict[int, list[Move]], *, has_clocks: bool) -> None:
        ranks = len(programs)
        chunks = range(len(promise.layout.slot))
        self.promise = promise
        self.programs = programs
        self.versions = Versions()
        self.chunks = [[self._first(rank, chunk) for chunk in chunks] for rank in range(ranks)]
        # For every chunk of every rank: each reader that was offered the chunk, and the number of the reader's move.
        self.readers: list[list[list[tuple[int, int]]]] = [[[] for _ in chunks] for _ in range(ranks)]
        # clock[r][q]: the number of q's moves that were certainly executed before r's next move; None if clocks are not
        # needed.
        self.clock = [np.zeros(ranks, np.int32) if has_clocks else None for _ in range(ranks)]
        self.next_move = [0] * ranks
        self.in_flight: dict[_Route, deque[_Message]] = {}
        self.takers = self._match()

    def _first(self, rank: int, chunk: int) -> Content:
        home = self.promise.home(rank, chunk)
        return Content(self.promise.start(rank, chunk), home, 0, 0, self.versions.own(rank, home))

    def _match(self) -> dict[_Route, deque[int]]:
        """Return, for each route, the receiver's moves that take the route's messages.

        Reject unequal numbers of sends and receives.
        """
        offered: dict[_Route, int] = {}
        takers: dict[_Route, deque[int]] = {}
        for rank, program in self.programs.items():
            for index, move in enumerate(program):
                prove_form(move, rank, index, (len(self.programs), self.promise.channels))
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
                    f" which takes {taken} messages"
                )
        return takers

    def run(self) -> None:
        """Execute every move as soon as its messages have arrived, then compare the end with the promise."""
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
                raise ScheduleError(f"deadlock: rank {rank} waits for ever in move {index}: {text_of(program[index])}")
        self._check_end()

    def _offer(self, rank: int, index: int, move: Move) -> list[int]:
        """Put one message in flight to every peer; return the peers, whose moves may now be ready."""
        message = self._contents(rank, move, index + 1)
        for at, content in enumerate(message.contents):
            if content.mask == 0:
                raise ScheduleError(f"rank {rank}, move {index}: {text_of(move)}: nothing is in chunk {move.src + at}")
        if move.wire:
            message = self._coded(message)
        for peer in move.peers:
            route = (rank, peer, move.channel)
            self.in_flight.setdefault(route, deque()).append(message)
            reader = (peer, self.takers[route].popleft())
            # An encoded message is a copy in other memory, so its readers do not read the chunk.
            for chunk in () if move.wire else range(move.src, move.src + move.span):
                self.readers[rank][chunk].append(reader)
        if move.dst != NOWHERE:
            try:
                for chunk, content in enumerate(message.contents, move.dst):
                    self._check_write(rank, chunk, self.clock[rank])
                    self.chunks[rank][chunk] = kept_of(self.promise, chunk, content)
            except ScheduleError as error:
                raise ScheduleError(f"rank {rank}, move {index}: {text_of(move)}: {error}") from None
        return list(move.peers)

    def _coded(self, message: _Message) -> _Message:
        coded = [
            each._replace(version=self.versions.coded(each.version, message.wire), codings=each.codings + 1)
            for each in message.contents
        ]
        return message._replace(contents=coded)

    def _take(self, rank: int, index: int, move: Move) -> None:
        before = self.clock[rank]
        try:
            operands = [self._operand(rank, peer, move) for peer in move.peers]
            after = before
            if before is not None and any(peer != rank for peer in move.peers):
                after = before.copy()
                for peer, operand in zip(move.peers, operands, strict=True):
                    if peer != rank and operand.clock is not None:
                        np.maximum(after, operand.clock, out=after)
                        after[peer] = max(after[peer], operand.executed)
            self.clock[rank] = after
            # A COPY starts to write after it has its message. A REDUCE may start to write with its first operand.
            known = after if move.kind is Kind.COPY else before
            for at, chunk in enumerate(range(move.dst, move.dst + move.span)):
                self._check_write(rank, chunk, known)
                self._write(rank, chunk, move, [operand.contents[at] for operand in operands])
        except ScheduleError as error:
            raise ScheduleError(f"rank {rank}, move {index}: {text_of(move)}: {error}") from None

    def _operand(self, rank: int, peer: int, move: Move) -> _Message:
        if peer == rank:
            return self._contents(rank, move, 0)
        message = self.in_flight[peer, rank, move.channel].popleft()
        if len(message.contents) != move.span:
            raise ScheduleError(
                f"rank {peer} sends {len(message.contents)} chunks, but rank {rank} expects {move.span}"
            )
        if message.wire is not move.wire:
            raise ScheduleError(
                f"rank {peer} sends wire type {message.wire.name.lower()}, "
                f"but rank {rank} expects {move.wire.name.lower()}"
            )
        return message

    def _contents(self, rank: int, move: Move, executed: int) -> _Message:
        """Return a message with the contents of the chunks at the move's src."""
        contents = self.chunks[rank][move.src : move.src + move.span]
        return _Message(contents, move.wire, self.clock[rank], executed)

    def _check_write(self, rank: int, chunk: int, clock: NDArray[np.int32] | None) -> None:
        if self.promise.layout.space[chunk] == Space.INPUT:
            raise ScheduleError(f"chunk {chunk} is INPUT, which nobody may write")
        readers = self.readers[rank][chunk]
        for peer, taker in readers:
            if clock is None or clock[peer] <= taker:
                raise ScheduleError(
                    f"overwrites chunk {chunk}, which rank {peer} may still be reading in its move {taker}"
                )
        readers.clear()

    def _write(self, rank: int, chunk: int, move: Move, operands: list[Content]) -> None:
        version = operands[0].version
        if move.kind is Kind.REDUCE:
            version = self.versions.combined(tuple(operand.version for operand in operands), last=move.last)
        held = self.chunks[rank][chunk]
        self.chunks[rank][chunk] = result_of(self.promise, move, chunk, held, operands, version)

    def _check_end(self) -> None:
        first: dict[tuple[int, int], tuple[int, Version]] = {}
        for rank, chunks in enumerate(self.chunks):
            for chunk, content in enumerate(chunks):
                mask = self.promise.want(rank, chunk)
                if not mask:
                    continue
                wants(rank, chunk, content, mask)
                other, version = first.setdefault((content.home, mask), (rank, content.version))
                if version != content.version:
                    raise ScheduleError(
                        f"ranks {other} and {rank} end with other bits in chunk {chunk}: they added in different"
                        " orders, or coded the chunk on one rank only"
                    )
                if self.promise.is_quiet:
                    self._check_write(rank, chunk, self.clock[rank])
