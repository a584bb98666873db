"""Send counts: how many messages each rank of a group has sent to this one, found out by those that wait for one.

Only a rank that waits asks; whoever is asked answers at once, and again when it has sent more than the one who asked
knows of.
"""

import struct
from collections import defaultdict
from collections.abc import Iterable
from functools import partial

from multiring._native import ControlMessage
from multiring.errors import StateError
from multiring.runtime.failures.control_thread import Control

_ASK, _TELL = 0, 1
_WORDS = struct.Struct("<qq")  # tag, and how many messages: known to the one who asks, sent by the one who tells
_LATER_S = 0.1  # a rank that takes nothing for now is told then

Key = tuple[int, int]  # rank of the group, tag


class SendCounts:
    """The send counts of one group on this rank. Not thread-safe: the AnySourceMatching holds its lock.

    Args:
        control: what carries questions and answers; None where there are no other ranks.
        ranks: the group's, in the world.
        name: of the group's notices.
    """

    def __init__(self, control: Control | None, ranks: tuple[int, ...], name: int) -> None:
        self._control = control
        self._ranks = ranks
        self._name = name
        self._index = {rank: index for index, rank in enumerate(ranks)}
        self._sent: dict[Key, int] = defaultdict(int)  # messages posted here
        self._wanted: dict[Key, int] = {}  # the rank wants to hear of more messages than so many
        self._begun: dict[Key, int] = defaultdict(int)  # receives posted here
        self._told: dict[Key, int] = defaultdict(int)  # messages the rank said it had sent
        self._asked: dict[Key, int] = {}  # what it was asked with
        self._subscribed: set[Key] = set()  # it has heard the question, and will tell of more

    def note_sent(self, to: int, tag: int) -> None:
        """Count a message to rank `to`, which is told if it wants to know."""
        key = to, tag
        self._sent[key] += 1
        if self._wanted.get(key, self._sent[key]) < self._sent[key]:
            del self._wanted[key]
            self._tell(key)

    def note_begun(self, source: int, tag: int) -> None:
        """Count a receive from rank `source`."""
        self._begun[source, tag] += 1

    def has_more(self, source: int, tag: int) -> bool:
        """Return whether the rank is known to have sent a message that no receive was begun for."""
        return self._told.get((source, tag), 0) > self._begun.get((source, tag), 0)

    def ask(self, ranks: Iterable[int], tag: int) -> bool:
        """Ask these ranks, but those that will tell anyhow; return whether there were any."""
        unsure = [(rank, tag) for rank in ranks if (rank, tag) not in self._subscribed]
        for key in unsure:
            self._asked[key] = self._begun[key]
            self._say(_ASK, key, self._begun[key])
        return bool(unsure)

    def hear(self, notice: ControlMessage) -> int | None:
        """Answer a question, or take an answer: then return the tag it is about."""
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
        """Return False where the rank takes nothing for now; to one that is gone nothing need be said."""
        if self._control is None:
            return True
        try:
            self._control.send(self._ranks[key[0]], self._name, what, _WORDS.pack(key[1], number))
        except StateError:
            return False
        return True
