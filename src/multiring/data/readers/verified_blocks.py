"""Verify each block of a local pack by its check sum before the first use of its bytes."""

from typing import Any

import numpy as np

from multiring.data.readers.limits import Limits
from multiring.data.readers.manifest import BLOCK_BYTES, Manifest, load_blocks, xxh3
from multiring.data.readers.storage import Storage, read
from multiring.errors import DataError


class Blocks:
    """The blocks of a pack that this process has verified.

    Each process verifies blocks for itself.

    Args:
        storage: the storage of the pack.
        manifest: the pack's manifest.
        limits: the largest size of the table of check sums.

    Raises:
        DataError: the table of check sums is damaged.
    """

    def __init__(self, storage: Storage, manifest: Manifest, limits: Limits) -> None:
        self._storage, self._manifest = storage, manifest
        self._wanted = load_blocks(storage, manifest, limits)
        self._firsts = np.cumsum([0, *(each.blocks for each in manifest.shards)])
        self._first_of: list[int] = self._firsts.tolist()
        self._verified = np.zeros(len(self._wanted), np.bool_)
        self.are_all_verified = False

    def holds(self, shard: int, first: int, last: int) -> bool:
        """Return whether the blocks with the bytes `first` to `last` of a shard are verified."""
        blocks = self._verified[self._first_of[shard] + first // BLOCK_BYTES :]
        return bool(blocks[: last // BLOCK_BYTES - first // BLOCK_BYTES + 1].all())

    def verify(self, shards: Any, first: Any, last: Any) -> None:
        """Verify the blocks that contain samples.

        Args:
            shards: the shards of the samples, (n,).
            first: the first byte of each sample in its shard, (n,).
            last: the last byte of each sample in its shard, (n,); -1 for a sample without bytes.

        Raises:
            DataError: the check sum of a block does not match.
        """
        there = last >= 0
        lowest = self._firsts[shards[there]] + first[there] // BLOCK_BYTES
        highest = self._firsts[shards[there]] + last[there] // BLOCK_BYTES
        if self._verified[lowest].all() and self._verified[highest].all() and (highest - lowest).max(initial=0) < 2:
            return
        for begin, end in zip(lowest.tolist(), highest.tolist(), strict=True):
            for number in range(begin, end + 1):
                if not self._verified[number]:
                    self._verify(number)
        self.are_all_verified = bool(self._verified.all())

    def _verify(self, number: int) -> None:
        shard = int(np.searchsorted(self._firsts, number, side="right")) - 1
        entry = self._manifest.shards[shard]
        begin = (number - int(self._firsts[shard])) * BLOCK_BYTES
        end = min(begin + BLOCK_BYTES, entry.size_bytes)
        if xxh3(read(self._storage, entry.name, begin, end)) != self._wanted[number]:
            raise DataError(
                f"{self._storage.url}/{entry.name} is damaged: bytes {begin} to {end} differ from the packed ones; "
                "make the pack again, or run `multiring data verify` to list all damage"
            )
        self._verified[number] = True
