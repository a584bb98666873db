"""Any-source matching: receives that accept a message from any rank.

Messages are matched in the order in which the receives were posted. A receive of a Group must name its source. A
receive without a source waits here, in the queue of its tag, until a rank has reported a message that matches no
earlier receive. Senders do not announce messages. Only a waiting rank asks how many messages each other rank has sent
to it under the tag. After a question, a rank reports again once it has sent another message. A receive with a source
also queues up behind an earlier receive from any source. Otherwise it would overtake the earlier receive.
"""

import ctypes
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from multiring._native import ControlMessage, ControlMessageKind
from multiring._runtime.arrays import buffer_of
from multiring._runtime.group.group import Group
from multiring._runtime.group.handles import Handle
from multiring._runtime.group.posting import failure_text
from multiring._runtime.group.receives import CompletedSend, PostedReceive
from multiring._runtime.group.send_counts import SendCounts
from multiring._runtime.group.starting import Array
from multiring.errors import MismatchError, MultiringError, PeerLostError, StallError, StateError

_log = logging.getLogger("multiring")
# A rank without a connection, or without its AnySourceMatching, does not answer yet. It is asked again.
_FIRST_AGAIN_S, _LAST_AGAIN_S = 0.005, 0.1
_LONGEST_WAIT_S = 3600.0  # the longest single wait on a lock; the settings' value for "never" is too long


class AnySourceMatching:
    """The messages of one group on this rank.

    All messages of the group must go through this object, which is thread-safe.

    Args:
        group: the group; every rank of it must create its own AnySourceMatching.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank, self.ranks = group.rank, group.calls.ranks
        services = group.calls.services
        self._patience = services.stall_warn_s, services.stall_timeout_s
        self._changed = threading.Condition(threading.RLock())
        self._own: dict[int, deque[tuple[str, bytes]]] = defaultdict(deque)  # by tag: messages to this rank
        self._waiting: dict[int, deque[PostedReceive]] = {}  # for each tag, receives in the order of posting
        self._gone: dict[int, PeerLostError] = {}
        self._has_died = False
        self._again_s = _FIRST_AGAIN_S
        self._asks_again = False
        self._index = {rank: index for index, rank in enumerate(group.calls.ranks)}
        self._id = group.calls.purpose_id("any-source matching")
        self._control = services.control if group.size > 1 else None
        self._send_counts = SendCounts(self._control, group.calls.ranks, self._id)
        if self._control is not None:
            self._control.add(self._id, self)
        self._generation = services.generation
        self._generation.when_over(self._go_with_generation)

    def send(self, array: Array, to: int, tag: int = 0) -> Handle:
        """Start to send `array` like `Group.send_async`.

        Here `to` may also be this rank. A message to this rank itself is copied, and the copy is kept until its
        receive.
        """
        self._generation.refuse_fork("send")
        if to == self.rank:
            buffer = buffer_of(array, writes=False)
            with self._changed:
                self._own[tag].append((_shown(buffer), ctypes.string_at(buffer.address, buffer.size_bytes)))
                self._match(tag)
            return CompletedSend()
        with self._changed:
            handle = self._group.send_async(array, to, tag)
            self._send_counts.note_sent(to, tag)
        return handle

    def recv(self, array: Array, source: int | None = None, tag: int = 0) -> PostedReceive:
        """Start to receive a message into `array`.

        Args:
            array: an array of the message's type and shape. The caller must not use it before the receive has ended.
            source: a rank of the group, possibly this rank; None accepts the first message from any rank that matches
                no earlier receive.
            tag: the tag of the message.
        """
        receive = PostedReceive(self, array, source, tag)
        self._enter(receive, source)
        return receive

    def decline_send(self, error: Exception, to: int, tag: int = 0) -> None:
        """Fail the message that a `send` would have sent, because of `error`, in its receiver's `recv`."""
        self._generation.refuse_fork("send")
        with self._changed:
            if to == self.rank:
                self._own[tag].append((failure_text("send", error), b""))
                self._match(tag)
            else:
                self._group.calls.decline_message("send", self.rank, to, tag, error)
                self._send_counts.note_sent(to, tag)

    def decline_recv(self, error: Exception, source: int | None = None, tag: int = 0) -> None:
        """Fail the message that a `recv` would have received, because of `error`, in its sender's `send`."""
        receive = PostedReceive(self, None, source, tag)
        receive.refusal = error
        with suppress(PeerLostError):
            self._enter(receive, source)

    def _enter(self, receive: PostedReceive, source: int | None) -> None:
        """Post a receive, or let it wait for a match; raise its error if it has failed."""
        self._generation.refuse_fork("recv")
        tag = receive.tag
        with self._changed:
            if source is not None and source != self.rank and tag not in self._waiting:
                self._post(receive, source)
                if receive.error is not None:
                    raise receive.error
                return
            self._waiting.setdefault(tag, deque()).append(receive)
            self._again_s = _FIRST_AGAIN_S
            self._match(tag)
            if not receive.is_matched:  # receive a message that is already here, even if its sender has left
                self._refuse_gone(receive)
                self._ask(tag)

    def await_match(self, receive: PostedReceive, timeout: float | None) -> None:
        """Return once `receive` is matched with a sender, or has failed.

        Raises:
            TimeoutError: the receive is neither matched nor failed after `timeout` seconds.
        """
        self._generation.refuse_fork("recv")
        began_s, (warn_s, most_s), has_warned = time.monotonic(), self._patience, False
        with self._changed:
            while not receive.is_matched and receive.error is None:
                waited_s = time.monotonic() - began_s
                if timeout is not None and waited_s >= timeout:
                    raise TimeoutError(f"{receive.title} is still in flight after {timeout:g} s")
                if waited_s >= most_s:
                    self._give_up(receive, StallError(f"{receive.title}: no rank has sent it for {waited_s:.0f} s"))
                elif waited_s >= warn_s and not has_warned:
                    has_warned = True
                    _log.warning("%s: no rank has sent it for %.0f s", receive.title, waited_s)
                else:
                    next_s = min(most_s, most_s if has_warned else warn_s, most_s if timeout is None else timeout)
                    self._changed.wait(min(next_s - waited_s, _LONGEST_WAIT_S))

    def suspects(self, receive: PostedReceive) -> Sequence[int]:
        """Return the world ranks that may send the message for `receive`."""
        ranks = self._group.calls.ranks
        if receive.source is not None:
            return (ranks[receive.source],)
        return [rank for rank in ranks if rank != ranks[self.rank]]

    def withdraw(self, receive: PostedReceive, error: MultiringError) -> None:
        """Make `receive` fail with `error`, if it is not matched yet."""
        with self._changed:
            if not receive.is_matched and receive.error is None:
                self._give_up(receive, error)

    def close(self) -> None:
        """Stop all messages of this object. Receives that wait for a match fail."""
        if self._control is not None:
            self._control.remove(self._id)
        self._fail_all("this group was closed")

    # ---- for the control thread ----

    def hear(self, notice: ControlMessage) -> None:
        """Answer a question for this rank's send count, or store another rank's count."""
        if notice.kind is not ControlMessageKind.MESSAGE:
            return
        with self._changed:
            tag = self._send_counts.hear(notice)
            if tag is not None and tag in self._waiting:
                self._match(tag)
                self._ask(tag)

    def has_come(self, name: str) -> bool:  # noqa: ARG002 -- part of the interface
        """Return False: messages have no names."""
        return False

    def lose(self, rank: int, *, died: bool, why: str) -> None:
        """Fail the receives that may have waited for a rank that died or left.

        A receive from any source does not fail because a rank left in order, as long as other ranks remain.
        """
        if rank not in self._index:
            return
        with self._changed:
            text = f"rank {rank} {'died' if died else 'left'}, {why}"
            self._gone[self._index[rank]] = PeerLostError(text)
            self._has_died |= died
            for receive in [receive for queue in self._waiting.values() for receive in queue]:
                error = self._loss_for(receive)
                if error is not None:
                    self._give_up(receive, error)

    def end(self) -> None:
        """Fail all waiting receives, because this rank leaves the job."""
        self._fail_all("multiring was shut down")

    def _go_with_generation(self) -> None:
        with self._changed:
            for receive in [receive for queue in self._waiting.values() for receive in queue]:
                self._give_up(receive, self._generation.error(receive.title))

    # ---- matching; the caller holds the lock ----

    def _match(self, tag: int) -> None:
        """Match the receives under `tag` with the reported messages, oldest receive first."""
        queue = self._waiting.get(tag, deque())
        for receive in list(queue):
            ranks = range(self._group.size) if receive.source is None else (receive.source,)
            found = next((rank for rank in ranks if self._has_more(rank, tag)), None)
            if found is not None:
                queue.remove(receive)
                self._post(receive, found)
        if not queue:
            self._waiting.pop(tag, None)
        self._changed.notify_all()

    def _has_more(self, rank: int, tag: int) -> bool:
        if rank == self.rank:
            return bool(self._own.get(tag))
        return self._send_counts.has_more(rank, tag)

    def _post(self, receive: PostedReceive, source: int) -> None:
        receive.source = source
        try:
            if source == self.rank:
                self._take(receive)
            elif receive.refusal is not None:
                self._group.calls.decline_message("recv", source, self.rank, receive.tag, receive.refusal)
                self._send_counts.note_begun(source, receive.tag)
            else:
                receive.posted = self._group.recv_async(receive.array, source, receive.tag)
                self._send_counts.note_begun(source, receive.tag)
        except MultiringError as error:
            receive.error = error
        receive.is_matched = True

    def _take(self, receive: PostedReceive) -> None:
        sent, data = self._own[receive.tag].popleft()
        if receive.refusal is not None:
            return
        buffer = buffer_of(receive.array, writes=True)
        if sent != _shown(buffer):
            text = f"{receive.title}: sent as {sent}, received as {_shown(buffer)}; the array is intact"
            raise MismatchError(text)
        ctypes.memmove(buffer.address, data, len(data))

    def _ask(self, tag: int) -> None:
        """Ask for the send counts that the receives under `tag` need.

        The receives need the count of each rank that may have sent one of their messages.
        """
        queue = self._waiting.get(tag)
        if not queue or self._control is None:
            return
        named = {receive.source for receive in queue if receive.source is not None}
        ranks = set(range(self._group.size)) if any(receive.source is None for receive in queue) else named
        ranks -= {self.rank, *self._gone}
        is_unsure = self._send_counts.ask(ranks, tag)
        if is_unsure and not self._asks_again:
            self._asks_again = True
            self._control.after(self._again_s, self._ask_again)

    def _ask_again(self) -> None:
        with self._changed:
            self._asks_again = False
            self._again_s = min(2 * self._again_s, _LAST_AGAIN_S)
            for tag in list(self._waiting):
                self._ask(tag)

    def _loss_for(self, receive: PostedReceive) -> PeerLostError | None:
        """Return the error of `receive` if its sender is lost, or may be lost; else None."""
        if receive.source is not None:
            found = self._gone.get(receive.source)
        elif self._has_died or len(self._gone) == self._group.size - 1:
            found = next(reversed(self._gone.values()), None)
        else:
            found = None
        return None if found is None else PeerLostError(f"{receive.title}: {found}; its array is undefined")

    def _refuse_gone(self, receive: PostedReceive) -> None:
        error = self._loss_for(receive)
        if error is not None:
            self._give_up(receive, error)
            raise error

    def _give_up(self, receive: PostedReceive, error: MultiringError) -> None:
        queue = self._waiting.get(receive.tag, deque())
        if receive in queue:
            queue.remove(receive)
            if not queue:
                del self._waiting[receive.tag]
        receive.error = error
        self._changed.notify_all()

    def _fail_all(self, why: str) -> None:
        with self._changed:
            for receive in [receive for queue in self._waiting.values() for receive in queue]:
                self._give_up(receive, StateError(f"{receive.title}: {why}"))


def _shown(buffer: Any) -> str:
    return f"{buffer.dtype} of shape {buffer.shape}"
