"""Send counts: how many messages each rank of a group has sent to this rank.

Only a rank that waits for a message asks for the counts. The asked rank answers at once. It answers once more when it
has sent further messages to the asking rank.
"""

import struct
from collections import defaultdict
from collections.abc import Iterable
from functools import partial

from multiring._native import ControlMessage
from multiring._runtime.failures.control_thread import Control
from multiring.errors import StateError

_ASK, _TELL = 0, 1
# The tag, and a number of messages. A question has the number known to the asking rank, an answer has the number sent.
_WORDS = struct.Struct("<qq")
_LATER_S = 0.1  # the delay before a count is sent again to a rank that accepts no control messages at the moment

Key = tuple[int, int]  # (rank of the group, tag)


class SendCounts:
    """The send counts of one group on this rank.

    The object is not thread-safe: the AnySourceMatching holds its lock.

    Args:
        control: sends the questions and answers; None if there are no other ranks.
        ranks: the group's ranks in the world.
        name: the id of the control messages.
    """

    def __init__(self, control: Control | None, ranks: tuple[int, ...], name: int) -> None:
        self._control = control
        self._ranks = ranks
        self._name = name
        self._index = {rank: index for index, rank in enumerate(ranks)}
        self._sent: dict[Key, int] = defaultdict(int)  # the number of messages posted here
        self._wanted: dict[Key, int] = {}  # the rank waits for a count above this number
        self._begun: dict[Key, int] = defaultdict(int)  # the number of receives posted here
        self._told: dict[Key, int] = defaultdict(int)  # the count that the rank has reported
        self._asked: dict[Key, int] = {}  # the number in this rank's latest question
        self._subscribed: set[Key] = set()  # whether the rank has our question, and will report further messages

    def note_sent(self, to: int, tag: int) -> None:
        """Count a message to rank `to`; report the count if that rank waits for the message."""
        key = to, tag
        self._sent[key] += 1
        if self._wanted.get(key, self._sent[key]) < self._sent[key]:
            del self._wanted[key]
            self._tell(key)

    def note_begun(self, source: int, tag: int) -> None:
        """Count a receive from rank `source`."""
        self._begun[source, tag] += 1

    def has_more(self, source: int, tag: int) -> bool:
        """Return whether the rank has reported a message for which no receive was posted."""
        return self._told.get((source, tag), 0) > self._begun.get((source, tag), 0)

    def ask(self, ranks: Iterable[int], tag: int) -> bool:
        """Ask each of `ranks`, unless it will report new messages by itself.

        Return whether any rank was asked.
        """
        unsure = [(rank, tag) for rank in ranks if (rank, tag) not in self._subscribed]
        for key in unsure:
            self._asked[key] = self._begun[key]
            self._say(_ASK, key, self._begun[key])
        return bool(unsure)

    def hear(self, notice: ControlMessage) -> int | None:
        """Answer a question and return None, or store an answer and return its tag."""
        tag, number = _WORDS.unpack(notice.payload)
        key = self._index[notice.rank], tag
        if notice.tag == _ASK:
            if self._sent[key] <= number:
                self._wanted[key] = number
            self._tell(key)
            return None
        self._told[key] = max(number, self._told[key])
        if number > self._asked.get(key, 0):
            self._subscribed.discard(key)
        else:
            self._subscribed.add(key)
        return int(tag)

    def _tell(self, key: Key) -> None:
        if not self._say(_TELL, key, self._sent[key]) and self._control is not None:
            self._control.after(_LATER_S, partial(self._tell, key))

    def _say(self, what: int, key: Key, number: int) -> bool:
        """Send a question or a count.

        Return False if the rank accepts no control messages at the moment.
        """
        if self._control is None:
            return True
        try:
            self._control.send(self._ranks[key[0]], self._name, what, _WORDS.pack(key[1], number))
        except StateError:
            return False
        return True
