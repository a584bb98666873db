"""The paths that CUDA tensors of a group can take, and how the hierarchical path divides a tensor among the ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

STAGED = "staged"  # through pinned host memory, and the host's collectives
NCCL = "nccl"  # NCCL over all ranks
HIERARCHICAL = "hierarchical"  # NCCL inside each host, and the host's collectives between the hosts

Hosts = Sequence[Sequence[int]]


def device_paths(hosts: Hosts) -> tuple[str, ...]:
    """Return the paths that ranks on these hosts can take if NCCL works, the default first.

    Args:
        hosts: each host's ranks of the group.
    """
    if sum(map(len, hosts)) == 1:
        return (STAGED,)
    if len(hosts) == 1:
        return NCCL, STAGED
    if all(len(host) == 1 for host in hosts):
        return STAGED, NCCL
    return HIERARCHICAL, NCCL, STAGED


@dataclass(frozen=True, slots=True)
class HostShares:
    """What one rank does on the hierarchical path.

    NCCL divides the sum of a host's ranks into equal shares. The first ranks of the host own one each. The ranks that
    own the same share, one of each host, reduce it between the hosts. There are as many shares as the smallest host has
    ranks, so that each host has an owner of each share. The other ranks of a larger host own none.

    own: the ranks of this rank's host, in the order of the group.
    place: this rank's place among them.
    between: the ranks of all hosts that own this rank's share; empty if it owns none.
    shares: the number of shares.
    weight: the factor by which a host's average counts in the average of the hosts' averages: 1 if the hosts have
        equally many ranks.
    """

    own: tuple[int, ...]
    place: int
    between: tuple[int, ...]
    shares: int
    weight: float

    @classmethod
    def of(cls, hosts: Hosts, rank: int) -> "HostShares":
        """Return the part of `rank`, which is on one of the `hosts`."""
        own = next(tuple(sorted(host)) for host in hosts if rank in host)
        shares, place = min(map(len, hosts)), own.index(rank)
        between = tuple(sorted(host)[place] for host in hosts) if place < shares else ()
        return cls(own, place, between, shares, len(own) * len(hosts) / sum(map(len, hosts)))

    def padded(self, count: int, multiple: int = 1) -> int:
        """Return the least number of elements, at least `count`, whose shares are multiples of `multiple`."""
        unit = self.shares * multiple
        return -(-count // unit) * unit

    def counts(self, padded: int) -> tuple[int, ...]:
        """Return the number of elements that each rank of the host owns, of a tensor of `padded` elements."""
        return tuple(padded // self.shares if place < self.shares else 0 for place in range(len(self.own)))
