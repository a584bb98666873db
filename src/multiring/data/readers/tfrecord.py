"""TFRecord files of tf.train.Example.

A record consists of its length as uint64, the length's masked CRC-32C, the data, and the data's masked CRC-32C; all
numbers are little-endian. An Example is a protobuf message. This module parses the few kinds of field that it has.

Sources: tensorflow.org/tutorials/load_data/tfrecord; tensorflow/core/example/example.proto and feature.proto;
protobuf.dev/programming-guides/encoding.
"""

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from multiring.data.readers.limits import Limits, library, require_size
from multiring.data.readers.source import Image, Numbering, Opening, Record, Shard, digest_of
from multiring.data.readers.storage import Storage, read
from multiring.data.readers.unpacking import UnpackedStorage, codec_of
from multiring.errors import DataError

_HEAD = struct.Struct("<QI")
_FOOT = struct.Struct("<I")
_MASK = 0xA282EAD8
_MAGICS = (b"\xff\xd8\xff", b"\x89PNG\r\n")
_READ_AHEAD = 1 << 20


def masked_crc(data: bytes) -> int:
    """Return the masked CRC-32C of `data`, which a record stores as its check sum."""
    crc: int = library("google_crc32c").value(data)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def records_in(storage: Storage, name: str, limits: Limits) -> list[tuple[int, int]]:
    """Return the offset and the length in bytes of each record in a file.

    The check sums of the data are not verified.

    Raises:
        DataError: a length is damaged, or the file ends within a record.
    """
    what = f"{storage.url}/{name}"
    size = storage.size(name)
    found = []
    place = 0
    head = b""
    begin = 0  # offset of `head` in the file
    while place < size:
        if place + _HEAD.size > begin + len(head):
            begin = place
            head = read(storage, name, place, min(size, place + _READ_AHEAD))
        if len(head) - (place - begin) < _HEAD.size:
            raise DataError(f"{what} ends within a record, at byte {size}")
        length, crc = _HEAD.unpack_from(head, place - begin)
        if crc != masked_crc(head[place - begin : place - begin + 8]):
            raise DataError(f"{what}: the record length at byte {place} is damaged")
        left = size - place - _HEAD.size - _FOOT.size
        require_size(f"{what}: the record at {place}", length, left, "the rest of the file")
        require_size(f"{what}: the record at {place}", length, limits.record_bytes, "the limit of a record")
        found.append((place + _HEAD.size, length))
        place += _HEAD.size + length + _FOOT.size
    return found


def is_tfrecord(name: str) -> bool:
    """Return whether a file's name is the usual name of a TFRecord file."""
    last = name.rpartition("/")[2].lower()
    return "tfrecord" in last or last.endswith(".tfrec")


def _codec_of(storage: Storage, name: str) -> str | None:
    """Return a file's compression; None if a valid record comes first, even if it looks like compressed data."""
    head = read(storage, name, 0, min(storage.size(name), _HEAD.size))
    if len(head) == _HEAD.size and _HEAD.unpack(head)[1] == masked_crc(head[:8]):
        return None
    return codec_of(head)


class TfRecordSource:
    """Examples in TFRecord files, plain or compressed as a whole.

    A feature with one value becomes that value. A feature with several values becomes an array or a list.
    """

    format = "tfrecord"

    def __init__(self, opening: Opening) -> None:
        self._limits = opening.limits
        # If no name is usual, the caller has passed the format: ImageNet's files are train-00000-of-01024.
        names = [each for each in opening.names if is_tfrecord(each)] or list(opening.names)
        codecs = {name: codec for name in names if (codec := _codec_of(opening.storage, name)) is not None}
        self._storage = UnpackedStorage(opening.storage, codecs, opening.limits) if codecs else opening.storage
        self.reads_records = not codecs
        indices = [(name, records_in(self._storage, name, opening.limits)) for name in names]
        self._records = [np.array(index, np.int64) for _, index in indices if index]
        self.shards = [
            Shard(name=name, size_bytes=opening.storage.size(name), samples=len(index))
            for name, index in indices
            if index
        ]
        if not self.shards:
            raise DataError(f"{opening.storage.url} has no TFRecord file with records")
        self.numbering = Numbering(self.shards)
        self.digest = digest_of(self.format, self.shards)

    def record(self, number: int) -> Record:
        """Return the features of the Example with this number."""
        shard, row = self.numbering.place(number)
        begin, length = (int(each) for each in self._records[shard][row])
        what = f"{self._storage.url}/{self.shards[shard].name}: record {row}"
        data = read(self._storage, self.shards[shard].name, begin, begin + length + _FOOT.size)
        if _FOOT.unpack_from(data, length)[0] != masked_crc(data[:length]):
            raise DataError(f"{what} is damaged: its check sum does not match")
        try:
            return example_of(data[:length])
        except (ValueError, struct.error, IndexError) as error:
            raise DataError(f"{what} is not a tf.train.Example: {error}") from error


def example_of(data: bytes) -> Record:
    """Return the features of an encoded Example.

    Raises:
        ValueError: `data` is not an Example.
    """
    found: Record = {}
    for number, features in _fields(data):
        for inner, entry in _fields(_message(features)) if number == 1 else ():
            parts = dict(_fields(_message(entry))) if inner == 1 else {}
            if 1 in parts and 2 in parts:
                found[_message(parts[1]).decode()] = _feature(_message(parts[2]))
    return found


def _message(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("found a number, want a message")  # noqa: TRY004 -- the file is wrong, not the caller's type
    return value


def _feature(data: bytes) -> Any:
    for number, values in _fields(data):
        inner = [each for key, each in _fields(_message(values)) if key == 1]
        if number == 1:
            texts = [_message(each) for each in inner]
            if len(texts) == 1:
                return Image(texts[0]) if texts[0].startswith(_MAGICS) else texts[0]
            return texts
        if number not in {2, 3}:
            continue
        array = np.frombuffer(b"".join(_message(each) for each in inner), "<f4") if number == 2 else _whole(inner)
        return array[0] if len(array) == 1 else array
    return np.empty(0, np.float32)


def _whole(inner: list[int | bytes]) -> np.ndarray[Any, Any]:
    """Return integers as int64; each entry is one integer or a packed field of many."""
    if all(isinstance(each, int) for each in inner):
        return np.array(inner, np.uint64).view(np.int64)
    return np.concatenate([_integers(each) for each in inner])


def _integers(value: int | bytes) -> np.ndarray[Any, Any]:
    """Return one integer, or a packed field of many, as int64.

    NumPy decodes the integers, because a Python object for each would need 30 bytes.
    """
    if isinstance(value, int):
        return np.array([value], np.uint64).view(np.int64)
    data = np.frombuffer(value, np.uint8)
    ends = np.flatnonzero(data < 0x80) + 1
    if not len(data):
        return np.empty(0, np.int64)
    if not len(ends) or ends[-1] != len(data):
        raise ValueError("the last number is cut off")
    begins = np.concatenate([[0], ends[:-1]])
    lengths = ends - begins
    if lengths.max() > 10:
        raise ValueError("a number of more than 64 bits")
    found = np.zeros(len(ends), np.uint64)
    for place in range(int(lengths.max())):
        there = lengths > place
        found[there] |= (data[begins[there] + place] & np.uint8(0x7F)).astype(np.uint64) << np.uint64(7 * place)
    return found.view(np.int64)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and value of a message's fields: varints as integers, all other values as bytes."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(data, place)
            yield key >> 3, value
            continue
        if kind == 2:
            size, place = _varint(data, place)
        elif kind in {1, 5}:
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field has the unknown kind {kind}")
        if size > len(data) - place:
            raise ValueError(f"a field claims {size} bytes of {len(data) - place}")
        yield key >> 3, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, place
    raise ValueError("a number of more than 64 bits")
