"""Which rank keeps a copy of which rank's own state."""

from collections.abc import Sequence


def copy_holders(hosts: Sequence[Sequence[int]]) -> tuple[int | None, ...]:
    """Return by rank the rank that keeps a copy of its own state, on another host if there is one.

    Ranks keep one copy each, unless a host has more than half of the ranks; then each rank of another host keeps some
    of that host's. Of a single rank nobody keeps a copy: None.

    Args:
        hosts: the ranks of each host; all ranks 0, 1, ... once, and no empty host.
    """
    order = [rank for host in hosts for rank in host]
    largest = max(hosts, key=len)
    found: list[int | None] = [None] * len(order)
    if len(hosts) > 1 and 2 * len(largest) > len(order):
        others = [rank for host in hosts if host is not largest for rank in host]
        for place, rank in enumerate(largest):
            found[rank] = others[place % len(others)]
        for place, rank in enumerate(others):
            found[rank] = largest[place]
    elif len(order) > 1:
        # A step of the largest host's size leads out of each host, and does not come back into it around the end.
        step = 1 if len(hosts) == 1 else len(largest)
        for place, rank in enumerate(order):
            found[rank] = order[(place + step) % len(order)]
    return tuple(found)
