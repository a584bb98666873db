"""Hosts of a job pass blocks on: while they stage, and while they train."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from multiring.data.caching.storage import CachedStorage
from multiring.data.packing.manifest import BLOCKS, INDEX, MANIFEST
from multiring.data.peers.owners import Owners
from multiring.data.peers.serving import BlockServer, Peer, Tell
from multiring.data.peers.staging import Exchange
from multiring.data.peers.words import Request
from multiring.data.peers.yielding import Yielding
from multiring.data.readers.limits import Limits, require_size
from multiring.data.readers.storage import Storage, read
from multiring.errors import DataError
from multiring.runtime import Group, local_rank, world
from multiring.runtime.bootstrap.addresses import TcpAddress, own_address, parse_address
from multiring.runtime.job.job import is_rank
from multiring.settings import Settings

_ADDRESS_BYTES = 128
_PROBLEM_BYTES = 1000


class Sharing:
    """This process's part in an exchange of a pack's blocks between a job's hosts; every rank of `group` makes it.

    One process of each host serves: its first rank. The port's secret is drawn for this exchange, by rank 0, and told
    by the job's own connections.

    Args:
        group: the ranks.
        storage: the pack, with the host's cache; None on a host that takes no part.
        tell: is told of peers that fail.
        weights: the hosts' shares, in the order of their first ranks; alike by default.
        first_only: whether the other ranks of a host take no part.
    """

    def __init__(
        self,
        group: Group,
        storage: CachedStorage | None,
        tell: Tell,
        weights: Sequence[float] | None = None,
        *,
        first_only: bool = True,
    ) -> None:
        self._world = world()
        key = np.frombuffer(secrets.token_bytes(32), np.uint8).copy()
        group.broadcast(key, 0)
        secret = key.tobytes()
        self.part: Exchange | None = None
        self._server: BlockServer | None = None
        host = next(each for each in group.topology.hosts if group.rank in each)
        serves = storage is not None and (local_rank() == 0 if first_only else host[0] == group.rank)
        if serves:
            context = group.calls.services.context
            wait = None if first_only else Yielding(lambda: sum(each[3] for each in context.rails())).wait
            settings = Settings.from_environment()
            own = own_address(settings.interface) if group.size > 1 else "127.0.0.1"
            self._server = BlockServer(secret, own, self._give, tell, wait)
        told = _told(group, str(self._server.address) if self._server else "")
        addresses = [each for each in told if each is not None]
        self._peers: list[Peer | None] = [Peer(each, secret, tell) for each in addresses]
        mine = told[group.rank if first_only else host[0]]
        if storage is not None and mine is not None and (serves or not first_only):
            here = addresses.index(mine)
            peers = list(self._peers)
            if serves:
                peers[here] = None
            owners = Owners([1.0] * len(addresses) if weights is None else weights)
            self.part = Exchange(storage, owners, here, peers, tell)
            self.part.server = self._peers[here]
            storage.fetch_by(self.part.fetch, self.part.fetch_piece)
        group.barrier()

    def _give(self, request: Request) -> bytes:
        if self.part is None:
            raise DataError("this host has no part in the exchange yet")
        return self.part.give(request)

    @property
    def is_over(self) -> bool:
        """Return whether this process is in another job by now, or in none: others have left it, and their ports."""
        return not is_rank() or world() is not self._world

    def keep_own(self) -> None:
        """Keep on this host's disk what it owns alone, so that the hosts' caches hold the pack together."""
        if self.part is not None:
            storage = self.part.storage
            storage.keep_only(np.array([self.part.owns(*each) for each in storage.each_block()], dtype=np.bool_))

    def close(self) -> None:
        """Close the port, and the connections to other hosts."""
        for each in self._peers:
            if each is not None:
                each.close()
        if self._server is not None:
            self._server.close()


@contextmanager
def exchange_of(
    group: Group, storage: CachedStorage | None, tell: Tell, weights: Sequence[float] | None = None
) -> Iterator[Exchange | None]:
    """Give each host's first rank its part in an exchange, the others None; every rank of `group` calls it.

    The port is open until all ranks are done: until then one host may need another's blocks.

    Args:
        group: the ranks.
        storage: the pack, with the host's cache; None on a host that takes no part.
        tell: is told of peers that fail.
        weights: the hosts' shares, in the order of their ranks; alike by default.
    """
    sharing = Sharing(group, storage, tell, weights)
    try:
        yield sharing.part
        group.barrier()
    finally:
        sharing.close()


class Known:
    """A storage some of whose files' bytes are known already.

    Args:
        storage: that has the others.
        files: their bytes, by name.
    """

    def __init__(self, storage: Storage, files: dict[str, bytes]) -> None:
        self.url = storage.url
        self._storage, self._files = storage, files

    def names(self) -> list[str]:
        """Return all files, sorted."""
        return self._storage.names()

    def size(self, name: str) -> int:
        """Return a file's bytes."""
        known = self._files.get(name)
        return self._storage.size(name) if known is None else len(known)

    def read_into(self, name: str, begin: int, out: memoryview) -> None:
        """Fill `out` with a file's bytes from `begin` on."""
        known = self._files.get(name)
        if known is None:
            self._storage.read_into(name, begin, out)
            return
        if begin + len(out) > len(known):
            raise DataError(f"{self.url}: {name} has {len(known)} bytes; {begin + len(out)} are wanted")
        out[:] = known[begin : begin + len(out)]


def told_once(group: Group, storage: Storage, root: int = 0) -> Known:
    """Return a storage whose manifest, index and check sums rank `root` alone has read; every rank calls it.

    Raises:
        DataError: rank `root` cannot read them, on every rank.
    """
    limits = Limits()
    files: dict[str, bytes] = {}
    problem = ""
    sizes = np.zeros(4, np.int64)
    if group.rank == root:
        try:
            for name in (MANIFEST, INDEX, BLOCKS):
                size = require_size(f"{storage.url}/{name}", storage.size(name), limits.index_bytes, "the limit")
                files[name] = read(storage, name, 0, size)
        except (DataError, OSError) as error:
            problem = str(error)[:_PROBLEM_BYTES]
        sizes[:] = [*(len(files.get(name, b"")) for name in (MANIFEST, INDEX, BLOCKS)), len(problem.encode())]
    group.broadcast(sizes, root)
    whole = np.zeros(int(sizes.sum()), np.uint8)
    if group.rank == root:
        whole[:] = np.frombuffer(b"".join([*files.values(), problem.encode()]), np.uint8)
    if len(whole):
        group.broadcast(whole, root)
    pieces = np.split(whole, np.cumsum(sizes)[:-1])
    if sizes[3]:
        raise DataError(f"rank {root} cannot read the pack: {pieces[3].tobytes().decode(errors='replace')}")
    return Known(storage, {name: each.tobytes() for name, each in zip((MANIFEST, INDEX, BLOCKS), pieces, strict=False)})


def _told(group: Group, address: str) -> list[TcpAddress | None]:
    """Return the addresses of the ranks' servers; None where a rank has none."""
    row = np.zeros((1, _ADDRESS_BYTES), np.uint8)
    row[0, : len(address)] = np.frombuffer(address.encode(), np.uint8)
    texts = [bytes(each).rstrip(b"\0").decode() for each in np.asarray(group.all_gather(row))]
    found = [parse_address(each) if each else None for each in texts]
    return [each if isinstance(each, TcpAddress) else None for each in found]
