"""The control channel of a set, for messages about named operations.

Each message is sent as one or several control messages.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import partial
from typing import NamedTuple

from multiring._native import NOTE_BYTES, ControlMessage
from multiring._runtime.failures.control_thread import Control


class MessageKind(IntEnum):
    """The kind of a message."""

    COUNT = 0  # a number of posted operations; see order_switch.py
    AGREEMENT = 1  # a message of the agreement
    STALL = 2  # a rank has given up; the payload is the reason
    PICKLE = 3  # a message of `multiring.trials`


class Message(NamedTuple):
    """A message of another rank of the set."""

    sender: int  # the sender's rank in the set
    generation: int  # the number of the set's negotiations so far
    kind: MessageKind
    payload: bytes


class ControlChannel:
    """Sends messages of any length to ranks of the set.

    The channel also assembles received messages from their parts.
    """

    def __init__(self, control: Control, group: int, ranks: tuple[int, ...], own: int) -> None:
        self.control = control
        self._group = group
        self.ranks = ranks  # world ranks
        self.own = own
        self._parts: dict[int, list[bytes]] = defaultdict(list)

    def send(self, to: int, generation: int, kind: MessageKind, payload: bytes) -> None:
        """Send a message to rank `to` of the set. A message to a lost rank is dropped."""
        for send_part in self.parts(to, generation, kind, payload):
            send_part()

    def parts(self, to: int, generation: int, kind: MessageKind, payload: bytes) -> Iterator[Callable[[], bool]]:
        """Yield calls that send a message to rank `to` part by part; see `send`.

        A caller whose part is refused may repeat the call. It must not begin the message anew.
        """
        for at in range(0, len(payload), NOTE_BYTES):
            tag = generation << 8 | kind << 1 | (at + NOTE_BYTES < len(payload))
            part = payload[at : at + NOTE_BYTES]
            yield partial(self.control.send, self.ranks[to], self._group, tag, part)

    def receive(self, notice: ControlMessage) -> Message | None:
        """Add a received part. Return the message if it is complete now, else None.

        Raises:
            ValueError: the sender is not a rank of this set, or the kind is unknown.
        """
        sender = self.ranks.index(notice.rank)
        self._parts[sender].append(notice.payload)
        if notice.tag & 1:
            return None
        payload = b"".join(self._parts.pop(sender))
        return Message(sender, notice.tag >> 8, MessageKind(notice.tag >> 1 & 0x7F), payload)
