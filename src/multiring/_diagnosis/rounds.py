"""Which pairs of hosts measure their link at the same time. Pure."""

from collections.abc import Sequence

Pair = tuple[int, int]


def rounds_of(pairs: Sequence[Pair], racks: Sequence[int]) -> list[list[Pair]]:
    """Return rounds in which each host occurs at most once, and each rack's uplink carries at most one pair.

    Args:
        pairs: pairs of hosts.
        racks: the rack of each host; empty if no racks are known.
    """
    rounds: list[tuple[set[int], set[int], list[Pair]]] = []  # hosts, racks whose uplink is used, pairs
    for pair in pairs:
        uplinks = {racks[host] for host in pair} if racks else set()
        uplinks = uplinks if len(uplinks) > 1 else set()
        free = [each for each in rounds if not each[0] & set(pair) and not each[1] & uplinks]
        if not free:
            rounds.append((set(), set(), []))
        hosts, used, chosen = free[0] if free else rounds[-1]
        hosts |= set(pair)
        used |= uplinks
        chosen.append(pair)
    return [chosen for _, _, chosen in rounds]


def pairs_in_order(hosts: int, most: int) -> list[Pair]:
    """Return pairs of hosts so that `rounds_of` finds full rounds: of neighbours first, then of hosts further apart.

    Args:
        hosts: the number of hosts.
        most: the most pairs of one host. With more hosts, pairs are at distances of powers of two.
    """
    if hosts - 1 <= most:
        # The circle method: each turn is a round of disjoint pairs.
        seats = list(range(hosts + hosts % 2))
        found = []
        for _ in range(len(seats) - 1):
            half = len(seats) // 2
            turn = list(zip(seats[:half], reversed(seats[half:]), strict=True))
            found += [(min(pair), max(pair)) for pair in turn if max(pair) < hosts]
            seats = [seats[0], seats[-1], *seats[1:-1]]
        return found
    distances = [1 << power for power in range(hosts.bit_length()) if 2 * (1 << power) <= hosts][: max(1, most // 2)]
    return list(
        dict.fromkeys(
            (min(host, (host + each) % hosts), max(host, (host + each) % hosts))
            for each in distances
            for host in range(hosts)
        )
    )
