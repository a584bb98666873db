"""Exchange blocks between the hosts of a job, while they stage a pack and while they train."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from multiring._runtime import Group, local_rank, world
from multiring._runtime.bootstrap.addresses import TcpAddress, own_address, parse_address
from multiring._runtime.job.job import is_rank
from multiring._settings import Settings
from multiring.data.caching.storage import CachedStorage
from multiring.data.peers.block_client import BlockClient, Tell
from multiring.data.peers.block_server import BlockServer
from multiring.data.peers.exchange import Exchange
from multiring.data.peers.owners import Owners
from multiring.data.peers.words import BlockRequest
from multiring.data.peers.yielding import Yielding
from multiring.data.readers.limits import Limits, require_size
from multiring.data.readers.manifest import BLOCKS, INDEX, MANIFEST
from multiring.data.readers.storage import Storage, read
from multiring.errors import DataError

_ADDRESS_BYTES = 128
_PROBLEM_BYTES = 1000


class Sharing:
    """This process's part in an exchange of a pack's blocks between a job's hosts.

    Every rank of `group` must make this object. The first rank of each host serves blocks. Rank 0 draws a secret for
    this exchange, and sends it to the other ranks over the job's own connections.

    Args:
        group: the ranks that take part.
        storage: the pack's storage, with the host's cache; None on a host that takes no part.
        tell: called with a warning about a failed peer.
        weights: the hosts' shares of the blocks, in the order of their first ranks; by default equal.
        first_only: whether only the first rank of each host takes part.
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
        seals = group.calls.services.seals
        self.part: Exchange | None = None
        self._server: BlockServer | None = None
        host = next(each for each in group.topology.hosts if group.rank in each)
        serves = storage is not None and (local_rank() == 0 if first_only else host[0] == group.rank)
        if serves:
            context = group.calls.services.context
            wait = None if first_only else Yielding(lambda: sum(each[3] for each in context.rails())).wait
            settings = Settings.from_environment()
            own = own_address(settings.interface) if group.size > 1 else "127.0.0.1"
            self._server = BlockServer(secret, own, self._give, tell, wait, seals=seals)
        told = _told(group, str(self._server.address) if self._server else "")
        addresses = [each for each in told if each is not None]
        self._peers: list[BlockClient | None] = [BlockClient(each, secret, tell, seals=seals) for each in addresses]
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

    def _give(self, request: BlockRequest) -> bytes:
        if self.part is None:
            raise DataError("this host has no part in the exchange yet")
        return self.part.give(request)

    @property
    def is_over(self) -> bool:
        """Return whether this process has left the job of this exchange.

        The other processes have then left the job too, and have closed their ports.
        """
        return not is_rank() or world() is not self._world

    def keep_own(self) -> None:
        """Keep only this host's own blocks on its disk.

        The caches of all hosts together then hold the pack.
        """
        if self.part is not None:
            storage = self.part.storage
            storage.keep_only(np.array([self.part.owns(*each) for each in storage.each_block()], dtype=np.bool_))

    def close(self) -> None:
        """Close the port and the connections to other hosts."""
        for each in self._peers:
            if each is not None:
                each.close()
        if self._server is not None:
            self._server.close()


@contextmanager
def exchange_of(
    group: Group, storage: CachedStorage | None, tell: Tell, weights: Sequence[float] | None = None
) -> Iterator[Exchange | None]:
    """Yield a host's part in an exchange to its first rank, and None to other ranks.

    Every rank of `group` must call this. The port stays open until all ranks have left the `with` block, because
    another host may need blocks until then.

    Args:
        group: the ranks that take part.
        storage: the pack's storage, with the host's cache; None on a host that takes no part.
        tell: called with a warning about a failed peer.
        weights: the hosts' shares of the blocks, in the order of their ranks; by default equal.
    """
    sharing = Sharing(group, storage, tell, weights)
    try:
        yield sharing.part
        group.barrier()
    finally:
        sharing.close()


class Known:
    """A storage with the bytes of some files in memory.

    Args:
        storage: the storage of all other files.
        files: the bytes of the files in memory, by name.
    """

    def __init__(self, storage: Storage, files: dict[str, bytes]) -> None:
        self.url = storage.url
        self._storage, self._files = storage, files

    def names(self) -> list[str]:
        """Return the names of all files, sorted."""
        return self._storage.names()

    def size(self, name: str) -> int:
        """Return a file's size in bytes."""
        known = self._files.get(name)
        return self._storage.size(name) if known is None else len(known)

    def read_into(self, name: str, begin: int, out: memoryview) -> None:
        """Fill `out` with a file's bytes from `begin` on."""
        known = self._files.get(name)
        if known is None:
            self._storage.read_into(name, begin, out)
            return
        if begin + len(out) > len(known):
            raise DataError(f"{self.url}: {name} has {len(known)} bytes; {begin + len(out)} are needed")
        out[:] = known[begin : begin + len(out)]


def told_once(group: Group, storage: Storage, root: int = 0) -> Known:
    """Return a storage that reads the manifest, index and check sums on rank `root` only.

    Every rank must call this; rank `root` sends the files to the others.

    Raises:
        DataError: rank `root` cannot read the files; every rank raises this error.
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
    """Return the address of each rank's server; None for a rank without a server."""
    row = np.zeros((1, _ADDRESS_BYTES), np.uint8)
    row[0, : len(address)] = np.frombuffer(address.encode(), np.uint8)
    texts = [bytes(each).rstrip(b"\0").decode() for each in np.asarray(group.all_gather(row))]
    found = [parse_address(each) if each else None for each in texts]
    return [each if isinstance(each, TcpAddress) else None for each in found]
