"""Tar shards in WebDataset's layout: consecutive files whose names agree up to the first dot are one sample.

The rest of the name, the ending, is the field's name, and determines its type: .jpg, .png, .webp an image, .cls and .id
a number, .txt text, .json JSON, .npy an array, all others bytes. Files without an ending, or without a name before it,
belong to no sample. Neither do top-level files or folders with names __like this__. A shard may be compressed as a
whole.

Source of the layout: github.com/webdataset/webdataset, tariterators.py (base_plus_ext, group_by_keys) and
autodecode.py.
"""

import io
import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from multiring.data.readers.arrays import array_of
from multiring.data.readers.limits import (
    PICKLES,
    Limits,
    damage_told,
    refuse_pickle,
    require_inside,
    require_size,
)
from multiring.data.readers.source import Image, Numbering, Opening, Record, Shard, digest_of
from multiring.data.readers.storage import Storage, StorageFile, read, with_endings
from multiring.data.readers.unpacking import UnpackedStorage, codec_of
from multiring.errors import DataError

IMAGES = frozenset({"jpg", "jpeg", "png", "ppm", "bmp", "pgm", "tif", "tiff", "webp"})
ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst")
_NUMBERS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})
_TEXTS = frozenset({"txt", "text", "transcript"})
_JSON = frozenset({"json", "jsn"})
_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
_NO_SAMPLE = re.compile(r"__[^/]*__($|/)")
_USTAR = slice(257, 262)  # position of the magic "ustar" in an uncompressed tar
_READ_AHEAD = 1 << 16
_RECORD = 512  # headers and contents begin at multiples of this size in bytes


@dataclass(frozen=True, slots=True)
class TarMember:
    """A file in a tar."""

    name: str
    begin: int
    size: int


def split_name(name: str) -> tuple[str, str] | None:
    """Return a member's sample and field, or None if the member belongs to no sample.

    The sample is the path up to the first dot of the file's name; the field is the rest.
    """
    found = None if _NO_SAMPLE.match(name) else _NAME.fullmatch(name)
    return None if found is None else (found[1], found[2].lower())


def members(storage: Storage, name: str) -> Iterator[TarMember]:
    """Yield a tar's files. Only the headers are read.

    Raises:
        DataError: the tar is cut short or damaged; or it has links, devices, sparse files or paths that lead out of it.
    """
    what = f"{storage.url}/{name}"
    size = storage.size(name)
    file = io.BufferedReader(StorageFile(storage, name), _READ_AHEAD)
    kinds = (tarfile.TarError, ValueError, EOFError, RecursionError, OverflowError, MemoryError, IndexError, KeyError)
    with damage_told(what, *kinds):
        archive: Any = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115 -- it has no resource except `file`
    end = 0
    while True:
        with damage_told(what, *kinds):
            found = archive.next()
        if found is None:
            break
        archive.members = []  # otherwise tarfile would keep all members in memory
        require_size(f"{what}: {found.name!r}", found.size, size - found.offset_data, "the rest of the file")
        end = found.offset_data + -(-found.size // _RECORD) * _RECORD
        if found.isdir():
            continue
        if not found.isreg() or found.issparse():
            raise DataError(f"{what}: {found.name!r} is a link, a device or a sparse file; want plain files")
        yield TarMember(require_inside(what, found.name), found.offset_data, found.size)
    # tarfile accepts a file that is cut short before a header, but a complete tar ends with two empty records.
    if end + 2 * _RECORD > size or any(read(storage, name, end, end + 2 * _RECORD)):
        raise DataError(
            f"{what} was cut short: it has {size} bytes, and the end mark of the archive is missing at byte {end}"
        )


def samples_in(storage: Storage, name: str, limits: Limits) -> list[list[TarMember]]:
    """Return a tar's samples, each as a list of its consecutive files."""
    found: list[list[TarMember]] = []
    last = ""
    fields: set[str] = set()
    for member in members(storage, name):
        split = split_name(member.name)
        if split is None:
            continue
        key, field = split
        if field.rpartition(".")[2] in PICKLES:
            refuse_pickle(f"{storage.url}/{name}", member.name)
        require_size(f"{storage.url}/{name}: {member.name}", member.size, limits.record_bytes, "the limit of a record")
        if found and key == last:
            if field in fields:
                raise DataError(f"{storage.url}/{name}: {member.name!r} occurs twice in a sample")
            found[-1].append(member)
        else:
            found.append([member])
            fields = set()
        fields.add(field)
        last = key
    return found


def value_of(what: str, field: str, data: memoryview, limits: Limits) -> Any:
    """Return a member's value, decoded by its ending."""
    ending = field.rpartition(".")[2]
    if ending in IMAGES:
        return Image(bytes(data))
    if ending == "npy":
        return array_of(what, data, limits)
    with damage_told(what, ValueError, RecursionError):
        if ending in _NUMBERS:
            return int(bytes(data))
        if ending in _TEXTS:
            return bytes(data).decode()
        if ending in _JSON:
            return json.loads(bytes(data))
    return bytes(data)


def _codec_of(storage: Storage, name: str) -> str | None:
    head = read(storage, name, 0, min(storage.size(name), 512))
    return None if head[_USTAR] == b"ustar" else codec_of(head)


class TarSource:
    """Samples in tar shards."""

    format = "tar"

    def __init__(self, opening: Opening) -> None:
        self._limits = opening.limits
        names = with_endings(opening.names, *ENDINGS) or ([""] if opening.names == ("",) else [])
        codecs = {name: codec for name in names if (codec := _codec_of(opening.storage, name)) is not None}
        self._storage = UnpackedStorage(opening.storage, codecs, opening.limits) if codecs else opening.storage
        self.reads_records = not codecs
        if not names:
            raise DataError(f"{opening.storage.url} has no .tar file")
        indices = [(name, samples_in(self._storage, name, opening.limits)) for name in names]
        for name, index in indices:
            if not index:
                opening.report(f"{opening.storage.url}/{name} has no samples")
        self._samples = [index for _, index in indices if index]
        self.shards = [
            Shard(name=name, size_bytes=opening.storage.size(name), samples=len(index))
            for name, index in indices
            if index
        ]
        if not self.shards:
            raise DataError(f"{opening.storage.url} has no samples in its .tar files")
        self.numbering = Numbering(self.shards)
        self.digest = digest_of(self.format, self.shards)

    def record(self, number: int) -> Record:
        """Return a sample's files as its fields, and its name as "key"."""
        shard, row = self.numbering.place(number)
        name, found = self.shards[shard].name, self._samples[shard][row]
        begin, end = found[0].begin, found[-1].begin + found[-1].size
        require_size(
            f"{self._storage.url}/{name}: {found[0].name}", end - begin, self._limits.record_bytes, "the limit"
        )
        data = memoryview(read(self._storage, name, begin, end))
        record: Record = {}
        for each in found:
            key, field = split_name(each.name) or ("", "")
            record.setdefault("key", key)
            what = f"{self._storage.url}/{name}: {each.name}"
            record[field] = value_of(
                what, field, data[each.begin - begin : each.begin - begin + each.size], self._limits
            )
        return record
