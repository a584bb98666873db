"""Posted receives: those that may have to wait for their turn; and messages of a rank to itself."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

from multiring.errors import MultiringError, StallError, StateError
from multiring.runtime.group.handles import Handle, Key, OperationHandle, Waiter


class Post(Protocol):
    """What gives receives their messages."""

    ranks: tuple[int, ...]  # of the group, in the world
    rank: int

    def await_match(self, receive: "PostedReceive", timeout: float | None) -> None:
        """Return once it is known whose message `receive` gets, or that it gets none."""

    def withdraw(self, receive: "PostedReceive", error: MultiringError) -> None:
        """Let `receive` get no message, but that error."""

    def suspects(self, receive: "PostedReceive") -> Sequence[int]:
        """Return the ranks of the world that may send for `receive`."""


class PostedReceive(Waiter):
    """The handle of a receive that waits for its turn, and then of the message it got; see `Handle`.

    `source` is the rank of the group that it comes from, None as long as that is open.
    """

    def __init__(self, post: Post, array: Any, source: int | None, tag: int) -> None:
        self.source = source
        self.array = array
        self.tag = tag
        self.posted: Handle | None = None
        self.error: MultiringError | None = None
        self.is_matched = False
        self._post = post
        self._began_s = time.monotonic()

    @property
    def title(self) -> str:
        """What is waited for, in words."""
        sender = "any rank" if self.source is None else f"rank {self._post.ranks[self.source]}"
        return f"message from {sender} to rank {self._post.ranks[self._post.rank]}, tag {self.tag}"

    @property
    def key(self) -> Key | None:
        """What is waited for; None where several ranks may send it, and where the message is in flight."""
        if self.posted is not None or len(self._post.suspects(self)) != 1:
            return None
        return "receive", id(self), self._post.ranks[self._post.rank]

    def stalled_on(self) -> tuple[Sequence[int], float]:
        """Return the ranks of the world that are waited for, and for how many seconds nothing has moved."""
        if isinstance(self.posted, OperationHandle):
            return self.posted.stalled_on()
        return self._post.suspects(self), time.monotonic() - self._began_s

    def give_up(self, silent: int) -> None:
        """Fail, as if rank `silent` of the world had been silent for too long."""
        if isinstance(self.posted, OperationHandle):
            self.posted.give_up(silent)
        else:
            self._post.withdraw(self, StallError(f"{self.title}: rank {silent} has sent none{self.verdict}"))

    def abort(self, culprit: int) -> None:
        """Fail, as rank `culprit` of the world has aborted the group."""
        if isinstance(self.posted, OperationHandle):
            self.posted.abort(culprit)
        else:
            self._post.withdraw(self, StateError(f"{self.title}: rank {culprit} aborted the group"))

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self.error is not None or (self.is_matched and (self.posted is None or self.posted.done()))

    def wait(self, timeout: float | None = None) -> None:
        """Return once the message has come; see `Handle`."""
        began_s = time.monotonic()
        self._post.await_match(self, timeout)
        if self.error is not None:
            raise self.error
        if self.posted is not None:
            self.posted.wait(None if timeout is None else max(0.0, timeout - (time.monotonic() - began_s)))


class CompletedSend:
    """The handle of a message to this rank itself: it was copied, and the array may be changed."""

    def done(self) -> bool:
        """Return True."""
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Return at once."""
