"""A pack's manifest: sizes, counts, and xxh3 of each shard and of each 1 MiB block.

manifest.json     the fields, shards and check sums; its own digest names the pack
index.npy         int64 (samples, columns): each field's offset and size in bytes; for a number, its value
blocks.npy        uint64 (blocks,): xxh3 of all blocks, one shard after the other
shard-00000.tar   samples in WebDataset's layout
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.data.readers.arrays import array_of
from multiring.data.readers.limits import Limits, damage_told, library, require_inside, require_size
from multiring.data.readers.source import Shard
from multiring.data.readers.storage import Storage, read
from multiring.errors import DataError

MANIFEST, INDEX, BLOCKS = "manifest.json", "index.npy", "blocks.npy"
FORMAT = "multiring pack 1"
BLOCK_BYTES = 1 << 20
KINDS = ("image", "array", "number", "text", "json", "bytes")
_MOST_SHARDS = 1 << 24

Words = NDArray[np.uint64]


def xxh3(data: Any) -> int:
    """Return the 64-bit xxh3 of bytes."""
    found: int = library("xxhash").xxh3_64_intdigest(data)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """A field of every sample."""

    name: str
    kind: str
    dtype: str = ""  # if all arrays have one type and shape, their type; for numbers, their type, "" for Python's int
    shape: tuple[int, ...] | None = None  # the shape of such arrays; otherwise None
    header_bytes: int = 0  # bytes of the file before the numbers of such an array
    statistics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def columns(self) -> int:
        """Return the number of the field's columns in the index."""
        return 1 if self.kind == "number" else 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEntry:
    """A shard's file."""

    name: str
    size_bytes: int
    samples: int
    xxh3: int

    @property
    def blocks(self) -> int:
        """Return the number of the shard's blocks; the last may be shorter."""
        return -(-self.size_bytes // BLOCK_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The content of a pack's manifest."""

    fields: tuple[Field, ...]
    shards: tuple[ShardEntry, ...]
    index_xxh3: int
    blocks_xxh3: int
    note: str = ""  # the pack's source
    decoded: bool = False  # whether every image was decoded before it was packed

    @property
    def samples(self) -> int:
        """Return the number of samples."""
        return sum(each.samples for each in self.shards)

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all shards."""
        return sum(each.size_bytes for each in self.shards)

    def text(self) -> str:
        """Return the manifest as JSON."""
        told = asdict(self)
        if not self.decoded:
            del told["decoded"]  # older packs say nothing of it, and keep their digest
        for each in (told, *told["shards"]):
            each |= {name: f"{value:016x}" for name, value in each.items() if name.endswith("xxh3")}
        return json.dumps({"format": FORMAT, "block_bytes": BLOCK_BYTES, **told}, indent=1, allow_nan=False)

    @property
    def digest(self) -> str:
        """Return the pack's name: 32 hex digits that change with any of its bytes.

        They are a digest of the manifest. It contains the fields and their types, and the check sums of all shards, of
        the index, and of the table of blocks.
        """
        return hashlib.blake2b(self.text().encode(), digest_size=16).hexdigest()

    def listed(self) -> list[Shard]:
        """Return the shards for a reader."""
        return [Shard(name=each.name, size_bytes=each.size_bytes, samples=each.samples) for each in self.shards]


def parsed(what: str, data: bytes) -> Manifest:
    """Return the manifest in a file's bytes.

    Raises:
        DataError: the bytes are not a manifest, have another version, or have invalid values.
    """
    with damage_told(what, ValueError, KeyError, TypeError, RecursionError, AttributeError, OverflowError):
        told = json.loads(data)
        if told.get("format") != FORMAT or told.get("block_bytes") != BLOCK_BYTES:
            raise ValueError(f"format {told.get('format')!r}, want {FORMAT!r}: packed by another version?")
        shards = tuple(
            ShardEntry(
                name=require_inside(what, each["name"]),
                size_bytes=_count(each["size_bytes"]),
                samples=_count(each["samples"]),
                xxh3=int(each["xxh3"], 16),
            )
            for each in told["shards"]
        )
        fields = tuple(
            Field(**{**each, "shape": None if each["shape"] is None else tuple(map(_count, each["shape"]))})
            for each in told["fields"]
        )
        if not shards or len(shards) > _MOST_SHARDS or len({each.name for each in shards}) < len(shards):
            raise ValueError(f"{len(shards)} shards; want 1 to {_MOST_SHARDS}, of different names")
        for each in fields:
            if each.kind == "number" and each.dtype not in {"", "bool"} and np.dtype(each.dtype).kind not in "iub":
                raise ValueError(f"numbers have the unknown type {each.dtype!r}")
        if not all(each.kind in KINDS and isinstance(each.name, str) for each in fields):
            raise ValueError(f"fields have the kinds {sorted({str(each.kind) for each in fields})}; want only {KINDS}")
        return Manifest(
            fields=fields,
            shards=shards,
            index_xxh3=int(told["index_xxh3"], 16),
            blocks_xxh3=int(told["blocks_xxh3"], 16),
            note=str(told["note"]),
            decoded=told.get("decoded", False) is True,
        )


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is not a count: want an integer of 0 or more")
    return value


def load_manifest(storage: Storage, limits: Limits) -> Manifest:
    """Return a pack's manifest."""
    what = f"{storage.url}/{MANIFEST}"
    require_size(what, storage.size(MANIFEST), limits.index_bytes, "the limit")
    return parsed(what, read(storage, MANIFEST))


def load_index(storage: Storage, manifest: Manifest, limits: Limits) -> NDArray[np.int64]:
    """Return a pack's index after checking that every entry lies within its shard.

    Returns:
        int64 (samples, columns): two columns for each field, its offset and size in bytes; one column for a number.

    Raises:
        DataError: the index is damaged, or belongs to another pack.
    """
    columns = sum(each.columns for each in manifest.fields)
    what = f"{storage.url}/{INDEX}"
    index = _table(storage, INDEX, manifest.index_xxh3, limits)
    if index.dtype != np.int64 or index.shape != (manifest.samples, columns):
        raise DataError(f"{what}: {index.dtype} {index.shape}, want int64 {(manifest.samples, columns)}")
    sizes = np.repeat([each.size_bytes for each in manifest.shards], [each.samples for each in manifest.shards])
    column = 0
    for each in manifest.fields:
        if each.columns == 2:
            begins, counts = index[:, column], index[:, column + 1]
            # `begins + counts` could overflow, so compare without this sum.
            bad = (begins < 0) | (counts < -1) | (counts > sizes) | (begins > sizes - np.maximum(counts, 0))
            if each.shape is not None:
                bytes_each = each.header_bytes + int(np.prod(each.shape, dtype=object)) * np.dtype(each.dtype).itemsize
                bad |= counts != bytes_each
            if bad.any():
                raise DataError(f"{what}: sample {int(np.argmax(bad))}: its field {each.name} lies outside its shard")
        column += each.columns
    return index


def load_blocks(storage: Storage, manifest: Manifest, limits: Limits) -> Words:
    """Return the xxh3 of each block, one shard after the other, uint64 (blocks,)."""
    blocks = _table(storage, BLOCKS, manifest.blocks_xxh3, limits)
    count = sum(each.blocks for each in manifest.shards)
    if blocks.dtype != np.uint64 or blocks.shape != (count,):
        raise DataError(f"{storage.url}/{BLOCKS}: {blocks.dtype} {blocks.shape}, want uint64 {(count,)}")
    return blocks


def _table(storage: Storage, name: str, wanted: int, limits: Limits) -> NDArray[Any]:
    what = f"{storage.url}/{name}"
    size = require_size(what, storage.size(name), limits.index_bytes, "the limit")
    data = read(storage, name, 0, size)
    if xxh3(data) != wanted:
        raise DataError(f"{what} is damaged, or belongs to another pack: its xxh3 differs from the manifest's")
    return array_of(what, data, Limits(record_bytes=limits.index_bytes))
