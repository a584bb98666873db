"""Order switch: the ranks of a set stop at the same optimistic operation.

When the ranks detect that their orders differ, some have posted more operations than others. The maximum of these
numbers is computed up the tree and then sent down the tree; all ranks post operations up to this number. Each link of
the tree carries 2 messages.
"""

from collections.abc import Sequence

from multiring._agreement.tree import place_of

RADIX = 16  # the radix of a set's tree; with up to 17 ranks, all other ranks are children of the root


def tree_neighbours(rank: int, size: int) -> tuple[int, ...]:
    """Return the parent, if any, and the children of `rank` in the tree of a set."""
    place = place_of(rank, size, RADIX)
    above = () if place.parent is None else (place.parent,)
    return above + tuple(below.start for below in place.children)


class Switch:
    """One rank's part in the switch.

    The methods return the messages to send, as pairs (receiving rank, number of operations).
    """

    def __init__(self, rank: int, size: int) -> None:
        place = place_of(rank, size, RADIX)
        self._parent = place.parent
        self._children = [below.start for below in place.children]
        self._unheard = set(self._children)
        self._most: int | None = None  # the maximum so far; None before `begin`
        self._heard = 0
        self.agreed: int | None = None  # the number of operations that every rank must have posted

    def begin(self, posted: int) -> Sequence[tuple[int, int]]:
        """Start the switch; this rank has posted `posted` operations."""
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
        """Handle the number that the parent or a child in the tree has sent.

        Raises:
            ValueError: `sender` is neither this rank's parent nor one of its children.
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
