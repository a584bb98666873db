"""Staging by the ranks of a job: one of each host does it, and the hosts pass blocks on."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from multiring.data.caching.storage import CachedStorage
from multiring.data.peers.owners import Owners
from multiring.data.peers.serving import BlockServer, Peer, Tell
from multiring.data.peers.staging import Exchange
from multiring.data.peers.words import Request
from multiring.runtime import Group, local_rank
from multiring.runtime.bootstrap.addresses import TcpAddress, own_address, parse_address
from multiring.settings import Settings

_ADDRESS_BYTES = 128


@contextmanager
def exchange_of(
    group: Group, storage: CachedStorage | None, tell: Tell, weights: Sequence[float] | None = None
) -> Iterator[Exchange | None]:
    """Give each host's first rank its part in an exchange, the others None; every rank of `group` calls it.

    The port is open until all ranks are done: until then one host may need another's blocks. Its secret is drawn for
    this exchange, by rank 0, and told by the job's own connections.

    Args:
        group: the ranks.
        storage: the pack, with the host's cache; None on a host that takes no part.
        tell: is told of peers that fail.
        weights: the hosts' shares, in the order of their ranks; alike by default.
    """
    secret = np.frombuffer(secrets.token_bytes(32), np.uint8).copy()
    group.broadcast(secret, 0)
    acts = storage is not None and local_rank() == 0
    parts: list[Exchange] = []
    server = None

    def give(request: Request) -> bytes:
        return parts[0].give(request)  # once there is one: nobody knows the port before

    if acts:
        settings = Settings.from_environment()
        host = own_address(settings.interface) if group.size > 1 else "127.0.0.1"
        server = BlockServer(secret.tobytes(), host, give, tell)
    peers: list[Peer | None] = []
    try:
        addresses = _told(group, str(server.address) if server else "")
        peers = [
            None if server and each == server.address else Peer(each, secret.tobytes(), tell) for each in addresses
        ]
        if server and storage is not None:
            here = addresses.index(server.address)
            owners = Owners([1.0] * len(addresses) if weights is None else weights)
            exchange = Exchange(storage, owners, here, peers, tell)
            storage.fetch_by(exchange.fetch)
            parts.append(exchange)
        group.barrier()
        yield parts[0] if parts else None
        group.barrier()
    finally:
        for each in peers:
            if each is not None:
                each.close()
        if server:
            server.close()


def _told(group: Group, address: str) -> list[TcpAddress]:
    """Return the addresses of all hosts' servers."""
    row = np.zeros((1, _ADDRESS_BYTES), np.uint8)
    row[0, : len(address)] = np.frombuffer(address.encode(), np.uint8)
    rows = np.asarray(group.all_gather(row))
    texts = [bytes(each).rstrip(b"\0").decode() for each in rows]
    found = [parse_address(each) for each in texts if each]
    return [each for each in found if isinstance(each, TcpAddress)]
