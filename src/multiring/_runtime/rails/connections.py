"""The number of connections that carry one rail between two ranks, each with a thread of its own."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from multiring._settings import Settings
from multiring._topology import Topology
from multiring.errors import LaunchError

# What one thread sends and receives over sockets at the same time (docs/decisions/0162-connections.md).
ONE_THREAD_BYTES_PER_S: Final = 1.8e9
MOST_CHOSEN: Final = 4  # 8 were slower (benchmarks/results/fast_link_16core_202611.md)


def connection_wish(settings: Settings, known: Topology | None, cores: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return what this rank tells the others about its connections.

    Args:
        settings: this rank's settings.
        known: the topology file's contents, whose rates `multiring probe` has measured; None without a file.
        cores: for each rank of this host, the processor cores that it may use.
    """
    # Every rank keeps a core for the program itself.
    free = len({core for each in cores for core in each}) // max(1, len(cores)) - 1
    most = max(1, min(free, MOST_CHOSEN))
    rate = 0.0 if known is None else known.rails[0].bandwidth_bytes_per_s
    needed = max(1, min(most, math.ceil(rate / ONE_THREAD_BYTES_PER_S)))
    return {"asked": settings.connections, "most": most, "needed": needed, "engine": settings.engine}


def agreed_connections(wishes: Sequence[Mapping[str, Any]], rails: int) -> int:
    """Return the number of connections of a rail, the same on all ranks.

    It is what MULTIRING_CONNECTIONS asks for, else the least of what the ranks need. Several rails, and MPI, use one.

    Args:
        wishes: every rank's result of `connection_wish`.
        rails: the number of rails of every rank.

    Raises:
        LaunchError: the ranks ask for different numbers, or for several connections where there can be only one.
    """
    ranks_by_number: dict[int | None, list[int]] = defaultdict(list)
    for rank, wish in enumerate(wishes):
        ranks_by_number[wish["asked"]].append(rank)
    if len(ranks_by_number) > 1:
        told = "; ".join(
            f"{'not set' if asked is None else asked} on ranks {ranks}" for asked, ranks in ranks_by_number.items()
        )
        raise LaunchError(f"MULTIRING_CONNECTIONS must be the same on all ranks, but it is {told}")
    (asked,) = ranks_by_number
    mpi = any(wish["engine"] == "mpi" for wish in wishes)
    if rails > 1 or mpi:
        if asked is not None and asked > 1:
            why = "the engine is mpi, which makes its own" if mpi else f"there are {rails} rails, which have one each"
            raise LaunchError(f"MULTIRING_CONNECTIONS={asked}, but {why}; want 1, or leave it unset")
        return 1
    if asked is None:
        return min(int(wish["needed"]) for wish in wishes)
    return asked if asked > 0 else min(int(wish["most"]) for wish in wishes)
