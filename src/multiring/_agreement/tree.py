"""The tree of a group's ranks.

Rank 0 is the root, and the subtree of a rank is a range of ranks that starts with it. At most `radix` children share
the other ranks of the range evenly. So no path is longer than ceil(log_radix p). If the ranks of a host have
consecutive numbers, most messages stay on the host.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place in the tree."""

    parent: int | None
    depth: int  # the number of messages from the root
    height: int  # the number of messages to the deepest rank below
    children: tuple[range, ...]  # the subtree of each child, which begins with the child


def place_of(rank: int, size: int, radix: int) -> Place:
    """Return the place of `rank` among `size` ranks.

    Raises:
        ValueError: `rank` is not in the group, or `radix` is below 2.
    """
    if radix < 2:
        raise ValueError(f"radix is {radix}, want 2 or more")
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank}, want one of a group of {size}: 0 to {size - 1}")
    parent, depth, below = None, 0, range(size)
    while below.start != rank:
        parent, depth = below.start, depth + 1
        count = min(radix, len(below) - 1)
        below = _child(below, count, ((rank - below.start) * count - 1) // (len(below) - 1))
    count = min(radix, len(below) - 1)
    children = tuple(_child(below, count, number) for number in range(count))
    return Place(parent=parent, depth=depth, height=height_of(len(below), radix), children=children)


def height_of(size: int, radix: int) -> int:
    """Return the height of the tree of `size` ranks.

    The height is the number of messages from the root to the deepest rank.
    """
    height = 0
    while size > 1:
        height += 1
        size = -(-(size - 1) // radix)  # the size of the largest child's subtree
    return height


def _child(ranks: range, count: int, number: int) -> range:
    """Return the subtree of the child `number` of the first rank in `ranks`.

    That rank has `count` children.
    """
    first, below = ranks.start + 1, len(ranks) - 1
    return range(first + number * below // count, first + (number + 1) * below // count)
