"""Bringing a pack to hosts: each block is fetched from the source by the host that owns it, and passed on."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from multiring.data.caching.storage import CachedStorage
from multiring.data.packing.manifest import xxh3
from multiring.data.peers.owners import Owners
from multiring.data.peers.serving import Peer, Tell
from multiring.data.peers.words import Request
from multiring.errors import DataError

Progress = Callable[[int, int], None]  # bytes that are here, of how many

_FETCHING = 4  # at a time, from the source
_ASKING = 8  # and of peers


@dataclass(slots=True)
class Traffic:
    """Bytes, by where this host had them from."""

    source: int = 0
    peers: int = 0


class Exchange:
    """A host's part in it: it owns some blocks, which it fetches; the others it asks their owners for.

    Args:
        storage: the pack, with this host's cache.
        owners: who owns what.
        here: this host.
        peers: by host; None for this one.
        tell: is told of damaged blocks.
    """

    def __init__(
        self, storage: CachedStorage, owners: Owners, here: int, peers: Sequence[Peer | None], tell: Tell
    ) -> None:
        self.storage, self._owners, self._here, self._peers = storage, owners, here, peers
        self._tell = tell
        self.traffic = Traffic()
        self._lock = threading.Lock()

    def fetch(self, shard: int, block: int) -> bytes:
        """Return a block's bytes: its owner's, or the source's where this host owns it or its owner fails."""
        peer = self._peers[self.owner(shard, block)]
        data = None if peer is None else peer.block(Request(self.storage.key, shard, block))
        if data is not None and xxh3(data) != self.storage.wanted(shard, block):
            self._tell(
                f"data peer {peer and peer.address} gave block {block} of shard {shard} damaged; the source has it"
            )
            data = None
        if data is not None:
            with self._lock:
                self.traffic.peers += len(data)
            return data
        data = self.storage.fetched(shard, block)
        with self._lock:
            self.traffic.source += len(data)
        return data

    def owner(self, shard: int, block: int) -> int:
        """Return the host that owns a block."""
        return self._owners.owner(self.storage.number(shard, block))

    def give(self, request: Request) -> bytes:
        """Return what a peer asks for, verified.

        Raises:
            DataError: it is of another pack, there is no such block, or this host cannot have it.
        """
        if request.pack != self.storage.key:
            raise DataError(f"this host stages pack {self.storage.key}, not {request.pack}")
        self.storage.wanted(request.shard, request.block)
        return self.storage.block(request.shard, request.block)

    def stage(self, progress: Progress, *, own_only: bool = False) -> None:
        """Bring every block here; those that this host owns first, as others wait for them.

        Args:
            progress: is told how many bytes are here.
            own_only: whether only the blocks that this host owns are brought, so that the hosts' caches hold the pack
                together.

        Raises:
            DataError: a block cannot be had.
        """
        own, others = deque[tuple[int, int]](), deque[tuple[int, int]]()
        for shard, block in self.storage.each_block():
            (own if self.owner(shard, block) == self._here else others).append((shard, block))
        if own_only:
            others.clear()
        total = sum(self._bytes(each) for each in (*own, *others))
        state = _State(total=total, progress=progress)
        threads = [
            threading.Thread(target=self._work, args=(queue, state), daemon=True, name="multiring-stage")
            for queue, count in ((own, _FETCHING), (others, _ASKING))
            for _ in range(count)
        ]
        for each in threads:
            each.start()
        for each in threads:
            while each.is_alive():
                each.join(0.5)  # in pieces: so Ctrl-C is served
        if state.errors:
            raise state.errors[0]

    def _bytes(self, place: tuple[int, int]) -> int:
        shard, block = place
        return len(range(self.storage.begin_of(block), self.storage.end_of(shard, block)))

    def _work(self, queue: "deque[tuple[int, int]]", state: "_State") -> None:
        try:
            while not state.errors:
                try:
                    shard, block = queue.popleft()
                except IndexError:
                    return
                self.storage.block(shard, block)
                state.done(self._bytes((shard, block)))
        except Exception as error:  # noqa: BLE001 -- raised by who staged
            state.errors.append(error)


class _State:
    """How far staging is."""

    def __init__(self, *, total: int, progress: Progress) -> None:
        self._total, self._progress = total, progress
        self._done = 0
        self._lock = threading.Lock()
        self.errors: list[Exception] = []

    def done(self, size: int) -> None:
        with self._lock:
            self._done += size
            self._progress(self._done, self._total)
