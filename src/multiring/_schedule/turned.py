"""The proof by one rank: if each rank executes rank 0's moves, rotated, the ranks' memories are rotations too.

All ranks may run in lockstep, move by move, and every other order has the same outcome (prove.py). In lockstep, by
induction over moves, rank r's contents are rank 0's contents rotated by r. So a message that rank 0 takes from rank q
is the message that rank 0 itself offered to the rank q before it, rotated by q. Rank 0 proceeds only if it offered that
message in an earlier move; otherwise all ranks wait for each other. Clocks rotate in the same way as contents.

The order in which a REDUCE takes its operands need not rotate. If it rotates, the result gets a version of its own at
every rank, "made by rank r in this move". If all ranks combine the same versions in the same order of ranks, the result
gets one version that is common to all.

Cost: linear in the moves and messages of one rank. The cost of a message with a clock grows with the number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from multiring._schedule.contents import Content, kept_of, result_of, wants
from multiring._schedule.form import ChunkSpans, prove_form, text_of
from multiring._schedule.kinds import Kind, Space, Wire
from multiring._schedule.moves import NOWHERE, Move, Moves
from multiring._schedule.promise import Promise
from multiring._schedule.turn import Turn
from multiring._schedule.versions import Version
from multiring.errors import ScheduleError

Clock = NDArray[np.int32]  # (ranks,): the number of each rank's moves that were certainly executed


def prove_turned(promise: Promise, moves: Moves, is_fixed: NDArray[np.bool_], turn: Turn) -> None:
    """Raise ScheduleError unless programs that are rotations of `moves` keep `promise`.

    Args:
        promise: a promise that rotates in the same way (`Promise.turns`, `Promise.stays`).
        moves: rank 0's program; rank r's program is `moves` rotated by r.
        is_fixed: shape (moves,), from `Likeness`.
        turn: how the chunks rotate. If they rotate, every span is 1.
    """
    ChunkSpans(promise.layout).prove(moves, 0)
    chunks_turn = bool((turn.length > 1).any())
    if chunks_turn and (moves.span != 1).any():
        raise ScheduleError("spans of several chunks cannot be rotated: want span 1")
    limits = (promise.ranks, promise.channels)
    rows = list(moves.rows())
    for index, move in enumerate(rows):
        prove_form(move, 0, index, limits)
    atoms = _Atoms(promise, moves)
    rows = [atoms.of(move) for move in rows]
    _TurnedProof(promise, _match(moves, rows, turn.ranks), is_fixed, turn, atoms).run(rows)


class _Atoms:
    """Groups of neighbouring chunks that every move treats alike; each chunk keeps its own home."""

    def __init__(self, promise: Promise, moves: Moves) -> None:
        chunks = range(len(promise.layout.space))
        edge = np.zeros(len(chunks) + 1, np.bool_)
        edge[[0, len(chunks)]] = True
        for first in (moves.src, moves.dst):
            has = first != NOWHERE
            edge[first[has]] = True
            edge[first[has] + moves.span[has]] = True
        before: tuple[int, ...] = ()
        for chunk in chunks:
            said = promise.home(0, chunk) - chunk, promise.start(0, chunk), promise.want(0, chunk)
            fixed = (int(promise.layout.space[chunk]), *said)
            if fixed != before:
                edge[chunk] = True
            before = fixed
        self.first = np.flatnonzero(edge)[:-1].tolist()
        self._index = np.cumsum(edge) - 1

    def of(self, move: Move) -> Move:
        """Return `move` with atom numbers instead of chunk numbers."""
        start = move.dst if move.src == NOWHERE else move.src
        span = int(self._index[start + move.span] - self._index[start])
        src, dst = (each if each == NOWHERE else int(self._index[each]) for each in (move.src, move.dst))
        return move._replace(src=src, dst=dst, span=span)


@dataclass(frozen=True, eq=False, slots=True)
class _Messages:
    """The receiver of each of rank 0's messages: arrays over `Moves.peers`."""

    peer_start: list[int]
    peers: NDArray[np.int32]
    met: NDArray[
        np.int64
    ]  # for an offer: the number of the receiver's move; for an operand: the number of the sender's move


def _match(moves: Moves, rows: Sequence[Move], ranks: int) -> _Messages:
    """Match messages: the n-th offer to the rank d further meets the n-th receive from the rank d before.

    Raises:
        ScheduleError: numbers of sends and receives differ, a message and its receive differ in span or wire type, or
            a receive comes before the offer that it waits for.
    """
    row = np.repeat(np.arange(len(moves)), np.diff(moves.peer_start))
    is_offer = moves.kind[row] == Kind.SEND
    sent, taken = np.flatnonzero(is_offer), np.flatnonzero(~is_offer & (moves.peers != 0))
    channels = moves.channel[row].astype(np.int64)
    routes = np.where(is_offer, moves.peers, -moves.peers) % ranks + channels * ranks
    sent, taken = (each[np.argsort(routes[each], kind="stable")] for each in (sent, taken))
    if not np.array_equal(routes[sent], routes[taken]):
        counts = [np.bincount(routes[each], minlength=int(routes.max()) + 1) for each in (sent, taken)]
        route = int((counts[0] != counts[1]).argmax())
        raise ScheduleError(
            f"rank 0 sends {counts[0][route]} messages to rank {route % ranks} on channel {route // ranks},"
            f" which takes {counts[1][route]}"
        )
    met = np.full(len(row), -1, np.int64)
    met[sent], met[taken] = row[taken], row[sent]
    for what, of_moves in (("span", moves.span), ("wire type", moves.wire)):
        unlike = of_moves[row[sent]] != of_moves[row[taken]]
        if unlike.any():
            at = int(row[taken][unlike.argmax()])
            raise ScheduleError(f"rank 0, move {at}: {text_of(rows[at])}: its {what} differs from that of the message")
    late = row[sent] > row[taken]
    if late.any():
        at = int(row[taken][late].min())
        raise ScheduleError(f"deadlock: rank 0 waits for ever in move {at}: {text_of(rows[at])}")
    return _Messages(moves.peer_start.tolist(), moves.peers, met)


class _Offer(NamedTuple):
    """The chunks that rank 0 offers in a move."""

    contents: list[Content]
    clock: Clock | None  # None: rank 0 has taken no message before the offer


class _TurnedProof:
    """Rank 0's execution, in lockstep with all other ranks."""

    def __init__(
        self, promise: Promise, messages: _Messages, is_fixed: NDArray[np.bool_], turn: Turn, atoms: _Atoms
    ) -> None:
        self.promise = promise
        self.messages = messages
        self.is_fixed = is_fixed.tolist()
        self.turn = turn
        self.atoms = atoms
        self.everyone = (1 << turn.ranks) - 1
        self.chunks_turn = bool((turn.length > 1).any())
        self.versions = _TurnedVersions(turn.ranks)
        self.held = [
            Content(promise.start(0, chunk), home, 0, 0, self.versions.own(home))
            for chunk, home in ((chunk, promise.home(0, chunk)) for chunk in atoms.first)
        ]
        self.readers: list[list[tuple[NDArray[np.int32], NDArray[np.int64]]]] = [[] for _ in atoms.first]
        self.clock: Clock | None = None
        self.offers: dict[int, _Offer] = {}
        self.left: dict[int, int] = {}  # the number of peers that have not taken each offer

    def run(self, rows: Sequence[Move]) -> None:
        """Execute every move, then compare the end with the promise."""
        for index, move in enumerate(rows):
            try:
                if move.kind is Kind.SEND:
                    self._offer(index, move)
                else:
                    self._take(index, move)
            except ScheduleError as error:
                raise ScheduleError(f"rank 0, move {index}: {text_of(move)}: {error}") from None
        self._check_end()

    def _met(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the peers of a move, and for each peer the number of its matching move."""
        those = slice(self.messages.peer_start[index], self.messages.peer_start[index + 1])
        return self.messages.peers[those], self.messages.met[those]

    def _offer(self, index: int, move: Move) -> None:
        contents = self.held[move.src : move.src + move.span]
        for at, content in enumerate(contents, move.src):
            if content.mask == 0:
                raise ScheduleError(f"nothing is in chunk {self.atoms.first[at]}")
        if move.wire:
            contents = [
                each._replace(version=self.versions.coded(each.version, move.wire), codings=each.codings + 1)
                for each in contents
            ]
        self.offers[index] = _Offer(contents, self.clock)
        self.left[index] = len(move.peers)
        # An encoded message is a copy in other memory, so its readers do not read the chunk.
        for at in () if move.wire else range(move.src, move.src + move.span):
            self.readers[at].append(self._met(index))
        if move.dst != NOWHERE:
            for at, content in enumerate(contents, move.dst):
                self._check_write(at, self.clock)
                self.held[at] = kept_of(self.promise, self.atoms.first[at], content)

    def _take(self, index: int, move: Move) -> None:
        peers, met = self._met(index)
        before = self.clock
        offered = [
            self.held[move.src : move.src + move.span] if sender < 0 else self.offers[sender].contents
            for sender in met.tolist()
        ]
        self._hear(peers, met)
        # A COPY starts to write after it has its message. A REDUCE may start to write with its first operand.
        known = self.clock if move.kind is Kind.COPY else before
        for at in range(move.span):
            self._check_write(move.dst + at, known)
            self._write(index, move, at, [contents[at] for contents in offered])

    def _hear(self, peers: NDArray[np.int32], met: NDArray[np.int64]) -> None:
        """Merge the clocks that the senders of a move's operands had at the time of their offers."""
        others = met >= 0
        if not others.any():
            return
        ranks = self.turn.ranks
        # Make a copy: offers may still refer to the present clock.
        clock = np.zeros(ranks, np.int32) if self.clock is None else self.clock.copy()
        for peer, sender in zip(peers[others].tolist(), met[others].tolist(), strict=True):
            told = self.offers[sender].clock
            if told is not None:
                np.maximum(clock[peer:], told[: ranks - peer], out=clock[peer:])
                np.maximum(clock[:peer], told[ranks - peer :], out=clock[:peer])
            self.left[sender] -= 1
            if not self.left[sender]:
                del self.left[sender]
                del self.offers[sender]
        np.maximum.at(clock, peers[others], (met[others] + 1).astype(np.int32))
        self.clock = clock

    def _check_write(self, at: int, clock: Clock | None) -> None:
        chunk = self.atoms.first[at]
        if self.promise.layout.space[chunk] == Space.INPUT:
            raise ScheduleError(f"chunk {chunk} is INPUT, which nobody may write")
        for peers, takers in self.readers[at]:
            late = (0 if clock is None else clock[peers]) <= takers
            if late.any():
                reader = int(late.argmax())
                raise ScheduleError(
                    f"overwrites chunk {chunk}, which rank {peers[reader]} may still be reading in its move"
                    f" {takers[reader]}"
                )
        self.readers[at].clear()

    def _write(self, index: int, move: Move, at: int, unturned: list[Content]) -> None:
        target = move.dst + at
        held = self.held[target]
        operands = [self._turned(content, peer) for content, peer in zip(unturned, move.peers, strict=True)]
        version = operands[0].version
        if move.kind is Kind.REDUCE:
            alike = {content.version for content in unturned}
            if len(alike) == 1 and self.is_fixed[index]:
                version = self.versions.common(alike.pop(), move.peers, last=move.last)
            else:
                version = self.versions.made(index, at)
        self.held[target] = result_of(self.promise, move, self.atoms.first[target], held, operands, version)

    def _turned(self, content: Content, by: int) -> Content:
        """Return the content at the rank `by` further that corresponds to `content` at this rank."""
        if by == 0:
            return content
        return content._replace(
            mask=self._turned_mask(content.mask, by),
            home=self._turned_home(content.home, by),
            version=self.versions.turned(content.version, by),
        )

    def _turned_mask(self, mask: int, by: int) -> int:
        if mask == self.everyone:
            return mask
        return (mask << by | mask >> self.turn.ranks - by) & self.everyone

    def _turned_home(self, home: int, by: int) -> int:
        if not self.chunks_turn:
            return home
        ranks = self.turn.ranks
        if self.promise.pairs:
            return (home // ranks + by) % ranks * ranks + (home + by) % ranks
        return (home + by) % ranks

    def _check_end(self) -> None:
        # Ranks that want the same block must hold one version of it, so compare rotations of the chunks that match.
        seen: dict[int, tuple[int, Version]] = {}
        for at, (chunk, content) in enumerate(zip(self.atoms.first, self.held, strict=True)):
            mask = self.promise.want(0, chunk)
            if not mask:
                continue
            wants(0, chunk, content, mask)
            turns_with, by = self._place_of(content.home)
            other, version = seen.setdefault(turns_with, (chunk, self.versions.turned(content.version, -by)))
            is_same = version == self.versions.turned(content.version, -by)
            if not is_same or not (self.chunks_turn or self.versions.is_common(version)):
                raise ScheduleError(
                    f"ranks end with other bits in chunk {chunk} than in chunk {other}, rotated: they added in"
                    " different orders, or coded the chunk on one rank only"
                )
            if self.promise.is_quiet:
                self._check_write(at, self.clock)

    def _place_of(self, home: int) -> tuple[int, int]:
        """Return the number of the cycle in which `home` rotates, and its position in the cycle."""
        if not self.chunks_turn:
            return home, 0
        if self.promise.pairs:
            sender, receiver = divmod(home, self.turn.ranks)
            return (sender - receiver) % self.turn.ranks, receiver
        return 0, home


class _TurnedVersions:
    """Number histories as `Versions` does; each history exists once per rank, rotated.

    A version combines a history's number and the rank it is rotated to in one integer: number * ranks + rank.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._numbers: dict[tuple[object, ...], int] = {}
        self._common: set[int] = set()  # numbers of histories that are the same at every rank
        self._coded: dict[int, Wire] = {}

    def own(self, home: int) -> Version:
        """Return the version of rank 0's own contribution to block `home`."""
        return self._number("own", home)

    def made(self, index: int, at: int) -> Version:
        """Return the version that move `index` writes to its chunk `at`, for any operands."""
        return self._number("made", index, at)

    def common(self, version: Version, order: tuple[int, ...], *, last: bool) -> Version:
        """Return the common version of a REDUCE that combines `version`, rotated to each rank of `order` in turn."""
        number = self._number("common", version, order, last)
        self._common.add(number // self._ranks)
        return number

    def is_common(self, version: Version) -> bool:
        """Return whether this version means the same bits on all ranks."""
        return version // self._ranks in self._common

    def turned(self, version: Version, by: int) -> Version:
        """Return the version rotated by `by` ranks."""
        number, at = divmod(version, self._ranks)
        return version if number in self._common else number * self._ranks + (at + by) % self._ranks

    def coded(self, version: Version, wire: Wire) -> Version:
        """Return the version after a lossy wire.

        Encoding with the same wire again changes nothing.
        """
        number, at = divmod(version, self._ranks)
        if self._coded.get(number) is wire:
            return version
        coded = self._number("coded", number, wire) // self._ranks
        self._coded[coded] = wire
        if number in self._common:
            self._common.add(coded)
        return coded * self._ranks + at

    def _number(self, *history: object) -> Version:
        return self._numbers.setdefault(history, len(self._numbers)) * self._ranks
