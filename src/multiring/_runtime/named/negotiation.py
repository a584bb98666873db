"""Negotiation: the ranks of a set agree on each operation.

A negotiation lasts from the first difference in order until all ranks have joined. First all ranks post equally many
operations of the optimistic order, so that every rank sees the end or the mismatch of each operation (order_switch.py).
Then the agreement starts. This module sends the agreement's messages over the set's control channel, and carries out
its decisions.
"""

import threading
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Protocol

from multiring._agreement import (
    AgreementOutcome,
    Deadlock,
    Decision,
    Joined,
    Lost,
    Member,
    Missing,
    Note,
    Ready,
    Refused,
    Silent,
)
from multiring._runtime.named.channel import ControlChannel, Message, MessageKind
from multiring._runtime.named.decided_order import DecidedOrder
from multiring._runtime.named.disagreement import deadlock, disagreement
from multiring._runtime.named.handle import NamedHandle
from multiring._runtime.named.order_switch import RADIX, Switch
from multiring._runtime.named.signature_text import in_words, signature_of
from multiring.errors import ArgumentError

_PATIENCE_S = 0.25  # ample time for a message of the agreement and its handling
_RETRY_S = 0.005


class NegotiationOwner(Protocol):
    """The set of named operations. It holds its lock when it calls a negotiation."""

    changed: threading.Condition  # the condition of the owner's lock

    def fill(self, count: int) -> None:
        """Post filler operations until `count` operations are posted in optimistic order."""

    def has_unknown(self) -> bool:
        """Return whether an operation of the optimistic order has no known outcome yet."""

    def go_back(self, joined: Joined) -> None:
        """End the negotiation: all ranks have joined, and no operation is in flight."""

    def fail_for_lost(self, rank: int) -> None:
        """Fail the open operations, because `rank` of the set is lost.

        Nothing more will be decided.
        """


class Negotiation:
    """One rank's part in the negotiation.

    The caller of each method must hold the owner's lock.
    """

    def __init__(
        self, owner: NegotiationOwner, decided: DecidedOrder, channel: ControlChannel, generation: int
    ) -> None:
        self._owner = owner
        self._decided = decided
        self._channel = channel
        self.generation = generation
        self._switch = Switch(channel.own, len(channel.ranks))
        self._member: Member | None = None  # None until the order switch has ended
        self._queue: list[NamedHandle] = []  # the handles to announce
        self._undecided: dict[str, NamedHandle] = {}
        self._unexpected: list[Message] = []
        self._turn = 0  # counts the uses of the agreement's patience
        self.missing: Missing | None = None  # the latest answer to an inquiry about missing ranks
        self.silent: int | None = None  # a rank that does not answer
        self.moved_s = time.monotonic()  # the time of the latest decision

    def begin(self, posted: int) -> None:
        """Start the order switch; this rank has posted `posted` optimistic operations."""
        self._send_counts(self._switch.begin(posted))

    def take(self, message: Message) -> None:
        """Handle a message of another rank."""
        if message.kind is MessageKind.COUNT:
            self._send_counts(self._switch.take(message.sender, int.from_bytes(message.payload, "little")))
        elif self._member is None:
            self._unexpected.append(message)
        else:
            self._carry_out(self._member.receive(message.sender, message.payload))

    def put(self, handles: Iterable[NamedHandle]) -> None:
        """Announce handles to the agreement; during the order switch, delay this until its end."""
        if self._member is None:
            self._queue += handles
            return
        operations: list[tuple[str, str]] = []
        joining: NamedHandle | None = None
        for handle in handles:
            if handle.start is None:
                joining = handle
            elif _is_unicode(handle):
                operations.append((handle.name, in_words(handle.signature)))
                self._undecided[handle.name] = handle
        if operations:
            self._carry_out(self._member.announce_all(operations))
        if joining is not None:  # announce the join after the operations that were submitted before it
            self._announce_join(joining.waited_us)

    def take_back(self) -> list[NamedHandle]:
        """Remove and return the handles on which the ranks have not agreed."""
        waiting = [*self._queue, *self._undecided.values()]
        self._queue, self._undecided = [], {}
        return waiting

    def wait_for(self, handle: NamedHandle | None) -> None:
        """Set the handle that this rank's program waits for; None if it does not wait."""
        if self._member is not None and (handle is None or self._undecided.get(handle.name) is handle):
            self._member.wait_for(None if handle is None else handle.name)

    def inquire(self) -> None:
        """Ask which ranks are missing."""
        if self._member is not None:
            self._carry_out(self._member.inquire())

    def lose(self, rank: int) -> bool:
        """Report the loss of a rank to the agreement.

        Return False if the agreement has not started yet.
        """
        if self._member is not None:
            self._carry_out(self._member.lost(rank))
        return self._member is not None

    # ---- the end of the optimistic order ----

    def _send_counts(self, counts: Iterable[tuple[int, int]]) -> None:
        for to, count in counts:
            self._channel.send(to, self.generation, MessageKind.COUNT, count.to_bytes(8, "little"))
        if self._switch.agreed is not None and self._member is None:
            self._open(self._switch.agreed)

    def _open(self, posted: int) -> None:
        self._owner.fill(posted)
        self._decided.filled = posted
        self._member = Member(self._channel.own, len(self._channel.ranks), RADIX)
        # The callback refers to the dict, not to this object. A reference cycle would keep the job's file descriptors
        # open until garbage collection.
        self._member.waits = partial(_watched, self._undecided)
        queue, self._queue = self._queue, []
        self.put(queue)
        unexpected, self._unexpected = self._unexpected, []
        for message in unexpected:
            self.take(message)

    def _announce_join(self, waited_us: int) -> None:
        """Announce that this rank has joined, once all earlier outcomes are known."""
        with self._owner.changed:
            if self._owner.has_unknown():
                self._channel.control.after(_RETRY_S, lambda: self._announce_join(waited_us))
            elif self._member is not None:
                self._carry_out(self._member.join(waited_us))

    # ---- decisions of the agreement ----

    def _carry_out(self, outcome: AgreementOutcome) -> None:
        for to, message in outcome.messages:
            self._channel.send(to, self.generation, MessageKind.AGREEMENT, message)
        for each in (*outcome.notes, *outcome.decisions):
            self._act_on(each)
        self._mind_patience()
        self._owner.changed.notify_all()

    def _act_on(self, decision: Decision | Note) -> None:
        ranks = self._channel.ranks
        match decision:
            case Ready(name, signature):
                self._decided.run(name, signature_of(signature), self._undecided.pop(name, None))
            case Refused(name, said):
                told = {rank: signature_of(text) for rank, text in said.items()}
                own = self._undecided.get(name)
                if own is not None:  # this rank may have come too late to be in `said`
                    told[self._channel.own] = own.signature
                self._fail(name, disagreement(name, told, ranks))
            case Deadlock(_, names):
                for name in names:
                    self._fail(name, deadlock(f"operation {name!r}", decision, ranks))
            case Joined():
                self._owner.go_back(decision)
            case Lost(rank):
                self._owner.fail_for_lost(rank)
            case Missing():
                self.missing, self.silent = decision, None
                return
            case Silent(rank):
                self.silent = rank
                return
        self.moved_s = time.monotonic()

    def _fail(self, name: str, error: Exception) -> None:
        handle = self._undecided.pop(name, None)
        if handle is not None:
            handle.fail(error)

    def _mind_patience(self) -> None:
        """Conclude an open inquiry at the end of the time that the agreement allows."""
        member = self._member
        self._turn += 1
        turn = self._turn
        if member is None or member.patience == 0:
            return

        def conclude() -> None:
            with self._owner.changed:
                if self._turn == turn:
                    self._carry_out(member.conclude())

        self._channel.control.after(member.patience * _PATIENCE_S, conclude)


def _is_unicode(handle: NamedHandle) -> bool:
    try:
        handle.name.encode()
    except UnicodeEncodeError as error:
        handle.fail(ArgumentError(f"{handle.title}: {error}; want a name in valid Unicode"))
        return False
    return True


def _watched(undecided: Mapping[str, NamedHandle]) -> list[str]:
    """Return the names of undecided operations for which a thread waits."""
    return [name for name, handle in undecided.items() if handle.watch is not None]
