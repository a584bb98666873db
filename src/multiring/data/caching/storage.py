"""A storage that reads a pack's files through a cache of blocks."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring._settings import Settings
from multiring.data.caching.blocks import BlockCache
from multiring.data.caching.keeping import Keeping
from multiring.data.eviction import Uses
from multiring.data.readers.limits import Limits
from multiring.data.readers.manifest import BLOCK_BYTES, BLOCKS, INDEX, MANIFEST, Manifest, load_blocks, load_manifest
from multiring.data.readers.storage import Storage, read
from multiring.errors import ArgumentError, DataError

FetchBlock = Callable[[int, int], bytes]  # called with a shard and a block; returns the block's bytes
# Called with a shard, a block, an offset in the block, and the memory to fill. It returns whether it filled the memory.
FetchPiece = Callable[[int, int, int, memoryview], bool]


class CachedStorage:
    """A pack's files; shards are read by verified blocks through a cache.

    A block is kept in the cache if there is room. If it cannot be kept, and a record needs only a part of it, only this
    part is read from the source. The part cannot be verified, because check sums cover whole blocks.

    Up to `memory_bytes` of blocks are also kept in memory. After a call of `expect`, disk and memory keep the blocks
    that are needed soonest. Before that call, blocks on the disk stay, and memory keeps the blocks that were used last.

    Args:
        source: the storage of the pack.
        cache: the host's cache.
        fetch: returns a block; by default it is read from `source`.
        memory_bytes: the bytes of blocks that this process keeps in memory; the default is MULTIRING_DATA_MEMORY.

    Raises:
        ArgumentError: the cache's quota is smaller than two blocks.
        DataError: the source is not a pack, or is damaged.
    """

    def __init__(
        self, source: Storage, cache: BlockCache, fetch: FetchBlock | None = None, memory_bytes: int | None = None
    ) -> None:
        limits = Limits()
        if cache.quota_bytes < 2 * BLOCK_BYTES:
            raise ArgumentError(
                f"a cache of {cache.quota_bytes} bytes is too small: want room for 2 blocks of {BLOCK_BYTES} bytes"
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
        self.direct_bytes = 0  # bytes that were read from the source without the cache
        self._memory_bytes = Settings.from_environment().data_memory if memory_bytes is None else memory_bytes
        self.owned: NDArray[np.bool_] | None = None  # the blocks that this host keeps; None for all
        self.keeping = self._kept()

    def _kept(self) -> Keeping:
        sizes = [self.end_of(shard, block) - block * BLOCK_BYTES for shard, block in self.each_block()]
        made = Keeping(self.cache, self.key, sizes, self._memory_bytes)
        if self.owned is not None:
            made.only(self.owned)
        return made

    def keep_only(self, owned: NDArray[np.bool_]) -> None:
        """Keep only the blocks `owned`, bool (blocks,), on the disk.

        Other hosts keep the other blocks.
        """
        self.owned = owned
        self.keeping.only(owned)

    def keep_alone(self) -> None:
        """Stop sharing: read all blocks from the source from now on, and keep any block."""
        self.owned = None
        self.keeping = self._kept()
        self.fetch_by(self.fetched)

    def __getstate__(self) -> dict[str, Any]:
        # Another process keeps blocks in its own memory, and publishes its own uses.
        return {name: value for name, value in self.__dict__.items() if name != "keeping"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self.keeping = self._kept()

    @property
    def firsts(self) -> list[int]:
        """Return the number of each shard's first block, and the number of all blocks."""
        return self._firsts

    def expect(self, uses: Uses) -> None:
        """From now on, keep the blocks that `uses` needs soonest."""
        self.keeping.expect(uses)

    @property
    def blocks(self) -> int:
        """Return the number of the pack's blocks."""
        return self._firsts[-1]

    def names(self) -> list[str]:
        """Return the names of the pack's files."""
        return sorted([MANIFEST, INDEX, BLOCKS, *self._shards])

    def size(self, name: str) -> int:
        """Return a file's size in bytes; a shard's size comes from the manifest."""
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
            raise DataError(f"{self.url}: {name} has {self.manifest.shards[shard].size_bytes} bytes; {end} are needed")
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
        """Return whether this host has a block, or would keep it.

        `used` is the number of the block's bytes that are used now.
        """
        number = self._firsts[shard] + block
        return self.is_here(shard, block) or self.keeping.takes(number, self._paid(shard, block, used))

    def is_here(self, shard: int, block: int) -> bool:
        """Return whether this host has a block in memory or on its disk."""
        number = self._firsts[shard] + block
        return self.keeping.in_memory(number) is not None or self.cache.holds(self.key, number)

    def _paid(self, shard: int, block: int, used: int) -> int:
        """Return the number of further uses of `used` bytes after which fetching the whole block has paid off."""
        return -(-(self.end_of(shard, block) - block * BLOCK_BYTES) // max(1, used)) - 1

    def _read_piece(self, shard: int, block: int, first: int, piece: memoryview) -> None:
        if self._fetch_piece is not None and self._fetch_piece(shard, block, first - block * BLOCK_BYTES, piece):
            return
        self.source.read_into(self.manifest.shards[shard].name, first, piece)
        self.direct_bytes += len(piece)

    def end_of(self, shard: int, block: int) -> int:
        """Return the offset of a block's end in its shard."""
        return min((block + 1) * BLOCK_BYTES, self.manifest.shards[shard].size_bytes)

    @staticmethod
    def begin_of(block: int) -> int:
        """Return the offset of a block in its shard."""
        return block * BLOCK_BYTES

    def number(self, shard: int, block: int) -> int:
        """Return a block's number in the pack."""
        return self._firsts[shard] + block

    def fetch_by(self, fetch: FetchBlock, piece: "FetchPiece | None" = None) -> None:
        """Fetch missing blocks by `fetch` instead of from the source.

        Pieces of blocks that are not worth keeping are fetched by `piece`; if `piece` is None, they are read from the
        source.
        """
        self._fetch, self._fetch_piece = fetch, piece

    def count_fetches(self, request: Callable[[], AbstractContextManager[None]]) -> None:
        """Enter the context `request` during each fetch by the functions of `fetch_by`.

        The context can count the time of the fetches.
        """
        fetch, fetch_piece = self._fetch, self._fetch_piece

        def counted(shard: int, block: int) -> bytes:
            with request():
                return fetch(shard, block)

        def counted_piece(shard: int, block: int, begin: int, piece: memoryview) -> bool:
            with request():
                return fetch_piece is not None and fetch_piece(shard, block, begin, piece)

        self.fetch_by(counted, None if fetch_piece is None else counted_piece)

    def block(self, shard: int, block: int, used: int = BLOCK_BYTES) -> bytes:
        """Return a verified block.

        Args:
            shard: the block's shard.
            block: the block's number within the shard.
            used: how many of the block's bytes the caller uses.

        Raises:
            DataError: the block is damaged at its source.
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
        """Return a block's bytes from the source, without verifying them."""
        return read(self.source, self.manifest.shards[shard].name, block * BLOCK_BYTES, self.end_of(shard, block))

    def wanted(self, shard: int, block: int) -> int:
        """Return the xxh3 of a block by the pack's check sums.

        Raises:
            DataError: the block does not exist.
        """
        if not 0 <= shard < len(self.manifest.shards) or not 0 <= block < self.manifest.shards[shard].blocks:
            raise DataError(f"block {block} of shard {shard} does not exist in this pack")
        return int(self._blocks[self._firsts[shard] + block])

    def each_block(self) -> Any:
        """Yield every block as (shard, block), in the order of the shards."""
        for shard, entry in enumerate(self.manifest.shards):
            for block in range(entry.blocks):
                yield shard, block
