"""Whether the addresses that ranks tell each other can lead from one host to another, and words for them."""

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from multiring.errors import RendezvousError
from multiring.runtime.rails.select import RailEndpoint

_NAMED = 8  # more are not listed
_REMEDY = "set MULTIRING_INTERFACE to an interface, or an address, by which the hosts reach each other"


def refuse_shared_addresses(peer_infos: Sequence[Mapping[str, Any]], rails: Sequence[Sequence[RailEndpoint]]) -> None:
    """Raise RendezvousError where two hosts have told one address, or one that leads nowhere else.

    A bridge of containers, docker0, has the same address on every host, and a host's name may lead to it.

    Args:
        peer_infos: by rank; "network" is its `network_id`.
        rails: by rank, where it listens.
    """
    first: dict[str, int] = {}
    networks = [peer_info["network"] for peer_info in peer_infos]
    if len(set(networks)) < 2:  # then every address leads to whom it names
        return
    for rank, endpoints in enumerate(rails):
        for endpoint in endpoints:
            if ipaddress.ip_address(endpoint.address).is_loopback:
                raise RendezvousError(
                    f"rank {rank} listens at {endpoint.address}, which leads nowhere from another host; {_REMEDY}"
                )
            other = first.setdefault(endpoint.address, rank)
            if networks[other] != networks[rank]:
                raise RendezvousError(
                    f"ranks {other} and {rank} are on different hosts, and both listen at {endpoint.address}: of such "
                    f"an address, as docker0 has, one host never reaches the other; {_REMEDY}"
                )


def places_text(peers: Sequence[tuple[int, bool, str, list[tuple[str, int]], str]]) -> str:
    """Return where the ranks of other hosts listen, as the native core is told it; "" where there are none."""
    told = [
        f"rank {rank} at {', '.join(f'{address}:{port}' for address, port in ends)}"
        for rank, is_local, _, ends, _ in peers
        if not is_local and ends
    ]
    if not told:
        return ""
    more = f" and {len(told) - _NAMED} more" if len(told) > _NAMED else ""
    return f" ({'; '.join(told[:_NAMED])}{more}; where these addresses lead elsewhere, {_REMEDY})"
