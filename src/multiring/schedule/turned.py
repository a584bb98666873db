"""The proof by one rank: where every rank of a line does what rank 0 does, turned, so do all of their memories.

All ranks in step, move by move, is an order in which they may run, and any order has the same outcome (prove.py). In
step, and by induction over moves, what rank r holds is what rank 0 holds, turned by r: so what rank 0 takes from
rank q is what it has itself offered to the rank q before it, turned by q. It gets further only if it offered that in an
earlier move; else all ranks wait for each other. Clocks turn as contents do.

The order in which a REDUCE takes its operands need not turn. Its result gets a version of its own at every rank, "made
by rank r in this move"; where all ranks combine the same versions in one and the same order of ranks, one that is
common to all.

Cost: linear in the moves and messages of one rank, times the number of ranks for messages behind which a clock stands.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from multiring.errors import ScheduleError
from multiring.schedule.contents import Content, kept_of, result_of, wants
from multiring.schedule.form import Spans, prove_form, text_of
from multiring.schedule.kinds import Kind, Space, Wire
from multiring.schedule.moves import NOWHERE, Move, Moves
from multiring.schedule.promise import Promise
from multiring.schedule.turn import Turn
from multiring.schedule.versions import Version

Clock = NDArray[np.int32]  # (ranks,): how many of each rank's moves are known to be executed


def prove_turned(promise: Promise, moves: Moves, is_fixed: NDArray[np.bool_], turn: Turn) -> None:
    """Raise ScheduleError unless the promise is kept where rank r's program is `moves`, rank 0's, turned by r.

    Args:
        promise: it has to turn likewise (`Promise.turns`, `Promise.stays`).
        moves: rank 0's.
        is_fixed: shape (moves,), of `Likeness`.
        turn: how the chunks turn; where they do, every span is 1.
    """
    Spans(promise.layout).prove(moves, 0)
    chunks_turn = bool((turn.length > 1).any())
    if chunks_turn and (moves.span != 1).any():
        raise ScheduleError("spans of several chunks do not turn")
    limits = (promise.ranks, promise.channels)
    rows = list(moves.rows())
    for index, move in enumerate(rows):
        prove_form(move, 0, index, limits)
    atoms = _Atoms(promise, moves)
    rows = [atoms.of(move) for move in rows]
    _TurnedProof(promise, _match(moves, rows, turn.ranks), is_fixed, turn, atoms).run(rows)


class _Atoms:
    """Neighbouring chunks that no move tells apart, as one; they all fare alike, each with its own home."""

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
        """Return `move` with atoms in place of chunks."""
        start = move.dst if move.src == NOWHERE else move.src
        span = int(self._index[start + move.span] - self._index[start])
        src, dst = (each if each == NOWHERE else int(self._index[each]) for each in (move.src, move.dst))
        return move._replace(src=src, dst=dst, span=span)


@dataclass(frozen=True, eq=False, slots=True)
class _Messages:
    """Which of rank 0's messages are which: arrays over `Moves.peers`."""

    peer_start: list[int]
    peers: NDArray[np.int32]
    met: NDArray[
        np.int64
    ]  # of an offer: the receiver's move that takes it; of an operand: the sender's that offered it


def _match(moves: Moves, rows: Sequence[Move], ranks: int) -> _Messages:
    """Return what meets what: the n-th offer to the rank d further meets the n-th receive from the rank d before.

    Raises:
        ScheduleError: they are not as many, not alike, or a receive waits for an offer behind itself.
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
            raise ScheduleError(f"rank 0, move {at}: {text_of(rows[at])}: it takes another {what} than is sent")
    late = row[sent] > row[taken]
    if late.any():
        at = int(row[taken][late].min())
        raise ScheduleError(f"deadlock: rank 0 waits for ever in move {at}: {text_of(rows[at])}")
    return _Messages(moves.peer_start.tolist(), moves.peers, met)


class _Offer(NamedTuple):
    """What rank 0 offers in a move."""

    contents: list[Content]
    clock: Clock | None  # None: nothing known


class _TurnedProof:
    """Rank 0's execution, in step with all others."""

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
        self.left: dict[int, int] = {}  # how often each will still be taken

    def run(self, rows: Sequence[Move]) -> None:
        """Execute every move, then compare with the promise."""
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
        """Return the peers of a move, and which of their moves each meets."""
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
        # The encoding lies elsewhere.
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
        # A COPY's bytes exist only once its message was sent. A REDUCE may begin to write with its first operand.
        known = self.clock if move.kind is Kind.COPY else before
        for at in range(move.span):
            self._check_write(move.dst + at, known)
            self._write(index, move, at, [contents[at] for contents in offered])

    def _hear(self, peers: NDArray[np.int32], met: NDArray[np.int64]) -> None:
        """Learn what the senders of a move's operands knew when they offered them."""
        others = met >= 0
        if not others.any():
            return
        ranks = self.turn.ranks
        # Who was offered the one that stands here may still hold it.
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
        """Return, as it is at the rank `by` further, what is `content` here."""
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
        # Ranks that want the same block want what turns into each other: one version, turned.
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
                    f"ranks end with other bits in chunk {chunk} than in chunk {other}, turned: added in another order,"
                    " or coded on one of them only"
                )
            if self.promise.is_quiet:
                self._check_write(at, self.clock)

    def _place_of(self, home: int) -> tuple[int, int]:
        """Return which homes turn into this one, as a number, and how far it is turned among them."""
        if not self.chunks_turn:
            return home, 0
        if self.promise.pairs:
            sender, receiver = divmod(home, self.turn.ranks)
            return (sender - receiver) % self.turn.ranks, receiver
        return 0, home


class _TurnedVersions:
    """Numbers histories as `Versions` does, of which each comes once at every rank, turned.

    A version is a history's number and the rank that it is turned to, as one integer: number * ranks + rank.
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
        """Return what move `index` makes of its chunk `at`, whatever of."""
        return self._number("made", index, at)

    def common(self, version: Version, order: tuple[int, ...], *, last: bool) -> Version:
        """Return what combining rank 0's `version`, turned to each rank of `order` in turn, makes on all ranks."""
        number = self._number("common", version, order, last)
        self._common.add(number // self._ranks)
        return number

    def is_common(self, version: Version) -> bool:
        """Whether all ranks have the same bits by this version."""
        return version // self._ranks in self._common

    def turned(self, version: Version, by: int) -> Version:
        """Return the version `by` ranks further."""
        number, at = divmod(version, self._ranks)
        return version if number in self._common else number * self._ranks + (at + by) % self._ranks

    def coded(self, version: Version, wire: Wire) -> Version:
        """Return what is left of `version` after the wire; a second time it takes nothing more."""
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
