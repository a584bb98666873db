"""The connection between the launcher of a job on several hosts and the agent of one host.

Messages are JSON objects in frames. The bytes of a standard stream travel in frames of their own. Over ssh the frames
go through the session's standard streams, which ssh protects. Over TCP both ends prove that they know the job's secret,
and each frame is sealed (`multiring._runtime.bootstrap.handshake`). A sealed frame cannot be changed, but it can be
read on the way, so no secret travels over TCP.
"""

import contextlib
import hashlib
import hmac
import os
import selectors
import struct
import time
from collections import deque
from dataclasses import dataclass

from multiring._runtime.bootstrap.handshake import FrameError, FrameReader, Message, Seal, decode, encode, frame

_READ_BYTES = 1 << 16
_WRITE_BYTES = 1 << 16
_QUEUE_BYTES = 1 << 20  # above this size, no more output is read from the ranks
_MOST_FRAME_BYTES = 1 << 26
_MOST_BEFORE_BYTES = 1 << 17
_PING_S = 3.0
QUIET_S = 5.0  # an end that sends nothing for this long may be dead: it has missed its time
AGENT_BEGINS = b"\nmultiring host agent\n"  # the first bytes that an agent writes to a pipe
SILENT_S = 15.0  # an end that sends nothing for this long counts as dead
LEAST_SILENT_S = 8.0  # the shortest time that a job may choose instead: two messages may be late
_STREAM = struct.Struct(">cIIB")
_STREAM_KIND = b"s"
STDIN, STDOUT, STDERR = 0, 1, 2
CALL, OUTCOME = 3, 4  # a call for the ranks of the host, and a rank's outcome of it
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class StreamData:
    """Bytes of a stream of `rank` in start number `start` of the ranks.

    `stream` is STDIN, STDOUT or STDERR; or CALL or OUTCOME, if the ranks call a function. No bytes mean the end of
    STDIN.
    """

    start: int
    rank: int
    stream: int
    data: bytes


def silence_of(wire_timeout_s: float) -> float:
    """Return after how much silence an end counts as dead, in a job that goes on without lost hosts.

    If the ranks that the launcher reaches are the fewer ones, they go on only once the others' hosts count as lost.
    That must not take longer than the ranks' own time for a wire that is cut.
    """
    return min(SILENT_S, max(LEAST_SILENT_S, wire_timeout_s))


def control_key(secret: bytes) -> bytes:
    """Return the key with which agents and the launcher prove over TCP that they know the job's secret."""
    return hmac.digest(secret, b"multiring control", hashlib.sha256)


def secret_of_start(secret: bytes, name: str) -> str:
    """Return the secret of the ranks for a start of the job; `name` is the name of the start, which no other start has.

    Each start has a secret of its own, also if the user gives several jobs the same secret. Agents compute it from the
    job's secret, so it never travels.
    """
    return hmac.digest(secret, f"multiring start {name}".encode("utf-8", "surrogateescape"), hashlib.sha256).hex()


class ControlLink:
    """One end of the connection.

    The methods do not block. The object owns both descriptors; they may be equal, as for a socket.

    Args:
        reading: the descriptor to read.
        writing: the descriptor to write.
        seal: this end's seal, if the connection needs one.
        begins_with: bytes before which everything is dropped. A shell's start-up files may print before the agent.
    """

    def __init__(self, reading: int, writing: int, seal: Seal | None = None, *, begins_with: bytes = b"") -> None:
        self._reading = reading
        # poll knows a descriptor once only, so a socket gets a second one for writing
        self._writing = os.dup(writing) if reading == writing else writing
        self._seal = seal
        self._reader = FrameReader(_MOST_FRAME_BYTES)
        self._queue = bytearray()
        self._awaited, self._before = begins_with, b""
        self._received: deque[Message | StreamData] = deque()
        self._heard_at = self._said_at = time.monotonic()
        self.patience_s = SILENT_S  # how long the other end may send nothing; a job may choose another time
        self.is_open = True
        self.failure = "the connection was closed"  # the reason for the end of the connection
        for descriptor in (self._reading, self._writing):
            os.set_blocking(descriptor, False)

    # -- sending

    def send(self, **message: object) -> None:
        """Queue a message. A message on a closed link is lost."""
        self._send(encode(message))

    def send_stream(self, start: int, rank: int, stream: int, data: bytes) -> None:
        """Queue bytes of a stream of a rank in start number `start`."""
        self._send(_STREAM.pack(_STREAM_KIND, start, rank, stream) + data)

    def send_pieces(self, start: int, rank: int, stream: int, data: bytes) -> None:
        """Queue bytes of any number, in frames of a size that the other end accepts."""
        for at in range(0, len(data), PIECE_BYTES):
            self.send_stream(start, rank, stream, data[at : at + PIECE_BYTES])

    def _send(self, payload: bytes) -> None:
        if self.is_open:
            self._queue += frame(payload) if self._seal is None else self._seal.close(payload)
            self._said_at = time.monotonic()

    @property
    def is_full(self) -> bool:
        """Whether so much waits to be sent that no more output should be added."""
        return len(self._queue) > _QUEUE_BYTES

    def ping_if_due(self) -> None:
        """Send an empty message if nothing was sent for a while."""
        if time.monotonic() >= self._said_at + _PING_S:
            self.send()

    @property
    def wake_at(self) -> float:
        """The monotonic time at which `ping_if_due` or `has_fallen_silent` must be called."""
        ping_at = self._said_at + _PING_S
        return ping_at if self._awaited else min(ping_at, self._heard_at + self.patience_s)

    # -- receiving

    def next_message(self) -> Message | StreamData | None:
        """Return the oldest message that has arrived, and None if there is none."""
        return self._received.popleft() if self._received else None

    @property
    def has_fallen_silent(self) -> bool:
        """Whether the other end has sent nothing for `patience_s` seconds.

        An end that has not begun is not silent: a slow login has as much time as the caller gives it.
        """
        return self.is_quiet(self.patience_s)

    def is_quiet(self, seconds: float) -> bool:
        """Whether the other end is expected to speak and has sent nothing for `seconds`."""
        return self.is_open and not self._awaited and time.monotonic() >= self._heard_at + seconds

    def excuse_silence(self) -> None:
        """Record that this end does not read at the moment, so that the other end's silence does not count."""
        self._heard_at = time.monotonic()

    def watch(self, poll: selectors.BaseSelector, *, reads: bool = True) -> None:
        """Register the descriptors with `poll`, each with a callable as its data.

        Without `reads`, incoming data stays in the system's buffers, so the other end must wait.
        """
        if not self.is_open:
            return
        if reads:
            poll.register(self._reading, selectors.EVENT_READ, self.read_some)
        else:
            self.excuse_silence()
        if self._queue:
            poll.register(self._writing, selectors.EVENT_WRITE, self.write_some)

    def read_some(self) -> None:
        """Read once."""
        if not self.is_open:
            return
        try:
            data = os.read(self._reading, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(error.strerror or str(error))
            return
        if not data:
            self.close(self.failure)
            return
        self._heard_at = time.monotonic()
        if self._awaited:
            self._before = (self._before + data)[-_MOST_BEFORE_BYTES:]
            _, found, data = self._before.partition(self._awaited)
            if not found:
                return
            self._awaited = self._before = b""
        self._reader.feed(data)
        try:
            while (payload := self._reader.next_frame()) is not None:
                self._take(payload if self._seal is None else self._seal.verified(payload))
        except FrameError as error:
            self.close(f"it does not speak the protocol: {error}")

    def _take(self, payload: bytes) -> None:
        if payload[:1] == _STREAM_KIND:
            if len(payload) < _STREAM.size:
                raise FrameError("a stream's frame is too short")
            _, start, rank, stream = _STREAM.unpack_from(payload)
            self._received.append(StreamData(start, rank, stream, payload[_STREAM.size :]))
        elif message := decode(payload):
            self._received.append(message)

    def write_some(self) -> None:
        """Write some of the queue."""
        if not self.is_open:
            return
        try:
            del self._queue[: os.write(self._writing, self._queue[:_WRITE_BYTES])]
        except BlockingIOError:
            return
        except OSError:
            # What the other end has sent before its end must still be read; reading then reports the end.
            self._queue.clear()

    def flush(self, until: float) -> None:
        """Write the whole queue, until the monotonic time `until` at most."""
        while self.is_open and self._queue and (left_s := until - time.monotonic()) > 0:
            with selectors.PollSelector() as poll:
                poll.register(self._writing, selectors.EVENT_WRITE)
                if poll.select(min(left_s, 0.1)):
                    self.write_some()

    def close(self, failure: str = "the connection was closed") -> None:
        """Close the connection. A second call has no effect."""
        if self.is_open:
            self.is_open = False
            self.failure = failure
            self._queue.clear()  # nobody will take it: it must not keep the ranks' output from being read
            for descriptor in {self._reading, self._writing}:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
