"""The interface of readers: a data set's samples, numbered through its shards."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from multiring.data.readers.limits import Limits
from multiring.data.readers.storage import Storage

Record = dict[str, Any]  # a sample's fields: arrays, numbers, text, bytes


@dataclass(frozen=True, slots=True)
class Image:
    """An encoded image.

    Attributes:
        data: the bytes of the file; while a group of samples is decoded, perhaps in memory that is reused afterwards.
        is_sound: whether it is known that these bytes can be decoded.
    """

    data: bytes | memoryview
    is_sound: bool = field(default=False, compare=False)

    def __len__(self) -> int:
        """Return the number of encoded bytes."""
        return len(self.data)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A shard: samples that are stored together."""

    name: str
    size_bytes: int
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """The arguments of a reader."""

    storage: Storage
    names: tuple[str, ...]
    limits: Limits
    report: Callable[[str], None]  # called with the text of a warning


class Source(Protocol):
    """A data set's samples.

    Attributes:
        format: the name of the data set's format.
        shards: the shards in the order of their samples.
        reads_records: whether one record can be read without the rest of its shard.
        digest: 16 hexadecimal digits, a digest of the shards on which an order of the samples depends.
    """

    format: str
    shards: Sequence[Shard]
    reads_records: bool
    digest: str

    def record(self, number: int) -> Record:
        """Return a sample's stored fields; images stay encoded.

        Raises:
            DataError: the sample is damaged.
        """
        ...


def digest_of(kind: str, shards: Sequence[Shard]) -> str:
    """Return a digest of the shards' names, sizes and sample counts: 16 hex digits."""
    told = json.dumps([kind, [[each.name, each.size_bytes, each.samples] for each in shards]])
    return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()


class Numbering:
    """Maps the numbers of samples to their shards."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._firsts = np.concatenate([[0], np.cumsum([each.samples for each in shards])]).astype(np.int64)
        self.length = int(self._firsts[-1])

    def shards_of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the shards of samples, int64 (n,); `numbers` must be valid."""
        return np.searchsorted(self._firsts, numbers, side="right") - 1

    def place(self, number: int) -> tuple[int, int]:
        """Return a sample's shard, and its number within the shard.

        Raises:
            IndexError: no sample has this number.
        """
        if not 0 <= number < self.length:
            raise IndexError(f"sample {number} of {self.length}: want 0 to {self.length - 1}")
        shard = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return shard, number - int(self._firsts[shard])
