"""A storage whose files come through a cache of blocks."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.data.caching.blocks import BlockCache
from multiring.data.caching.keeping import Keeping
from multiring.data.eviction import Uses
from multiring.data.packing.manifest import BLOCK_BYTES, BLOCKS, INDEX, MANIFEST, Manifest, load_blocks, load_manifest
from multiring.data.readers.limits import Limits
from multiring.data.readers.storage import Storage, read
from multiring.errors import ArgumentError, DataError
from multiring.settings import Settings

FetchBlock = Callable[[int, int], bytes]  # shard and block to its bytes
# Shard, block, where in that, and what is to be filled: whether it was.
FetchPiece = Callable[[int, int, int, memoryview], bool]


class CachedStorage:
    """A pack's files, its shards by blocks that are verified, kept in a cache where there is room.

    Where the cache is full, and a record needs less than a block, only the record's bytes are read: nothing is read
    twice for what cannot be kept. Those bytes are no whole block, so that no check sum is of them.

    Above the cache are blocks in memory, as far as `memory_bytes` allow. Once it is known what comes next (`expect`),
    both keep what is needed soonest; until then what is on the disk stays there, and memory has what was used last.

    Args:
        source: where the pack is.
        cache: of the host.
        fetch: gives a block; by default the source does.
        memory_bytes: of blocks that this process keeps in memory; MULTIRING_DATA_MEMORY says by default.

    Raises:
        ArgumentError: the cache's quota is smaller than a block.
        DataError: it is no pack, or damaged.
    """

    def __init__(
        self, source: Storage, cache: BlockCache, fetch: FetchBlock | None = None, memory_bytes: int | None = None
    ) -> None:
        limits = Limits()
        if cache.quota_bytes < 2 * BLOCK_BYTES:
            raise ArgumentError(
                f"a cache of {cache.quota_bytes} bytes holds no block of {BLOCK_BYTES}; want 2 at least"
            )
        self.url = source.url
        self.source, self.cache = source, cache
        self.manifest: Manifest = load_manifest(source, limits)
        self.key = self.manifest.digest
        self._blocks = load_blocks(source, self.manifest, limits)
        self._shards = {each.name: number for number, each in enumerate(self.manifest.shards)}
        self._firsts = [0]
        for each in self.manifest.shards:
            self._firsts.append(self._firsts[-1] + each.blocks)
        self._fetch = fetch or self.fetched
        self._fetch_piece: FetchPiece | None = None
        self.direct_bytes = 0  # read past the cache
        self._memory_bytes = Settings.from_environment().data_memory if memory_bytes is None else memory_bytes
        self.owned: NDArray[np.bool_] | None = None  # of the blocks, where other hosts keep the others
        self.keeping = self._kept()

    def _kept(self) -> Keeping:
        sizes = [self.end_of(shard, block) - block * BLOCK_BYTES for shard, block in self.each_block()]
        made = Keeping(self.cache, self.key, sizes, self._memory_bytes)
        if self.owned is not None:
            made.only(self.owned)
        return made

    def keep_only(self, owned: NDArray[np.bool_]) -> None:
        """Keep on the disk those blocks alone, bool (blocks,): other hosts keep the others."""
        self.owned = owned
        self.keeping.only(owned)

    def keep_alone(self) -> None:
        """Have blocks from the source, and keep any of them: no other host does so for this one from now on."""
        self.owned = None
        self.keeping = self._kept()
        self.fetch_by(self.fetched)

    def __getstate__(self) -> dict[str, Any]:
        # Another process has its own memory, and says itself what it needs.
        return {name: value for name, value in self.__dict__.items() if name != "keeping"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self.keeping = self._kept()

    @property
    def firsts(self) -> list[int]:
        """Return the number of each shard's first block, and of the blocks behind the last."""
        return self._firsts

    def expect(self, uses: Uses) -> None:
        """Keep what `uses` needs soonest, from here on."""
        self.keeping.expect(uses)

    @property
    def blocks(self) -> int:
        """Return how many blocks the pack has."""
        return self._firsts[-1]

    def names(self) -> list[str]:
        """Return the pack's files."""
        return sorted([MANIFEST, INDEX, BLOCKS, *self._shards])

    def size(self, name: str) -> int:
        """Return a file's bytes, a shard's as the manifest says."""
        shard = self._shards.get(name)
        return self.source.size(name) if shard is None else self.manifest.shards[shard].size_bytes

    def read_into(self, name: str, begin: int, out: memoryview) -> None:
        """Fill `out` with a file's bytes, block by block."""
        shard = self._shards.get(name)
        if shard is None:
            self.source.read_into(name, begin, out)
            return
        end = begin + len(out)
        if end > self.manifest.shards[shard].size_bytes:
            raise DataError(f"{self.url}: {name} has {self.manifest.shards[shard].size_bytes} bytes; {end} are wanted")
        for block in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            first, last = max(begin, block * BLOCK_BYTES), min(end, self.end_of(shard, block))
            piece = out[first - begin : last - begin]
            if self._is_partial(shard, block, first, last) and not self.may_keep(shard, block, last - first):
                self._read_piece(shard, block, first, piece)
                continue
            data = self.block(shard, block, last - first)
            piece[:] = memoryview(data)[first - block * BLOCK_BYTES : last - block * BLOCK_BYTES]

    def _is_partial(self, shard: int, block: int, first: int, last: int) -> bool:
        return last - first < self.end_of(shard, block) - block * BLOCK_BYTES

    def may_keep(self, shard: int, block: int, used: int) -> bool:
        """Return whether a block is here, or would be kept where `used` of its bytes are used now."""
        number = self._firsts[shard] + block
        return self.is_here(shard, block) or self.keeping.takes(number, self._paid(shard, block, used))

    def is_here(self, shard: int, block: int) -> bool:
        """Return whether this host keeps a block."""
        number = self._firsts[shard] + block
        return self.keeping.in_memory(number) is not None or self.cache.holds(self.key, number)

    def _paid(self, shard: int, block: int, used: int) -> int:
        """Return after how many more uses like this one a block was worth fetching as a whole."""
        return -(-(self.end_of(shard, block) - block * BLOCK_BYTES) // max(1, used)) - 1

    def _read_piece(self, shard: int, block: int, first: int, piece: memoryview) -> None:
        if self._fetch_piece is not None and self._fetch_piece(shard, block, first - block * BLOCK_BYTES, piece):
            return
        self.source.read_into(self.manifest.shards[shard].name, first, piece)
        self.direct_bytes += len(piece)

    def end_of(self, shard: int, block: int) -> int:
        """Return where in its shard a block ends."""
        return min((block + 1) * BLOCK_BYTES, self.manifest.shards[shard].size_bytes)

    @staticmethod
    def begin_of(block: int) -> int:
        """Return where in its shard a block begins."""
        return block * BLOCK_BYTES

    def number(self, shard: int, block: int) -> int:
        """Return a block's number in the pack."""
        return self._firsts[shard] + block

    def fetch_by(self, fetch: FetchBlock, piece: "FetchPiece | None" = None) -> None:
        """Have blocks that are not here from somewhere else than the source, and pieces of those not worth keeping."""
        self._fetch, self._fetch_piece = fetch, piece

    def count_fetches(self, request: Callable[[], AbstractContextManager[None]]) -> None:
        """Enter `request` while a block, or a piece of one, is fetched as `fetch_by` was told: to count its time."""
        fetch, fetch_piece = self._fetch, self._fetch_piece

        def counted(shard: int, block: int) -> bytes:
            with request():
                return fetch(shard, block)

        def counted_piece(shard: int, block: int, begin: int, piece: memoryview) -> bool:
            with request():
                return fetch_piece is not None and fetch_piece(shard, block, begin, piece)

        self.fetch_by(counted, None if fetch_piece is None else counted_piece)

    def block(self, shard: int, block: int, used: int = BLOCK_BYTES) -> bytes:
        """Return a block, verified.

        Args:
            shard: its shard.
            block: which of that.
            used: how many of its bytes are used.

        Raises:
            DataError: the source has it damaged.
        """
        number = self._firsts[shard] + block
        found = self.keeping.in_memory(number)
        if found is not None:
            self.cache.counts.hits += 1
            return found
        paid = self._paid(shard, block, used)

        def keep(data: bytes, is_there: bool) -> None:  # noqa: FBT001 -- the cache's signature
            self.keeping.keep(number, data, on_disk=is_there, paid=0 if is_there else paid)

        return self.cache.get(self.key, number, lambda: self._fetch(shard, block), int(self._blocks[number]), keep)

    def fetched(self, shard: int, block: int) -> bytes:
        """Return a block's bytes from the source, as they come."""
        return read(self.source, self.manifest.shards[shard].name, block * BLOCK_BYTES, self.end_of(shard, block))

    def wanted(self, shard: int, block: int) -> int:
        """Return a block's xxh3.

        Raises:
            DataError: there is no such block.
        """
        if not 0 <= shard < len(self.manifest.shards) or not 0 <= block < self.manifest.shards[shard].blocks:
            raise DataError(f"block {block} of shard {shard}: there is none")
        return int(self._blocks[self._firsts[shard] + block])

    def each_block(self) -> Any:
        """Yield every block, as (shard, block), in the order of the shards."""
        for shard, entry in enumerate(self.manifest.shards):
            for block in range(entry.blocks):
                yield shard, block
