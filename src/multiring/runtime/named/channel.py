"""The control channel of a set: what its ranks tell each other about their named operations, over notices."""

from collections import defaultdict
from enum import IntEnum
from typing import NamedTuple

from multiring._native import NOTE_BYTES, ControlMessage
from multiring.runtime.failures.control_thread import Control


class Kind(IntEnum):
    """What a message is about."""

    COUNT = 0  # how many operations were posted, or are to be; see order_switch.py
    AGREEMENT = 1  # a message of the agreement
    STALL = 2  # a rank has given up, and why


class Message(NamedTuple):
    """A message of another rank of the set."""

    sender: int  # its rank in the set
    generation: int  # how often the set had switched
    kind: Kind
    payload: bytes


class ControlChannel:
    """Sends messages of any length to ranks of the set, and puts together what comes."""

    def __init__(self, control: Control, group: int, ranks: tuple[int, ...], own: int) -> None:
        self.control = control
        self._group = group
        self.ranks = ranks  # in the world
        self.own = own
        self._parts: dict[int, list[bytes]] = defaultdict(list)

    def send(self, to: int, generation: int, kind: Kind, payload: bytes) -> None:
        """Send a message to rank `to` of the set; one that is gone gets none."""
        parts = [payload[at : at + NOTE_BYTES] for at in range(0, len(payload), NOTE_BYTES)]
        for index, part in enumerate(parts):
            more = index < len(parts) - 1
            self.control.send(self.ranks[to], self._group, generation << 8 | kind << 1 | more, part)

    def receive(self, notice: ControlMessage) -> Message | None:
        """Return the message that is complete with `notice`.

        Raises:
            ValueError: it is none of a rank of this set.
        """
        sender = self.ranks.index(notice.rank)
        self._parts[sender].append(notice.payload)
        if notice.tag & 1:
            return None
        payload = b"".join(self._parts.pop(sender))
        return Message(sender, notice.tag >> 8, Kind(notice.tag >> 1 & 0x7F), payload)
