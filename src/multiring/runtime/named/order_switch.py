"""Switching: how the ranks of a set stop at one place of their optimistic order.

Some have posted more operations than others when they learn that they differ. The most that any rank has posted goes up
the tree as a maximum, and down it as what all go up to: 2 messages over each of its links.
"""

from collections.abc import Sequence

from multiring.agreement.tree import place_of

RADIX = 16  # of a set's tree; up to 17 ranks it is the root and the others


def tree_neighbours(rank: int, size: int) -> tuple[int, ...]:
    """Return the ranks next to `rank` in the tree of a set."""
    place = place_of(rank, size, RADIX)
    above = () if place.parent is None else (place.parent,)
    return above + tuple(below.start for below in place.children)


class Switch:
    """One rank's part. What a method returns is to be sent: (to rank, number of operations)."""

    def __init__(self, rank: int, size: int) -> None:
        place = place_of(rank, size, RADIX)
        self._parent = place.parent
        self._children = [below.start for below in place.children]
        self._unheard = set(self._children)
        self._most: int | None = None  # until this rank has said how many it has posted
        self._heard = 0
        self.agreed: int | None = None  # how many operations every rank is to have posted

    def begin(self, posted: int) -> Sequence[tuple[int, int]]:
        """Say how many this rank has posted."""
        self._most = posted
        return self._tell_above()

    def _tell_above(self) -> Sequence[tuple[int, int]]:
        if self._unheard or self._most is None:
            return ()
        self._most = max(self._most, self._heard)
        if self._parent is not None:
            return ((self._parent, self._most),)
        return self._agree(self._most)

    def take(self, sender: int, count: int) -> Sequence[tuple[int, int]]:
        """Take what a rank next to this one in the tree says.

        Raises:
            ValueError: it is not next to this rank.
        """
        if sender == self._parent:
            return self._agree(count)
        if sender not in self._children:
            raise ValueError(f"rank {sender} is not next to this rank in the tree")
        self._unheard.discard(sender)
        self._heard = max(self._heard, count)
        return self._tell_above()

    def _agree(self, count: int) -> Sequence[tuple[int, int]]:
        self.agreed = count
        return [(child, count) for child in self._children]
