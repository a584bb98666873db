"""The proof, event by event: do these programs, one per rank, keep a promise under the executor's real order?

What the executor guarantees, and all that is used here: a rank executes its moves in its own order; a SEND never
blocks and copies nothing; a COPY or REDUCE waits for its messages and reads them out of the senders' memory at any
time up to its own end; a REDUCE may write before all its operands are in; the n-th message from one rank to another on
a channel meets the n-th receive. There is no global step and no buffer.

Sends never block and receives name their source, so any order of execution that respects program order and
messages gives one and the same outcome; this module executes one. What could still differ is *when* offered memory
is read: so a write to memory that was offered needs a chain of messages which proves that its reader is done.
Vector clocks carry those chains (Mattern, "Virtual time and global states of distributed systems", 1989).

Masks say whose contributions a chunk holds; a *version* (versions.py) says how its
bits came about. The proof ends with all ranks that want a chunk holding one version of it: replicas never diverge.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from multiring.errors import ScheduleError
from multiring.schedule.form import prove_form, prove_spans, text_of
from multiring.schedule.kinds import Kind, Space, Wire
from multiring.schedule.moves import NOWHERE, Move, Moves
from multiring.schedule.promise import Promise
from multiring.schedule.versions import Version, Versions

_Route = tuple[int, int, int]  # sender, receiver, channel


class _Content(NamedTuple):
    """What a chunk holds."""

    mask: int
    home: int
    roundings: int  # REDUCEs that a contribution in it has passed, at most
    codings: int  # lossy wires that a contribution in it has passed, at most
    version: Version


class _Message(NamedTuple):
    contents: list[_Content]
    wire: Wire
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


class _Proof:
    """One execution of all programs on bit masks."""

    def __init__(self, promise: Promise, programs: dict[int, list[Move]]) -> None:
        ranks = len(programs)
        self.promise = promise
        self.programs = programs
        self.versions = Versions()
        self.chunks = [
            [
                _Content(mask, home, 0, 0, self.versions.own(rank, home))
                for mask, home in zip(promise.start[rank], promise.home[rank], strict=True)
            ]
            for rank in range(ranks)
        ]
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
                    f" which takes {taken}"
                )
        return takers

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
                raise ScheduleError(f"deadlock: rank {rank} waits for ever in move {index}: {text_of(program[index])}")
        self._check_end()

    def _offer(self, rank: int, index: int, move: Move) -> list[int]:
        """Put one message on the way to every peer; return the peers, which may now have something to do."""
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
            # The encoding lies elsewhere.
            for chunk in () if move.wire else range(move.src, move.src + move.span):
                self.readers[rank][chunk].append(reader)
        if move.dst != NOWHERE:
            try:
                self._keep_coded(rank, move, message)
            except ScheduleError as error:
                raise ScheduleError(f"rank {rank}, move {index}: {text_of(move)}: {error}") from None
        return list(move.peers)

    def _coded(self, message: _Message) -> _Message:
        coded = [
            each._replace(version=self.versions.coded(each.version, message.wire), codings=each.codings + 1)
            for each in message.contents
        ]
        return message._replace(contents=coded)

    def _keep_coded(self, rank: int, move: Move, message: _Message) -> None:
        for chunk, content in enumerate(message.contents, move.dst):
            if content.mask != self.promise.complete:
                raise ScheduleError(f"chunk {chunk} is rounded for its peers before it is finished")
            self._check_write(rank, chunk, self.clock[rank])
            self._put(rank, chunk, content, is_final=True)

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
                self._write(rank, chunk, move, [operand.contents[at] for operand in operands])
        except ScheduleError as error:
            raise ScheduleError(f"rank {rank}, move {index}: {text_of(move)}: {error}") from None

    def _operand(self, rank: int, peer: int, move: Move) -> _Message:
        if peer == rank:
            return self._contents(rank, move, 0)
        message = self.in_flight[peer, rank, move.channel].popleft()
        if len(message.contents) != move.span:
            raise ScheduleError(f"rank {peer} sends {len(message.contents)} chunks, it takes {move.span}")
        if message.wire is not move.wire:
            raise ScheduleError(
                f"rank {peer} sends wire type {message.wire.name.lower()}, it takes {move.wire.name.lower()}"
            )
        return message

    def _contents(self, rank: int, move: Move, executed: int) -> _Message:
        """Return what is in the chunks at the move's src."""
        contents = self.chunks[rank][move.src : move.src + move.span]
        return _Message(contents, move.wire, self.clock[rank], executed)

    def _check_write(self, rank: int, chunk: int, clock: NDArray[np.int32]) -> None:
        if self.promise.layout.space[chunk] == Space.INPUT:
            raise ScheduleError(f"chunk {chunk} is INPUT, which nobody may write")
        for peer, taker in self.readers[rank][chunk]:
            if clock[peer] <= taker:
                raise ScheduleError(
                    f"overwrites chunk {chunk}, which rank {peer} may still be reading in its move {taker}"
                )
        self.readers[rank][chunk].clear()

    def _write(self, rank: int, chunk: int, move: Move, operands: list[_Content]) -> None:
        result = 0
        for operand in operands:
            if operand.home != self.promise.home[rank][chunk]:
                raise ScheduleError(f"a piece of block {operand.home} does not belong in chunk {chunk}")
            if operand.mask == 0:
                raise ScheduleError("nothing is in its own operand")
            if operand.mask & result:
                raise ScheduleError(f"ranks {_ranks(operand.mask & result)} would be summed twice in chunk {chunk}")
            result |= operand.mask
        roundings = max(operand.roundings for operand in operands)
        version = operands[0].version
        if move.kind is Kind.REDUCE:
            version = self.versions.combined(tuple(operand.version for operand in operands), last=move.last)
            roundings += 1
            if roundings > self.promise.roundings:
                raise ScheduleError(
                    f"chunk {chunk} is rounded {roundings} times, this accumulation allows {self.promise.roundings}"
                )
            if move.last != (result == self.promise.complete):
                raise ScheduleError(f"last is {move.last}, but ranks {_ranks(result)} are in chunk {chunk}")
        if self.chunks[rank][chunk].mask == result:
            raise ScheduleError(f"chunk {chunk} holds that already")
        codings = max(operand.codings for operand in operands)
        content = _Content(result, operands[0].home, roundings, codings, version)
        is_final = result == self.promise.complete and move.kind is not Kind.REDUCE
        self._put(rank, chunk, content, is_final=is_final)

    def _put(self, rank: int, chunk: int, content: _Content, *, is_final: bool) -> None:
        """Store `content`; a contribution may be coded once an axis on its way in, and as often on its way back."""
        most = self.promise.codings * (2 if is_final else 1)
        if content.codings > most:
            raise ScheduleError(
                f"chunk {chunk} is coded {content.codings} times, want at most {most}: code axes that are direct"
            )
        self.chunks[rank][chunk] = content

    def _check_end(self) -> None:
        first: dict[tuple[int, int], tuple[int, Version]] = {}
        for rank, want in enumerate(self.promise.want):
            for chunk, mask in enumerate(want):
                if not mask:
                    continue
                content = self.chunks[rank][chunk]
                if content.mask != mask:
                    raise ScheduleError(
                        f"rank {rank} ends with {_ranks(content.mask)} in chunk {chunk}, want {_ranks(mask)}"
                    )
                other, version = first.setdefault((content.home, mask), (rank, content.version))
                if version != content.version:
                    raise ScheduleError(
                        f"ranks {other} and {rank} end with other bits in chunk {chunk}: added in another order, or"
                        " coded on one of them only"
                    )
                if self.promise.is_quiet:
                    self._check_write(rank, chunk, self.clock[rank])


def _ranks(mask: int) -> list[int]:
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
