"""Check whether hosts can reach the ranks' addresses, and describe them."""

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from multiring._runtime.rails.select import RailEndpoint
from multiring.errors import RendezvousError

_NAMED = 8  # the most ranks that a message lists
_REMEDY = "set MULTIRING_INTERFACE to an interface, or an address, by which the hosts reach each other"


def refuse_shared_addresses(peer_infos: Sequence[Mapping[str, Any]], rails: Sequence[Sequence[RailEndpoint]]) -> None:
    """Raise RendezvousError if two hosts share an address, or use a loopback address.

    For example, the container bridge docker0 has the same address on every host, and a host's name may resolve to it.

    Args:
        peer_infos: by rank; the item "network" is the rank's `network_id`.
        rails: by rank, the endpoints at which it listens.
    """
    first: dict[str, int] = {}
    networks = [peer_info["network"] for peer_info in peer_infos]
    if len(set(networks)) < 2:  # within one network namespace every address is valid
        return
    for rank, endpoints in enumerate(rails):
        for endpoint in endpoints:
            if ipaddress.ip_address(endpoint.address).is_loopback:
                raise RendezvousError(
                    f"rank {rank} listens at {endpoint.address}, which other hosts cannot reach; {_REMEDY}"
                )
            other = first.setdefault(endpoint.address, rank)
            if networks[other] != networks[rank]:
                raise RendezvousError(
                    f"ranks {other} and {rank} are on different hosts, and both listen at {endpoint.address}: hosts "
                    f"with the same address, for example docker0's, cannot reach each other there; {_REMEDY}"
                )


def places_text(peers: Sequence[tuple[int, bool, str, list[tuple[str, int]], str]]) -> str:
    """Return a text with the addresses of the ranks on other hosts, or ""."""
    told = [
        f"rank {rank} at {', '.join(f'{address}:{port}' for address, port in ends)}"
        for rank, is_local, _, ends, _ in peers
        if not is_local and ends
    ]
    if not told:
        return ""
    more = f" and {len(told) - _NAMED} more" if len(told) > _NAMED else ""
    return f" ({'; '.join(told[:_NAMED])}{more}; if these addresses lead elsewhere, {_REMEDY})"
