"""The tree of a group's ranks: rank 0 is its root, and what is below a rank are the ranks that follow it.

A rank and those below it are a range; the rest of it is divided evenly among at most `radix` children. So no path is
longer than ceil(log_radix p), and where ranks of a host follow each other most messages stay on it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is in the tree."""

    parent: int | None
    depth: int  # messages from the root
    height: int  # messages to the deepest rank below
    children: tuple[range, ...]  # of ranks: a child, and all below it


def place_of(rank: int, size: int, radix: int) -> Place:
    """Return the place of `rank` among `size` ranks.

    Raises:
        ValueError: there is no such rank, or no such tree.
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
    """Return how many messages the deepest of `size` ranks is away from the first."""
    height = 0
    while size > 1:
        height += 1
        size = -(-(size - 1) // radix)  # of its largest child, rounded up
    return height


def _child(ranks: range, count: int, number: int) -> range:
    """Return the child of that number, of `count` that the first of `ranks` has, and all below it."""
    first, below = ranks.start + 1, len(ranks) - 1
    return range(first + number * below // count, first + (number + 1) * below // count)
