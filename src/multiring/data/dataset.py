"""Data sets: samples by number, decoded and augmented as (seed, epoch, sample) says."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from multiring.data.balance.decision import NETWORK, SOURCE
from multiring.data.caching.blocks import BlockCache
from multiring.data.caching.expecting import Expected
from multiring.data.caching.storage import CachedStorage
from multiring.data.decoding import decoded
from multiring.data.eviction import Deal
from multiring.data.feeding.stages import StageClock
from multiring.data.orders import (
    ExactOrder,
    MixtureOrder,
    Order,
    SequentialOrder,
    Shuffle,
    WeightedOrder,
    WindowedOrder,
    digest_of_order,
)
from multiring.data.peers.job import Sharing, told_once
from multiring.data.permutation import Numbers, keyed_words
from multiring.data.readers.limits import Limits
from multiring.data.readers.opening import open_source, tell
from multiring.data.readers.source import Image, Record, Shard
from multiring.data.readers.storage import Storage, storage_of
from multiring.errors import ArgumentError, DataError
from multiring.runtime import Group, is_initialized, world
from multiring.settings import Settings

Transform = Callable[[Record, np.random.Generator], Record]


class Samples(Protocol):
    """What a loader feeds.

    Attributes:
        order: of each epoch.
        seed: of its order and augmentation.
        digest: of what the order is an order of: which shards there are, and how many samples each has.
    """

    order: Order
    seed: int
    digest: str

    def sample(self, number: int, epoch: int = 0, draw: int = 0) -> Record:
        """Return a sample, decoded and augmented."""
        ...


def generator_for(seed: int, epoch: int, number: int, draw: int = 0) -> np.random.Generator:
    """Return the random numbers of a sample's augmentation: they depend on nothing else.

    Args:
        seed: of the data set.
        epoch: 0 or more.
        number: the sample's.
        draw: the place in the epoch, where an epoch may have a sample twice; 0 elsewhere.
    """
    key = keyed_words(2, "augmentation", seed, epoch, number, draw)
    return np.random.Generator(np.random.Philox(key=key))


@dataclass(slots=True)
class _Hosts:
    """What shares blocks with other hosts, of a data set and of those that draw from it by weight.

    moves: how often it has moved from one job to another.
    """

    sharing: Sharing | None = None
    moves: int = 0


class Dataset:
    """Samples that are stored somewhere: a map from numbers to records, and an order for each epoch.

    Args:
        url: a path, or what fsspec reads (s3://, https://, ...): a folder, or one file. Where the source needs options
            (credentials, a time-out), what `storage_of` returns for them; or any other storage.
        format: "imagefolder", "tar", "parquet", "hdf5", "npy", "npy-files", "mds", "tfrecord" or "pack"; by the files'
            names where it is not said.
        transform: is given each record, images decoded to uint8 arrays (height, width, 3), and a generator of random
            numbers, and returns what the training gets. It may change the record.
        seed: of the order, and of those random numbers.
        shuffle: "exact", "windowed" or "none"; a `Shuffle` says of how many shards, or what it may cost.
        decode: False leaves images as they are stored, as `Image` with their `data`.
        limits: what its files may claim; by default 1 GiB a record, 128 M pixels.
        cache: a folder on this host's disk, in which a pack's blocks are kept from the first epoch on; or a
            `BlockCache` of one, with its quota.

    Raises:
        ArgumentError: no such place, format or order; or an exact order of a format whose samples cannot be read
            alone, so that reading would cost more than its `read_amplification`.
        DataError: a file is damaged.
        UnsupportedError: a library is missing that reads it.
    """

    def __init__(  # noqa: PLR0913 -- one call says what a data set is
        self,
        url: str | Path | Storage,
        *,
        format: str | None = None,  # noqa: A002 -- the word for it
        transform: Transform | None = None,
        seed: int = 0,
        shuffle: str | Shuffle = "exact",
        decode: bool = True,
        limits: Limits | None = None,
        cache: str | Path | BlockCache | None = None,
    ) -> None:
        chosen = shuffle if isinstance(shuffle, Shuffle) else Shuffle(shuffle)
        self.limits = limits or Limits()
        self.clock = StageClock()
        self.storage = url if isinstance(url, Storage) else storage_of(str(url))
        self._hosts = _Hosts()
        if cache is not None:
            where, blocks = (cache.root, cache) if isinstance(cache, BlockCache) else (cache, None)
            if format not in {None, "pack"}:
                raise ArgumentError(f"cache={str(where)!r} with format={format!r}: want a pack, which has check sums")
            self.storage, self._hosts.sharing = _cached(self.storage, blocks or BlockCache(where), self.clock)
        self.source = open_source(self.clock.timed(self.storage), format, self.limits)
        self.seed = seed
        self.digest: str = self.source.digest
        self.shards: Sequence[Shard] = self.source.shards
        self._transform = transform
        self._decode = decode
        self._expected: Expected | None = None
        self.order = self._ordered(chosen)

    def _ordered(self, shuffle: Shuffle) -> Order:
        length = self.source.numbering.length
        if shuffle.kind == "none":
            return SequentialOrder(length)
        if shuffle.kind == "windowed":
            return WindowedOrder([each.samples for each in self.shards], shuffle.window, self.seed)
        amplification = read_amplification(self.source)
        if amplification > shuffle.read_amplification:
            raise ArgumentError(
                f"{self.storage.url}: an exact order of {self.source.format} reads each sample's whole shard: "
                f"{amplification:.3g} times the data set an epoch, where {shuffle.read_amplification:g} is allowed. "
                "Want shuffle='windowed', or a pack (multiring data pack), or "
                f"shuffle=Shuffle(read_amplification={math.ceil(amplification)}) to have it so"
            )
        return ExactOrder(length, self.seed)

    def weighted(self, weights: Sequence[float], length: int | None = None) -> "Dataset":
        """Return the data set with an order that draws with replacement, by weight.

        Args:
            weights: one for each sample, >= 0.
            length: of an epoch; as many as there are samples by default.

        Raises:
            ArgumentError: another number of weights, or bad ones.
        """
        if len(weights) != len(self):
            raise ArgumentError(f"{len(weights)} weights for {len(self)} samples")
        made = object.__new__(Dataset)
        made.__dict__ |= self.__dict__ | {"order": WeightedOrder(weights, length or len(self), self.seed)}
        return made

    def sample(self, number: int, epoch: int = 0, draw: int = 0) -> Record:
        """Return a sample, decoded and augmented as in `epoch`.

        Raises:
            DataError: it is damaged; or what the transform raised.
            IndexError: there is none of this number.
        """
        record: Record = self.source.record(number)
        if self._decode:
            record |= self._decoded(number, record)
        if self._transform is None:
            return record
        try:
            return self._transform(record, generator_for(self.seed, epoch, number, draw))
        except Exception as error:
            raise DataError(
                f"{self._named(number, record)}: the transform raised {type(error).__name__}: {error}"
            ) from error

    def _decoded(self, number: int, record: Record) -> Record:
        return {
            name: decoded(self._named(number, record, name), value.data, self.limits)
            for name, value in record.items()
            if isinstance(value, Image)
        }

    def require_decodable(self, number: int, record: Record) -> None:
        """Raise DataError where an image of a sample, as it is stored, cannot be decoded."""
        self._decoded(number, record)

    def expect(self, batch: int, ranks: tuple[int, int], epoch: int, samples: int) -> None:
        """Have the cache keep what a loader needs soonest.

        Args:
            batch: samples of a step, on all ranks together.
            ranks: this rank, and how many there are.
            epoch: from which on,
            samples: and how many of it are done.
        """
        storage = self.storage
        if not isinstance(storage, CachedStorage) or self.source.format != "pack":
            return
        own = range(ranks[1]) if storage.owned is not None else (ranks[0],)
        deal = Deal(self.order.length, batch, own, ranks[1])
        self._expected = Expected(self.order, deal, self.source.spans, storage.firsts, storage.owned)
        storage.expect(self._expected.uses(epoch, samples))

    def follow_job(self) -> int:
        """Share blocks with the hosts of the job that there is now; every rank calls this as an iteration begins.

        Without a job, or where the ranks that shared were a group of the program's own, this host keeps what it reads.

        Returns:
            How often that has changed: workers of before have to be made anew.
        """
        storage, hosts = self.storage, self._hosts
        if hosts.sharing is None or not hosts.sharing.is_over or not isinstance(storage, CachedStorage):
            return hosts.moves
        hosts.moves += 1
        hosts.sharing.close()
        hosts.sharing = None
        storage.keep_alone()
        if storage.cache.share is None and is_initialized():
            hosts.sharing = _shared(world(), storage, self.clock)
        else:
            tell(f"{storage.url}: the job was left whose hosts shared blocks; this host has them from the source now")
        return hosts.moves

    def close(self) -> None:
        """Close the port and connections by which hosts share blocks; other hosts ask the source then."""
        if self._hosts.sharing is not None:
            self._hosts.sharing.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_hosts": _Hosts(moves=self._hosts.moves)}

    def at(self, epoch: int, samples: int) -> None:
        """Note that the step that begins at `samples` of an epoch is read now."""
        if self._expected is not None and isinstance(self.storage, CachedStorage):
            if not self.storage.keeping.is_expecting:  # in a worker process
                self.storage.expect(self._expected.uses(epoch, samples))
            self.storage.keeping.advance(self._expected.deal.use(epoch, samples))

    @property
    def is_only_read(self) -> bool:
        """Return whether samples go into a batch as they are stored, many at a time."""
        return self._transform is None and hasattr(self.source, "rows_into")

    def fills(self, number: int, out: Mapping[str, Any]) -> bool:
        """Read a sample straight into `out`, arrays by field; False where that cannot be, and nothing was read."""
        into = getattr(self.source, "record_into", None)
        return self._transform is None and into is not None and bool(into(number, out))

    def fills_rows(self, numbers: Numbers, out: Mapping[str, Any]) -> dict[str, list[Any]] | None:
        """Read samples straight into rows of `out`, and return lists of what is no array.

        None where samples have to be read one by one.

        Raises:
            DataError: one of them cannot be read.
        """
        into = getattr(self.source, "rows_into", None)
        found: dict[str, list[Any]] | None = None if into is None or self._transform is not None else into(numbers, out)
        return found

    def _named(self, number: int, record: Record, field: str = "") -> str:
        name = record.get("name", record.get("key", ""))
        return f"{self.storage.url}: sample {number}{f' ({name})' if name else ''}{f', {field}' if field else ''}"

    def __getitem__(self, number: int) -> Record:
        """Return a sample, augmented as in epoch 0."""
        return self.sample(number)

    def __len__(self) -> int:
        """Return how many samples are stored."""
        return int(self.source.numbering.length)

    def __iter__(self) -> Iterator[Record]:
        """Yield the samples as they are stored."""
        return (self.sample(number) for number in range(len(self)))

    def __repr__(self) -> str:
        return f"<{self.source.format} {self.storage.url}: {len(self)} samples in {len(self.shards)} shards>"


def _cached(source: Storage, cache: BlockCache, clock: StageClock) -> tuple[CachedStorage, Sharing | None]:
    """Return a pack's storage behind a cache, and what shares it with other hosts, where that is asked for."""
    storage = clock.timed(source, SOURCE)
    group = cache.share
    if group is None and Settings.from_environment().data_share:
        if not is_initialized():
            raise ArgumentError("MULTIRING_DATA_SHARE=1: want multiring.init() before the data set is made")
        group = world()
    if group is None:
        return CachedStorage(storage, cache), None
    made = CachedStorage(told_once(group, storage), cache)
    return made, _shared(group, made, clock)


def _shared(group: Group, storage: CachedStorage, clock: StageClock) -> Sharing:
    sharing = Sharing(group, storage, tell, first_only=False)
    sharing.keep_own()
    storage.count_fetches(partial(clock.request, NETWORK))
    return sharing


def read_amplification(source: Any) -> float:
    """Return how many times its bytes an exact order reads of a data set, with nothing kept between samples."""
    if source.reads_records:
        return 1.0
    sizes = sum(each.size_bytes * each.samples for each in source.shards)
    return float(sizes / max(1, sum(each.size_bytes for each in source.shards)))


class Mixture:
    """Several data sets by weight: see `MixtureOrder`.

    Args:
        datasets: of records with the same fields.
        weights: one for each, > 0.
        seed: of the mixing; each data set keeps its own for its order and augmentation.
        length: of an epoch; as many samples as all have together by default.

    Raises:
        ArgumentError: as of `MixtureOrder`.
    """

    def __init__(
        self, datasets: Sequence[Dataset], weights: Sequence[float], *, seed: int = 0, length: int | None = None
    ) -> None:
        self._datasets = tuple(datasets)
        counts = [len(each) for each in datasets]
        self.order: Order = MixtureOrder([each.order for each in datasets], weights, seed, length, counts)
        self.seed = seed
        self._firsts = np.concatenate([[0], np.cumsum(counts)])
        self.digest = digest_of_order("mixture of", [each.digest for each in datasets])

    def sample(self, number: int, epoch: int = 0, draw: int = 0) -> Record:
        """Return a sample, by its number through the data sets."""
        owner = int(np.searchsorted(self._firsts, number, side="right")) - 1
        if not 0 <= owner < len(self._datasets):
            raise IndexError(f"sample {number} of {len(self)}")
        return self._datasets[owner].sample(number - int(self._firsts[owner]), epoch, draw)

    def follow_job(self) -> int:
        """As of each of the data sets."""
        return sum(each.follow_job() for each in self._datasets)

    def __len__(self) -> int:
        """Return how many samples all have."""
        return int(self._firsts[-1])

    def __getitem__(self, number: int) -> Record:
        """Return a sample, augmented as in epoch 0."""
        return self.sample(number)
