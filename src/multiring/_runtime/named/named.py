"""Named operations: collectives that ranks start in any order, matched by name.

As long as all ranks start the operations in the same order (the optimistic order), each operation is posted at once, as
the next operation of a dedicated group. The ranks of the group agree on the name and signature of each operation, and
nothing is negotiated. If the order differs, every rank gets a mismatch with its inputs intact, and the ranks start a
negotiation (negotiation.py). From then on a tree of the ranks agrees on the order, and the decided operations are
posted on a second group. When all ranks have joined, they return to the optimistic order.
See docs/decisions/0018-optimistic-order.md.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from multiring._agreement import Joined
from multiring._native import ControlMessage, ControlMessageKind
from multiring._runtime.events import STEPS
from multiring._runtime.failures.decision_wait import DecisionWait
from multiring._runtime.group.group import Group
from multiring._runtime.group.handles import Handle
from multiring._runtime.named.channel import ControlChannel, Message, MessageKind
from multiring._runtime.named.decided_order import DecidedOrder
from multiring._runtime.named.disagreement import disagreement
from multiring._runtime.named.handle import HandlesByName, NamedHandle, Start
from multiring._runtime.named.losses import Losses, refusal
from multiring._runtime.named.negotiation import Negotiation
from multiring._runtime.named.order_switch import tree_neighbours
from multiring._runtime.named.signature_text import label_of, signatures_of_one
from multiring.errors import (
    ArgumentError,
    MismatchError,
    MultiringError,
    Signature,
    StallError,
    StateError,
)

__all__ = ["NamedOperations", "Start"]

_log = logging.getLogger("multiring")
_OWN = "\0"  # the prefix of names that are not a user's operations
_FILLER = label_of(f"{_OWN}nothing", ())
_NEWS_S = 0.2  # within this time all ranks detect a loss
_LAST_WORDS_S = 1.0  # within this time the last messages of a rank that left arrive, even through other ranks


class NamedOperations:
    """The named operations of one set of ranks.

    All methods may be called from any thread.

    Args:
        group: the group of the ranks. Every rank of it must create its own NamedOperations; if there are several on the
            same group, all ranks must create them in the same order.
        neutral_contribution: returns, for a signature, the start function of a rank that has joined.
    """

    def __init__(self, group: Group, neutral_contribution: Callable[[Signature], Start] | None = None) -> None:
        self._group = group.twin()
        self._calls = self._group.calls
        self._decided = DecidedOrder(self._group.twin(), neutral_contribution)
        self.id = self._calls.id
        self._services = self._calls.services
        self.generation = self._services.generation
        self.ranks = group.calls.ranks
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)
        self._in_flight = HandlesByName()
        self._joining: NamedHandle | None = None
        self._joined_s = 0.0  # the time of the join, by time.monotonic()
        self._negotiation: Negotiation | None = None
        self._generation = 0  # the number of negotiations so far
        self._unexpected: list[Message] = []  # messages of later negotiations
        self._losses = Losses()
        self._broken: MultiringError | None = None
        self._channel: ControlChannel | None = None
        control = self._services.control
        if control is not None and group.size > 1:
            self._channel = ControlChannel(control, self.id, self.ranks, group.rank)
            self._near = tree_neighbours(group.rank, group.size)
            self._services.context.link_with([self.ranks[rank] for rank in self._near])
            control.add(self.id, self)
            self.generation.when_over(self._go_with_generation)

    def submit(
        self, name: str, signature: Signature, start: Start, at_once: Start | None = None, *, is_report: bool = False
    ) -> NamedHandle:
        """Start an operation and return its handle.

        A report of a failure that has this name and is in flight is waited for first: the other ranks hear of both.

        Args:
            name: the name by which the ranks match the operation.
            signature: the further properties on which the ranks must agree, in the order in which they are checked.
            start: posts the collective. It is called at once, or on another thread once the ranks have agreed on the
                operation's place.
            at_once: replaces `start` if the collective is posted at once. This thread must then wait for the handle
                next, so `at_once` may post an operation that only a waiting thread drives.
            is_report: the operation tells the other ranks that this one has failed, and nobody need wait for it.

        Raises:
            ArgumentError: an operation of this name is in flight on this rank.
            StateError: this rank has joined, or the set was closed.
            PeerLostError: a rank of the set died or left.
            StallError: the ranks have given up after a stall.
        """
        self.generation.refuse_fork("operation", name)
        with self._lock:
            if self._in_flight.is_free(name):
                return self._start(name, signature, start, at_once, is_report=is_report)
            report = self._in_flight.report_of(name)
        if report is None:
            raise ArgumentError(f"operation {name!r} is in flight already; wait for it, or give this one another name")
        with suppress(MultiringError):  # its error is that of the call that failed
            report.wait()
        return self.submit(name, signature, start, at_once, is_report=is_report)

    def _start(
        self, name: str, signature: Signature, start: Start, at_once: Start | None, *, is_report: bool
    ) -> NamedHandle:
        """Start an operation whose name is free. The caller holds the lock."""
        if self._broken is not None or self._joining is not None:
            raise refusal(f"operation {name!r}", self._broken)
        handle = NamedHandle(self, name, signature, start)
        handle.is_report = is_report
        if self._negotiation is None:
            label, before = label_of(name, signature), self._calls.last
            try:
                handle.posted = (at_once or start)(self._group, label)
            except Exception as error:
                if self._calls.last == before:  # otherwise the other ranks know
                    with suppress(MultiringError):
                        self._calls.decline(label, error)
                raise
            handle.number = self._calls.last
        else:
            self._negotiation.put([handle])
        self._in_flight.add(handle)
        return handle

    def has_order_of(self, group: Group) -> bool:
        """Return whether `group`, which a start function gets, has the operations in the order of the submissions."""
        return group is self._group

    def next_in_order(self) -> int:
        """Return the number of the next operation in the order of the submissions, if it is posted in that order."""
        return self._calls.last + 1

    def submit_again(self, earlier: NamedHandle) -> NamedHandle | None:
        """Start an operation exactly as `earlier` was posted.

        This thread must wait for the handle next.

        Returns:
            The new handle. None if the operation cannot be posted in the same way; nothing is posted then.
        """
        posted = earlier.repeatable
        if posted is None or self.generation.is_inherited:
            return None
        with self._lock:
            is_free = self._in_flight.is_free(earlier.name)
            if not is_free or self._broken is not None or self._joining is not None or self._negotiation is not None:
                return None
            again = self._calls.post_again(posted)
            if again is None:
                return None
            handle = NamedHandle(self, earlier.name, earlier.signature, earlier.start)
            handle.posted = again
            handle.number = self._calls.last
            self._in_flight.add(handle)
            return handle

    def join(self) -> Handle:
        """Contribute neutral values to other ranks' operations until all ranks have joined.

        The handle's result is the rank of the set that joined last. After the join, all ranks may submit again.

        Raises:
            UnsupportedError: the set has no neutral contributions.
            StateError: this rank has joined already, or the set was closed.
        """
        self.generation.refuse_fork("join")
        with self._lock:
            if self._broken is not None or self._joining is not None:
                raise refusal("join", self._broken)
            handle = NamedHandle(self, f"{_OWN}join of rank {self._group.rank}", (), None)
            if self._channel is None:
                handle.finish(0)
                return handle
            self._decided.require_neutral_contribution("join: ")
            self._joining, self._joined_s = handle, time.monotonic()
            if self._negotiation is None:  # the name differs on every rank, so all ranks get a mismatch
                handle.posted = self._group.barrier_async(label=label_of(handle.name, ()))
                handle.number = self._calls.last
            else:
                self._negotiation.put([handle])
            return handle

    def close(self) -> None:
        """Accept no more operations.

        Operations on which the ranks have not agreed yet fail.
        """
        control = self._services.control
        if control is not None:
            control.remove(self.id)
        self._break(StateError("these named operations were closed"))
        self._forget()

    # ---- for handles and decision waits ----

    def settle(self, handle: NamedHandle, posted: Handle, error: MismatchError) -> None:
        """Handle a mismatch of `posted`, for which `handle` waited.

        The handle fails, or it is posted again.
        """
        with self._lock:
            if handle.posted is not posted or handle.is_over:
                return
            if handle.number:
                self._differ(handle.number, handle, error.titles, error)
            else:
                handle.fail(error)

    def await_decision(self, handle: NamedHandle, timeout: float | None) -> bool:
        """Wait for `handle` to be posted or to end.

        Return True then, and False after `timeout` seconds.
        """
        negotiation = self._negotiation
        if negotiation is None:
            return True
        patience = self._services.stall_warn_s, self._services.stall_timeout_s
        return DecisionWait(self, negotiation, handle, patience, self._services.rank_status).keep(timeout)

    def give_up(self, handle: NamedHandle, error: StallError) -> None:
        """Make all operations of the set fail with `error`, on all ranks."""
        with self._lock:
            if handle.posted is None and not handle.is_over:
                self._pass_on_stall(str(error))

    def drop(self, handle: NamedHandle) -> None:
        """Release a handle that is over, and the memory that it holds."""
        with self._lock:
            self._in_flight.drop(handle)

    def abort(self, error: StallError) -> None:
        """Make all operations in flight here fail on all ranks.

        The set is unusable afterwards.
        """
        own = self.ranks[self._group.rank]
        with self._lock:
            self._in_flight.abort(own)
            if self._negotiation is not None:
                self._pass_on_stall(str(error))
            self.changed.notify_all()

    # ---- for the control thread ----

    def hear(self, notice: ControlMessage) -> None:
        """Handle another rank's control message, or a mismatch on this rank."""
        with self._lock:
            try:
                self._hear(notice)
            except ValueError as error:  # an invalid message; all ranks must stop waiting
                self._pass_on_stall(f"rank {self.ranks[self._group.rank]} cannot continue: {error}")
                raise
            finally:
                self.changed.notify_all()

    def _hear(self, notice: ControlMessage) -> None:
        if notice.kind is ControlMessageKind.MISMATCH:
            number, titles = notice.tag // STEPS, {self.ranks.index(r): text for r, text in notice.titles.items()}
            self._differ(number, self._in_flight.find(number, self._joining), titles, None)
        elif self._channel is not None and (message := self._channel.receive(notice)) is not None:
            self._take(message)

    def lose(self, rank: int, *, died: bool, why: str) -> None:
        """Handle the loss of a world rank."""
        control = self._services.control
        if rank not in self.ranks or control is None:
            return
        with self._lock:
            self._losses.note(self.ranks.index(rank), rank, died=died, why=why)
            if died:
                self._handle_loss()
            else:
                control.after(_LAST_WORDS_S, self._handle_loss)

    def has_come(self, name: str) -> bool:
        """Return whether this rank has an operation of this name in flight."""
        return self._in_flight.has(name)

    def end(self) -> None:
        """Fail open operations, because this rank leaves the job."""
        self._break(StateError("multiring was shut down"))
        self._forget()

    def _go_with_generation(self) -> None:
        self._break(self.generation.error("named operations"))

    def _forget(self) -> None:
        """Drop the references that keep this object and the job alive."""
        with self._lock:
            self._in_flight, self._joining, self._negotiation = HandlesByName(), None, None

    def _handle_loss(self) -> None:
        with self._lock:
            if self._negotiation is not None:
                rank = self._losses.first
                if not self._negotiation.lose(rank):
                    self.fail_for_lost(rank)

    def _take(self, message: Message) -> None:
        if self._broken is not None:
            return
        if self._negotiation is None and message.generation == self._generation + 1:
            self._begin()  # the sender has seen a mismatch that this rank will see too
        if message.generation > self._generation:
            self._unexpected.append(message)
        elif self._negotiation is not None and message.generation == self._generation:
            if message.kind is MessageKind.STALL:
                self._pass_on_stall(message.payload.decode(errors="replace"))
            else:
                self._negotiation.take(message)

    # ---- from the optimistic order to a negotiation, and back ----

    def _differ(
        self, number: int, handle: NamedHandle | None, titles: Mapping[int, str], error: MismatchError | None
    ) -> None:
        """Handle a mismatch of operation `number`.

        `handle` is None if this rank's program has not submitted the operation.
        """
        signatures = signatures_of_one(titles)
        if signatures is not None:
            if handle is not None and len(set(signatures.values())) > 1:
                handle.fail(disagreement(handle.name, signatures, self.ranks))
            elif handle is not None and error is not None:  # the start of the operation failed on a rank
                handle.fail(error)
            return
        if self._broken is None and self._negotiation is None and number > self._decided.filled:
            self._begin()
        if handle is not None and self._broken is not None:  # the set may be broken because a rank was lost earlier
            handle.fail(refusal(handle.title, self._broken))
        elif handle is not None and self._negotiation is not None:
            handle.posted, handle.number = None, 0
            self._negotiation.put([handle])

    def _begin(self) -> None:
        if self._channel is None:  # a single rank has nothing to negotiate
            return
        self._generation += 1
        if self._joining is not None:
            self._joining.waited_us = int(1e6 * (time.monotonic() - self._joined_s))
        self._negotiation = Negotiation(self, self._decided, self._channel, self._generation)
        self._negotiation.begin(self._calls.last)
        if self._losses:
            self.fail_for_lost(self._losses.first)

    def fill(self, count: int) -> None:
        """Post filler operations until `count` operations are posted in optimistic order."""
        for _ in range(self._calls.last, count):
            self._group.barrier_async(label=_FILLER)

    def has_unknown(self) -> bool:
        """Return whether an operation of the optimistic order has no known outcome yet."""
        return self._in_flight.has_unknown()

    def go_back(self, joined: Joined) -> None:
        """End the negotiation: all ranks have joined, and no operation is in flight."""
        self._negotiation = None
        joining, self._joining = self._joining, None
        if joining is not None:
            joining.finish(joined.last_rank)
        unexpected, self._unexpected = self._unexpected, []
        for message in unexpected:
            self._take(message)

    # ---- failing ----

    def fail_for_lost(self, rank: int) -> None:
        """Fail the open operations, because `rank` of the set is lost.

        Nothing more will be decided.
        """
        control = self._services.control
        world_rank = self.ranks[rank]
        if self._losses or control is None:
            self._break(self._losses.cause(world_rank))
        else:  # other ranks have detected the loss first; this rank is about to receive the reason
            control.after(_NEWS_S, lambda: self._break(self._losses.cause(world_rank)))

    def _pass_on_stall(self, text: str) -> None:
        if self._broken is None and self._channel is not None:
            for rank in self._near:
                self._channel.send(rank, self._generation, MessageKind.STALL, text.encode())
            self._break(StallError(text))

    def _break(self, error: MultiringError) -> None:
        """Fail all operations on which the ranks have not agreed, and refuse later ones."""
        with self._lock:
            if self._broken is not None:
                return
            self._broken = error
            waiting = [] if self._negotiation is None else self._negotiation.take_back()
            for handle in (*waiting, *(() if self._joining is None else (self._joining,))):
                if handle.posted is None:
                    handle.fail(refusal(handle.title, self._broken))
            self.changed.notify_all()
