"""What a reader offers: the samples of a data set, numbered through its shards."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from multiring.data.readers.limits import Limits
from multiring.data.readers.storage import Storage

Record = dict[str, Any]  # what fields hold: arrays, numbers, text, bytes


@dataclass(frozen=True, slots=True)
class Image:
    """An encoded image."""

    data: bytes

    def __len__(self) -> int:
        """Return its bytes."""
        return len(self.data)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Samples that are stored together."""

    name: str
    size_bytes: int
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """What a reader is given."""

    storage: Storage
    names: tuple[str, ...]
    limits: Limits
    report: Callable[[str], None]  # is told what is odd and goes on


class Source(Protocol):
    """A data set's samples.

    Attributes:
        format: its name.
        shards: in order.
        reads_records: whether one record can be read without its shard.
        digest: of what the order of samples depends on: 16 hexadecimal digits.
    """

    format: str
    shards: Sequence[Shard]
    reads_records: bool
    digest: str

    def record(self, number: int) -> Record:
        """Return a sample's fields as they are stored, images encoded.

        Raises:
            DataError: it is damaged.
        """
        ...


def digest_of(kind: str, shards: Sequence[Shard]) -> str:
    """Return 16 digits that change with any shard's name, size or number of samples."""
    told = json.dumps([kind, [[each.name, each.size_bytes, each.samples] for each in shards]])
    return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()


class Numbering:
    """Finds a sample's shard."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._firsts = np.concatenate([[0], np.cumsum([each.samples for each in shards])]).astype(np.int64)
        self.length = int(self._firsts[-1])

    def shards_of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the shards of samples that there are."""
        return np.searchsorted(self._firsts, numbers, side="right") - 1

    def place(self, number: int) -> tuple[int, int]:
        """Return a sample's shard, and which of that shard's samples it is.

        Raises:
            IndexError: there is no such sample.
        """
        if not 0 <= number < self.length:
            raise IndexError(f"sample {number} of {self.length}: want 0 to {self.length - 1}")
        shard = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return shard, number - int(self._firsts[shard])
