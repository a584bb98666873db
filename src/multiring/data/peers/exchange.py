"""Bring a pack to hosts: each block's owner fetches it from the source and serves it to the other hosts."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from multiring._forks import begun_in_forks
from multiring.data.caching.storage import CachedStorage
from multiring.data.peers.block_client import BlockClient, Tell
from multiring.data.peers.block_server import CONNECTIONS
from multiring.data.peers.owners import Owners
from multiring.data.peers.words import BlockRequest
from multiring.data.readers.manifest import xxh3
from multiring.errors import DataError

Progress = Callable[[int, int], None]  # called with the bytes that this host has, and their total

_FETCHING = 4  # threads that stage the host's own blocks
_FEWEST, _MOST = 2, 16  # limits for the concurrent requests of a host to its source
_CROWDED = 1.5  # if requests take this many times the shortest time, more concurrent requests gain nothing
# Limits for the number of blocks for which a host waits at its peers at a time. With a lower limit, all requests could
# be for late blocks while other blocks are ready.
_FEWEST_ASKED, _MOST_ASKED = 8, 32
_RECEIVING = 4  # blocks that a host receives at a time; more would flood its link if it is slower than the peers' links


@dataclass(slots=True)
class ReceivedBytes:
    """The bytes that this host has received, by their origin."""

    source: int = 0
    peers: int = 0


class Gate:
    """Limits the concurrent requests of a host to its source.

    The limit rises while the requests do not slow each other. If blocks arrive one after the other, the host can pass
    one on while it fetches the next. If the host requested all blocks at once, all would arrive only at the end.
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._free = self.width = _FEWEST
        self._least_s = float("inf")
        self._taken: list[float] = []

    def __enter__(self) -> None:
        with self._turn:
            while self._free <= 0:
                self._turn.wait()
            self._free -= 1

    def __exit__(self, *_: object) -> None:
        with self._turn:
            self._free += 1
            self._turn.notify()

    def took(self, seconds: float) -> None:
        """Record the time of a request, and adapt the limit."""
        with self._turn:
            self._least_s = min(self._least_s, seconds)
            self._taken.append(seconds)
            if len(self._taken) < 2 * self.width:
                return
            mean = sum(self._taken) / len(self._taken)
            self._taken.clear()
            change = 1 if mean < _CROWDED * self._least_s else -1
            changed = min(_MOST, max(_FEWEST, self.width + change))
            self._free += changed - self.width
            self.width = changed
            self._turn.notify_all()


class Exchange:
    """One host's part in an exchange of blocks.

    The host fetches the blocks that it owns from the source. It requests the other blocks from their owners.

    Args:
        storage: the pack's storage, with this host's cache.
        owners: the owners of the blocks.
        here: this host's number.
        peers: the peer of each host; None for this host.
        tell: called with a warning about a damaged block.
    """

    def __init__(
        self, storage: CachedStorage, owners: Owners, here: int, peers: Sequence[BlockClient | None], tell: Tell
    ) -> None:
        self.storage, self._owners, self._here, self._peers = storage, owners, here, peers
        self._tell = tell
        self.traffic = ReceivedBytes()
        self._lock = threading.Lock()
        self._gate, self._receiving = Gate(), threading.Semaphore(_RECEIVING)
        self.server: BlockClient | None = None  # this host's own server, for its other processes
        begun_in_forks(self)

    def __getstate__(self) -> dict[str, Any]:
        # A worker process requests its host's own blocks from the host's serving process, as other hosts do.
        peers = [self.server if each is None else each for each in self._peers]
        return {"storage": self.storage, "_owners": self._owners, "_here": -1, "_peers": peers, "_tell": self._tell}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self.traffic, self._lock, self._gate, self.server = ReceivedBytes(), threading.Lock(), Gate(), None
        self._receiving = threading.Semaphore(_RECEIVING)
        begun_in_forks(self)

    def begin_in_fork(self) -> None:
        """Go on as in any other worker process."""
        self.__setstate__(self.__getstate__())

    def fetch(self, shard: int, block: int) -> bytes:
        """Return a block's bytes from its owner.

        The bytes come from the source if this host owns the block or the owner fails.
        """
        peer = self._peers[self.owner(shard, block)]
        data = None if peer is None else peer.block(BlockRequest(self.storage.key, shard, block))
        if data is not None and xxh3(data) != self.storage.wanted(shard, block):
            self._tell(
                f"data peer {peer and peer.address} sent block {block} of shard {shard} damaged; it is read from the "
                "source"
            )
            data = None
        if data is not None:
            with self._lock:
                self.traffic.peers += len(data)
            return data
        with self._gate:
            began = time.monotonic()
            data = self.storage.fetched(shard, block)
            self._gate.took(time.monotonic() - began)
        with self._lock:
            self.traffic.source += len(data)
        return data

    def owner(self, shard: int, block: int) -> int:
        """Return the host that owns a block."""
        return self._owners.owner(self.storage.number(shard, block))

    def owns(self, shard: int, block: int) -> bool:
        """Return whether this host owns a block."""
        return self.owner(shard, block) == self._here

    def give(self, request: BlockRequest) -> bytes:
        """Return the verified bytes for a peer's request.

        Raises:
            DataError: the request is for another pack or for a missing block, or this host cannot read the block.
        """
        if request.pack != self.storage.key:
            raise DataError(f"this host stages pack {self.storage.key}, not {request.pack}")
        self.storage.wanted(request.shard, request.block)
        if request.piece is None:
            found = self.storage.block(request.shard, request.block)
            return b"" if request.waits_only else found
        begin, end = request.piece
        if not self.storage.may_keep(request.shard, request.block, end - begin):
            return b""
        return self.storage.block(request.shard, request.block, end - begin)[begin:end]

    def fetch_piece(self, shard: int, block: int, begin: int, out: memoryview) -> bool:
        """Fill `out` with a piece of a block from its owner.

        Returns:
            Whether `out` was filled; False if this host owns the block, or if the owner fails or does not keep the
            block.
        """
        peer = self._peers[self.owner(shard, block)]
        request = BlockRequest(self.storage.key, shard, block, (begin, begin + len(out)))
        data = None if peer is None else peer.block(request)
        if data is None or len(data) != len(out):
            return False
        out[:] = data
        with self._lock:
            self.traffic.peers += len(data)
        return True

    def stage(self, progress: Progress, *, own_only: bool = False) -> None:
        """Bring every block to this host.

        Its own blocks and those of other hosts are staged at the same time.

        Args:
            progress: called with the bytes that this host has, and their total.
            own_only: whether to bring only this host's own blocks. The caches of all hosts together then hold the pack.

        Raises:
            DataError: a block cannot be read.
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
            for queue, count in ((own, _FETCHING), (others, self._asking()))
            for _ in range(count)
        ]
        for each in threads:
            each.start()
        for each in threads:
            while each.is_alive():
                each.join(0.5)  # short waits let Ctrl-C interrupt
        if state.errors:
            raise state.errors[0]

    def _bytes(self, place: tuple[int, int]) -> int:
        shard, block = place
        return len(range(self.storage.begin_of(block), self.storage.end_of(shard, block)))

    def _asking(self) -> int:
        """Return the number of blocks that this host requests from peers at a time.

        The limit exists because all hosts may wait at one host, which accepts only `CONNECTIONS` connections.
        """
        return max(_FEWEST_ASKED, min(_MOST_ASKED, CONNECTIONS // len(self._peers)))

    def _bring(self, shard: int, block: int) -> None:
        """Bring a block to this host.

        If another host owns it, wait until that host has it, and then request it.
        """
        peer = self._peers[self.owner(shard, block)]
        if peer is None or self.storage.is_here(shard, block):
            self.storage.block(shard, block)
            return
        peer.block(BlockRequest(self.storage.key, shard, block, waits_only=True))  # the peer reports a failure
        with self._receiving:
            self.storage.block(shard, block)

    def _work(self, queue: "deque[tuple[int, int]]", state: "_State") -> None:
        try:
            while not state.errors:
                try:
                    shard, block = queue.popleft()
                except IndexError:
                    return
                self._bring(shard, block)
                state.done(self._bytes((shard, block)))
        except Exception as error:  # noqa: BLE001 -- raised again by `stage`
            state.errors.append(error)


class _State:
    """The progress of staging, and the errors of its threads."""

    def __init__(self, *, total: int, progress: Progress) -> None:
        self._total, self._progress = total, progress
        self._done = 0
        self._lock = threading.Lock()
        self.errors: list[Exception] = []

    def done(self, size: int) -> None:
        with self._lock:
            self._done += size
            self._progress(self._done, self._total)
