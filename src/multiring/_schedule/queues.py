"""The messages of operations under way, and those that wait for the wire of a port."""

from collections import deque

# A connection queues no further message once it has this many bytes that are not on the wire: TCP_NOTSENT_LOWAT of the
# native core's rails, and two frames of their own.
_MOST_QUEUED_BYTES = (512 + 2 * 128) << 10


class TimedMessage:
    """A message under way: when its first and its last byte are, or will be, where it is.

    `slowest_s` is its time on the slowest link that it has passed.
    """

    __slots__ = (
        "axis",
        "first_s",
        "last_s",
        "left",
        "operation",
        "peer",
        "queue",
        "segment",
        "size_bytes",
        "slowest_s",
        "to",
    )

    def __init__(self, to: int, operation: int, segment: int, queue: int, axis: int, size_bytes: float) -> None:
        self.to = to
        self.operation = operation
        self.segment = segment
        self.queue = queue
        self.axis = axis
        self.size_bytes = size_bytes
        self.peer = to
        self.left: tuple[int, ...] = ()  # the shared links that it has not passed
        self.first_s = self.last_s = self.slowest_s = 0.0


class PortQueue:
    """The messages of a port that wait for its wire, while several operations are in flight.

    `queued` are the messages that connections have queued, in order. `held` are further ones by receiver, which wait
    until less is queued. `queued_bytes` counts the messages to each receiver that are queued or on the wire.
    """

    __slots__ = ("held", "is_awaited", "on_wire", "queued", "queued_bytes")

    def __init__(self) -> None:
        self.on_wire: TimedMessage | None = None
        self.queued: deque[TimedMessage] = deque()
        self.held: dict[int, list[TimedMessage]] = {}
        self.queued_bytes: dict[int, float] = {}
        self.is_awaited = False  # whether an event is scheduled for the time when the wire is free

    def is_idle(self) -> bool:
        """Return whether no message waits."""
        return not self.queued and not self.held

    def put(self, message: TimedMessage) -> None:
        """PortQueue a message, or hold it if its connection has queued enough."""
        if self.queued_bytes.get(message.peer, 0.0) < _MOST_QUEUED_BYTES:
            self._queue(message)
        else:
            self.held.setdefault(message.peer, []).append(message)

    def on_free(self) -> TimedMessage | None:
        """Take the message off the wire, queue further ones to its receiver, and return the next message."""
        sent, self.on_wire = self.on_wire, None
        if sent is not None:
            self.queued_bytes[sent.peer] -= sent.size_bytes
            held = self.held.get(sent.peer, [])
            while held and self.queued_bytes[sent.peer] < _MOST_QUEUED_BYTES:
                oldest = min(held, key=_operation_of)
                held.remove(oldest)
                self._queue(oldest)
            if not held:
                self.held.pop(sent.peer, None)
        return self.queued.popleft() if self.queued else None

    def _queue(self, message: TimedMessage) -> None:
        self.queued.append(message)
        self.queued_bytes[message.peer] = self.queued_bytes.get(message.peer, 0.0) + message.size_bytes


def _operation_of(message: TimedMessage) -> int:
    return message.operation
