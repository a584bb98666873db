"""Verify a data set: compare a pack with its check sums, then read and decode every sample."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from multiring.data.dataset import Dataset
from multiring.data.readers.limits import library
from multiring.data.readers.manifest import BLOCK_BYTES, Manifest, load_blocks, xxh3
from multiring.data.readers.packed import PackedSource
from multiring.data.readers.storage import Storage, read
from multiring.errors import DataError

Progress = Callable[[int, int], None]  # called with the verified bytes or samples, and their total


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """A damaged place of a data set, and a description of the damage."""

    where: str
    text: str


def damages(data: Dataset, progress: Progress) -> Iterator[Damage]:
    """Yield each damage of a data set; nothing if the data set is intact.

    Args:
        data: the data set; images are verified only if it was opened with `decode=True`.
        progress: called after each block and each sample.
    """
    if isinstance(data.source, PackedSource):
        broken = list(_of_pack(data.storage, data.source.manifest, data, progress))
        yield from broken
        if broken:
            return  # samples in damaged blocks cannot be read
    for number in range(len(data)):
        try:
            data[number]
        except (DataError, OSError) as error:
            yield Damage(where=f"sample {number}", text=str(error))
        progress(number + 1, len(data))


def _of_pack(storage: Storage, manifest: Manifest, data: Dataset, progress: Progress) -> Iterator[Damage]:
    blocks = load_blocks(storage, manifest, data.limits)
    done = number = 0
    for shard in manifest.shards:
        whole = library("xxhash").xxh3_64()
        is_whole = True
        for block in range(shard.blocks):
            begin, end = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, shard.size_bytes)
            try:
                piece = read(storage, shard.name, begin, end)
            except (DataError, OSError) as error:
                yield Damage(where=f"{shard.name}, bytes {begin} to {end}", text=str(error))
                is_whole = False
                number += shard.blocks - block
                break
            if xxh3(piece) != blocks[number]:
                yield Damage(where=f"{shard.name}, bytes {begin} to {end}", text="the check sum does not match")
                is_whole = False
            whole.update(piece)
            number += 1
            done += end - begin
            progress(done, manifest.size_bytes)
        if is_whole and whole.intdigest() != shard.xxh3:
            yield Damage(where=shard.name, text="its xxh3 differs from the manifest's, although its blocks are right")
