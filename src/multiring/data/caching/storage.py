"""A storage whose files come through a cache of blocks."""

from collections.abc import Callable
from typing import Any

from multiring.data.caching.blocks import BlockCache
from multiring.data.packing.manifest import BLOCK_BYTES, BLOCKS, INDEX, MANIFEST, Manifest, load_blocks, load_manifest
from multiring.data.readers.limits import Limits
from multiring.data.readers.storage import Storage, read
from multiring.errors import ArgumentError, DataError

FetchBlock = Callable[[int, int], bytes]  # shard and block to its bytes


class CachedStorage:
    """A pack's files, its shards by blocks that are verified, kept in a cache where there is room.

    Where the cache is full, and a record needs less than a block, only the record's bytes are read: nothing is read
    twice for what cannot be kept. Those bytes are no whole block, so that no check sum is of them.

    Args:
        source: where the pack is.
        cache: of the host.
        fetch: gives a block; by default the source does.

    Raises:
        ArgumentError: the cache's quota is smaller than a block.
        DataError: it is no pack, or damaged.
    """

    def __init__(self, source: Storage, cache: BlockCache, fetch: FetchBlock | None = None) -> None:
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
        self.direct_bytes = 0  # read past the cache

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
            if self._is_partial(shard, block, first, last) and not self._may_keep(shard, block):
                self.source.read_into(name, first, piece)
                self.direct_bytes += len(piece)
                continue
            data = self.block(shard, block)
            piece[:] = memoryview(data)[first - block * BLOCK_BYTES : last - block * BLOCK_BYTES]

    def _is_partial(self, shard: int, block: int, first: int, last: int) -> bool:
        return last - first < self.end_of(shard, block) - block * BLOCK_BYTES

    def _may_keep(self, shard: int, block: int) -> bool:
        return self.cache.holds(self.key, self._firsts[shard] + block) or self.cache.has_room(
            self.end_of(shard, block) - self.begin_of(block)
        )

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

    def fetch_by(self, fetch: FetchBlock) -> None:
        """Have blocks that are not here from somewhere else than the source."""
        self._fetch = fetch

    def block(self, shard: int, block: int) -> bytes:
        """Return a block, verified.

        Raises:
            DataError: the source has it damaged.
        """
        number = self._firsts[shard] + block
        return self.cache.get(self.key, number, lambda: self._fetch(shard, block), int(self._blocks[number]))

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
