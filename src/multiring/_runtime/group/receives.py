"""Handles of receives that may wait for a match, and of a rank's own messages."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

from multiring._runtime.group.handles import Handle, Key, OperationHandle, Waiter
from multiring.errors import MultiringError, StallError, StateError


class Post(Protocol):
    """The interface of an object that matches receives with messages.

    AnySourceMatching implements it.
    """

    ranks: tuple[int, ...]  # the world ranks of the group
    rank: int

    def await_match(self, receive: "PostedReceive", timeout: float | None) -> None:
        """Return once `receive` is matched with a sender, or has failed."""

    def withdraw(self, receive: "PostedReceive", error: MultiringError) -> None:
        """Make `receive` fail with `error`, if it is not matched yet."""

    def suspects(self, receive: "PostedReceive") -> Sequence[int]:
        """Return the world ranks that may send the message for `receive`."""


class PostedReceive(Waiter):
    """The handle of a receive; see `Handle`.

    First it waits for a match with a message, then for the transfer. `source` is the sender's rank in the group, or
    None as long as no sender is matched.
    """

    def __init__(self, post: Post, array: Any, source: int | None, tag: int) -> None:
        self.source = source
        self.array = array
        self.tag = tag
        self.posted: Handle | None = None
        self.error: MultiringError | None = None
        self.refusal: Exception | None = None  # why this rank declines the message once it is matched
        self.is_matched = False
        self._post = post
        self._began_s = time.monotonic()

    @property
    def title(self) -> str:
        """A description of the message for warnings and errors."""
        sender = "any rank" if self.source is None else f"rank {self._post.ranks[self.source]}"
        return f"message from {sender} to rank {self._post.ranks[self._post.rank]}, tag {self.tag}"

    @property
    def key(self) -> Key | None:
        """The receive's identity.

        The key is None if several ranks may send the message, or once the transfer has started.
        """
        if self.posted is not None or len(self._post.suspects(self)) != 1:
            return None
        return "receive", id(self), self._post.ranks[self._post.rank]

    def stalled_on(self) -> tuple[Sequence[int], float]:
        """Return the world ranks to wait for, and the seconds without progress."""
        if isinstance(self.posted, OperationHandle):
            return self.posted.stalled_on()
        return self._post.suspects(self), time.monotonic() - self._began_s

    def give_up(self, silent: int) -> None:
        """Fail the receive with a StallError about world rank `silent`."""
        if isinstance(self.posted, OperationHandle):
            self.posted.give_up(silent)
        else:
            self._post.withdraw(self, StallError(f"{self.title}: rank {silent} has not sent it{self.verdict}"))

    def abort(self, culprit: int) -> None:
        """Make the receive fail because world rank `culprit` aborted the group."""
        if isinstance(self.posted, OperationHandle):
            self.posted.abort(culprit)
        else:
            self._post.withdraw(self, StateError(f"{self.title}: rank {culprit} aborted the group"))

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self.error is not None or (self.is_matched and (self.posted is None or self.posted.done()))

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the message has arrived; see `Handle`."""
        began_s = time.monotonic()
        self._post.await_match(self, timeout)
        if self.error is not None:
            raise self.error
        if self.posted is not None:
            self.posted.wait(None if timeout is None else max(0.0, timeout - (time.monotonic() - began_s)))


class CompletedSend:
    """The handle of a message from this rank to itself.

    The message was already copied.
    """

    def done(self) -> bool:
        """Return True."""
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Return at once."""
