"""A connection of the rendezvous, and a broadcast to many of them.

The broadcast does not wait for slow receivers.
"""

import selectors
import socket
import time
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

from multiring._runtime.bootstrap.handshake import UNPROVEN_FRAME_BYTES, FrameReader, Seal, digest_of, new_nonce

if TYPE_CHECKING:
    from multiring._runtime.bootstrap.sealing import SecretSeal

_PARTS_A_CALL = 16
CONNECT_S = 10.0
LONGEST_WAIT_S = 1e6  # the longest wait of one system call, whose time-out is a 31-bit number of milliseconds


class TimeLimit:
    """The time-out of `init`, one for all rounds of the rendezvous.

    Args:
        timeout_s: the time-out in seconds.
        began: the time, by time.monotonic(), from which it counts. Default: now.
    """

    def __init__(self, timeout_s: float, began: float | None = None) -> None:
        now = time.monotonic()
        self.timeout_s = timeout_s
        self.until = max(now, (now if began is None else began) + timeout_s)  # by time.monotonic()
        self._is_extended = False

    def extend_once(self) -> None:
        """Give ranks that have arrived late, but in time, ten seconds to connect, or the time-out if it is shorter."""
        if not self._is_extended:
            self._is_extended = True
            self.until = max(self.until, time.monotonic() + min(CONNECT_S, self.timeout_s))

    @property
    def left_s(self) -> float:
        """The seconds that are left."""
        return max(self.until - time.monotonic(), 0.0)


class RendezvousLink:
    """One accepted connection, from a pending handshake to the connection of a rank."""

    def __init__(self, sock: socket.socket, origin: str, patience_s: float) -> None:
        self.sock = sock
        self.origin = origin
        self.until = time.monotonic() + patience_s
        self.reader = FrameReader(UNPROVEN_FRAME_BYTES)
        self.since = time.monotonic()
        self.outbox: deque[memoryview] = deque()
        self.nonce = new_nonce()
        self.seal: Seal | SecretSeal | None = None  # set once the other end has proven that it knows the secret
        self.rank: int | None = None  # set once the other end has joined as a rank

    @property
    def is_open(self) -> bool:
        """Whether this end of the connection is open."""
        return self.sock.fileno() >= 0

    def send(self, *parts: bytes) -> bool:
        """Append `parts` to the outbox and send as much as possible without blocking.

        Return whether data is left in the outbox.
        """
        self.outbox.extend(map(memoryview, parts))
        try:
            while self.outbox:
                sent = self.sock.sendmsg(list(islice(self.outbox, _PARTS_A_CALL)))
                while self.outbox and sent >= len(self.outbox[0]):
                    sent -= len(self.outbox.popleft())
                if sent:
                    self.outbox[0] = self.outbox[0][sent:]
        except BlockingIOError:
            return True
        except OSError:
            self.outbox.clear()  # the connection is broken; the next read detects and reports the failure
        return False


def tell(links: Iterable[RendezvousLink], payload: bytes, patience_s: float) -> list[int]:
    """Send `payload` to all links; return the ranks that did not accept it in time.

    The links share the bytes of `payload`, unless they are encrypted.
    """
    deadline = time.monotonic() + patience_s
    digest = digest_of(payload)
    with selectors.PollSelector() as writable:  # a PollSelector needs no file descriptor; there may be none left
        for link in links:
            if not link.is_open or link.seal is None:
                continue
            if link.send(*link.seal.frames(payload, digest)):
                writable.register(link.sock, selectors.EVENT_WRITE, link)
        while writable.get_map() and time.monotonic() < deadline:
            for key, _ in writable.select(min(max(0.0, deadline - time.monotonic()), LONGEST_WAIT_S)):
                if not key.data.send():
                    writable.unregister(key.fileobj)
        return sorted(key.data.rank for key in writable.get_map().values() if key.data.rank is not None)
