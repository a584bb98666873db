"""Data sets: each sample has a number, and (seed, epoch, number) determines its augmentation."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from multiring._arguments import is_of, require_flag, require_function, require_seed, require_whole, shown, whole
from multiring._runtime import Group, is_initialized, world
from multiring._settings import Settings
from multiring.data.caching.blocks import BlockCache
from multiring.data.caching.expecting import Expected
from multiring.data.caching.storage import CachedStorage
from multiring.data.eviction import Deal
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
from multiring.data.peers.sharing import Sharing, told_once
from multiring.data.permutation import Numbers
from multiring.data.readers.limits import Limits
from multiring.data.readers.opening import open_source, tell
from multiring.data.readers.source import Record, Shard
from multiring.data.readers.storage import Storage, open_storage
from multiring.data.sample_maker import SampleMaker, Transform
from multiring.data.stages import NETWORK, SOURCE, StageClock
from multiring.errors import ArgumentError


class Samples(Protocol):
    """The interface that a loader needs of a data set.

    Attributes:
        order: the order of the samples in each epoch.
        seed: the seed of the order and of the augmentation.
        digest: a digest of the shards' names, sizes and sample counts; an order is valid only for these shards.
    """

    order: Order
    seed: int
    digest: str

    def sample(self, number: int, epoch: int = 0, draw: int = 0) -> Record:
        """Return a sample, decoded and augmented."""
        ...


@dataclass(slots=True)
class _Hosts:
    """The state of block sharing with other hosts.

    A data set and its `weighted` copies use the same object.

    moves: how many times the data set has changed from one job to another.
    """

    sharing: Sharing | None = None
    moves: int = 0


class Dataset:
    """Stored samples: a map from numbers to records, with an order for each epoch.

    Args:
        url: a path or a URL that fsspec can read (s3://, https://, ...), of a folder or of one file. A source that
            needs options (credentials, a time-out) is passed as the result of `open_storage`. Any other storage is
            accepted too.
        format: "imagefolder", "tar", "parquet", "hdf5", "npy", "npy-files", "mds", "tfrecord" or "pack"; by default
            the files' names decide.
        transform: called with each record and a random generator. It returns the record for the training, and may
            change the record in place. Images are decoded to uint8 arrays (height, width, 3). If it begins with a crop
            (see multiring.data.augment), of a JPEG only the crop is decoded.
        seed: the seed of the order and of the transforms' random generators.
        shuffle: "exact", "windowed" or "none", or a `Shuffle` that also sets the window or the read amplification.
        decode: whether images are decoded; if False, they are `Image` objects that hold the stored bytes in `data`.
        limits: the largest sizes that the files may declare; by default 1 GiB a record and 128 M pixels an image.
        cache: a folder on this host's disk that keeps a pack's blocks from the first epoch on; or a `BlockCache`, which
            has a quota.

    Raises:
        ArgumentError: the path, format or order does not exist; an exact order would read more than
            `read_amplification` allows, because the format cannot read single samples; or an argument has a wrong type.
        DataError: a file is damaged.
        UnsupportedError: the library that reads the format is missing.
    """

    def __init__(  # noqa: PLR0913 -- one call configures a data set
        self,
        url: str | Path | Storage,
        *,
        format: str | None = None,  # noqa: A002 -- the usual word
        transform: Transform | None = None,
        seed: int = 0,
        shuffle: str | Shuffle = "exact",
        decode: bool = True,
        limits: Limits | None = None,
        cache: str | Path | BlockCache | None = None,
    ) -> None:
        chosen = shuffle if isinstance(shuffle, Shuffle) else Shuffle(shuffle)
        seed, decode = require_seed("seed", seed), require_flag("decode", decode)
        if transform is not None:
            require_function("transform", transform, "a function of a record and a random generator, or None")
        if limits is not None and not isinstance(limits, Limits):
            raise ArgumentError(f"limits={shown(limits)}: want a Limits, or None")
        self.limits = limits or Limits()
        self.clock = StageClock()
        self.storage = url if isinstance(url, Storage) else open_storage(url)
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
        self._maker = SampleMaker(self.storage.url, transform, seed, self.limits, decode=decode)
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
                f"{self.storage.url}: an exact order of {self.source.format} reads each sample's whole shard. An epoch "
                f"would read the data set {amplification:.3g} times; allowed is {shuffle.read_amplification:g} times. "
                "Want shuffle='windowed', or a pack (multiring data pack), or "
                f"shuffle=Shuffle(read_amplification={math.ceil(amplification)}) to allow it"
            )
        return ExactOrder(length, self.seed)

    def weighted(self, weights: Sequence[float], length: int | None = None) -> "Dataset":
        """Return a copy of the data set that draws samples by weight, with replacement.

        Args:
            weights: one weight >= 0 for each sample.
            length: samples of an epoch; by default the number of stored samples.

        Raises:
            ArgumentError: the number of weights is wrong, a weight is no number, is negative or not finite, all weights
                are 0, or `length` is not a whole number from 1 on.
        """
        if np.ndim(weights) != 1:
            raise ArgumentError(f"weights={shown(weights)}: want one weight for each of {len(self)} samples")
        if len(weights) != len(self):
            raise ArgumentError(f"{len(weights)} weights for {len(self)} samples: want one weight for each sample")
        count = len(self) if length is None else require_whole("length", length, 1)
        made = object.__new__(Dataset)
        made.__dict__ |= self.__dict__ | {"order": WeightedOrder(weights, count, self.seed)}
        return made

    def sample(self, number: int, epoch: int = 0, draw: int = 0) -> Record:
        """Return a sample, decoded and augmented as in `epoch`.

        Raises:
            ArgumentError: an argument is not a whole number.
            DataError: the sample is damaged, or the transform raised an exception.
            IndexError: no sample has this number.
        """
        number, epoch, draw = _whole_numbers(number=number, epoch=epoch, draw=draw)
        (finish,) = self._maker.begin([number], epoch, [draw], self.source, {})
        return finish()

    def begin_samples(
        self, numbers: Sequence[int], epoch: int, draws: Sequence[int], rows: Mapping[str, Any]
    ) -> list[Callable[[], Record]] | None:
        """Read samples and decode their crops at once; return for each a function that returns what `sample` does.

        None is returned if this is not faster than `sample`.

        Args:
            numbers: the samples' numbers.
            epoch: as for `sample`.
            draws: as for `sample`, one for each sample.
            rows: arrays (samples, ...) by field. A crop that fits into its row is decoded there, and is then a view of
                it in the sample.
        """
        if not self._maker.crops_first:
            return None
        return self._maker.begin(numbers, epoch, draws, self.source, rows)

    def crops_rows(
        self, numbers: Numbers, epoch: int, draws: Sequence[int], out: Mapping[str, Any]
    ) -> dict[str, list[Any]] | None:
        """Make samples in the rows of `out`, if they are crops of JPEGs and nothing else.

        The result and the errors are those of `fills_rows`.

        Args:
            numbers: the samples' numbers, int64 (samples,).
            epoch: as for `sample`.
            draws: as for `sample`, one for each sample.
            out: an array (samples, ...) for each field.
        """
        return self._maker.crop_rows(self.source, numbers, epoch, draws, out)

    def require_decodable(self, number: int, record: Record) -> None:
        """Raise DataError if an image of the undecoded `record` cannot be decoded."""
        self._maker.decoded(number, record)

    def expect(self, batch: int, ranks: tuple[int, int], epoch: int, samples: int) -> None:
        """Inform the cache which samples a loader will need, and when.

        The cache then keeps the blocks that are needed soonest.

        Args:
            batch: samples of a step, on all ranks together.
            ranks: this rank, and the number of ranks.
            epoch: the epoch in which the loader begins.
            samples: how many samples of this epoch are already done.
        """
        storage = self.storage
        if not isinstance(storage, CachedStorage) or self.source.format != "pack":
            return
        own = range(ranks[1]) if storage.owned is not None else (ranks[0],)
        deal = Deal(self.order.length, batch, own, ranks[1])
        self._expected = Expected(self.order, deal, self.source.spans, storage.firsts, storage.owned)
        storage.expect(self._expected.uses(epoch, samples))

    def follow_job(self) -> int:
        """Share blocks with the hosts of the current job.

        Every rank calls this at the beginning of an iteration. If this process has left the job with which it shared
        blocks, it shares them with its current job instead. Sharing stops if there is no current job, or if the program
        passed a group to the `BlockCache`. This process then reads all blocks from the source.

        Returns:
            How many times the job has changed. If the number grows, the caller must restart its workers.
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
            tell(f"{storage.url}: this process left the job that shared blocks; it now reads them from the source")
        return hosts.moves

    def close(self) -> None:
        """Close the port and the connections that share blocks.

        Other hosts then read from the source.
        """
        if self._hosts.sharing is not None:
            self._hosts.sharing.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_hosts": _Hosts(moves=self._hosts.moves)}

    def at(self, epoch: int, samples: int) -> None:
        """Inform the cache that the step at sample `samples` of `epoch` is being read."""
        if self._expected is not None and isinstance(self.storage, CachedStorage):
            if not self.storage.keeping.is_expecting:  # the first call in a worker process
                self.storage.expect(self._expected.uses(epoch, samples))
            self.storage.keeping.advance(self._expected.deal.use(epoch, samples))

    @property
    def is_only_read(self) -> bool:
        """Return whether samples are copied into a batch unchanged, many at a time."""
        return self._maker.transform is None and hasattr(self.source, "rows_into")

    @property
    def listed_bytes(self) -> float | None:
        """Return the mean bytes of a sample's values that `fills_rows` returns in lists; None if it reads no samples.

        Then each sample is read for itself: its images are decoded, or its storage has a request for each.
        """
        found: float | None = None if self._maker.transform is not None else getattr(self.source, "listed_bytes", None)
        return found

    def fills(self, number: int, out: Mapping[str, Any]) -> bool:
        """Read a sample directly into `out`, a map from fields to arrays.

        Returns:
            Whether the sample was read. If not, the caller must use `sample`.
        """
        into = getattr(self.source, "record_into", None)
        return self._maker.transform is None and into is not None and bool(into(number, out))

    def fills_rows(self, numbers: Numbers, out: Mapping[str, Any]) -> dict[str, list[Any]] | None:
        """Read samples directly into the rows of `out`.

        Args:
            numbers: the samples' numbers, int64 (samples,).
            out: an array (samples, ...) for each field.

        Returns:
            The values of the fields that have no array, as lists; None if the samples must be read one by one.

        Raises:
            DataError: a sample cannot be read.
        """
        into = getattr(self.source, "rows_into", None)
        found: dict[str, list[Any]] | None = (
            None if into is None or self._maker.transform is not None else into(numbers, out)
        )
        return found

    def __getitem__(self, number: int) -> Record:
        """Return a sample, augmented as in epoch 0."""
        return self.sample(number)

    def __len__(self) -> int:
        """Return the number of stored samples."""
        return int(self.source.numbering.length)

    def __iter__(self) -> Iterator[Record]:
        """Yield the samples in stored order, augmented as in epoch 0."""
        return (self.sample(number) for number in range(len(self)))

    def __repr__(self) -> str:
        return f"<{self.source.format} {self.storage.url}: {len(self)} samples in {len(self.shards)} shards>"


def _cached(source: Storage, cache: BlockCache, clock: StageClock) -> tuple[CachedStorage, Sharing | None]:
    """Return a pack's storage behind a cache, and the sharing with other hosts if it is requested."""
    storage = clock.timed(source, SOURCE)
    group = cache.share
    if group is None and Settings.from_environment().data_share:
        if not is_initialized():
            raise ArgumentError("MULTIRING_DATA_SHARE=1: call multiring.init() before you make the data set")
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
    """Return how many times an exact order reads a data set's bytes without a cache."""
    if source.reads_records:
        return 1.0
    sizes = sum(each.size_bytes * each.samples for each in source.shards)
    return float(sizes / max(1, sum(each.size_bytes for each in source.shards)))


def _whole_numbers(**values: int) -> tuple[int, ...]:
    """Return whole numbers as ints: random numbers depend on their texts, and 2.5 has one, too."""
    found = tuple(map(whole, values.values()))
    for name, value in zip(values, found, strict=True):
        if value is None:
            raise ArgumentError(f"{name}={shown(values[name])}: want a whole number")
    return tuple(each for each in found if each is not None)


class Mixture:
    """Several data sets mixed by weight: see `MixtureOrder`.

    Args:
        datasets: data sets whose records have the same fields.
        weights: one weight > 0 for each data set.
        seed: the seed of the mixing. Each data set keeps its own seed for its order and augmentation.
        length: samples of an epoch; by default the number of samples of all data sets together.

    Raises:
        ArgumentError: `MixtureOrder` rejects the arguments.
    """

    def __init__(
        self, datasets: Sequence[Dataset], weights: Sequence[float], *, seed: int = 0, length: int | None = None
    ) -> None:
        seed = require_seed("seed", seed)
        if not is_of(datasets, Sequence) or not datasets or not all(hasattr(each, "order") for each in datasets):
            raise ArgumentError(f"datasets={shown(datasets)}: want a list of data sets")
        self._datasets = tuple(datasets)
        counts = [len(each) for each in datasets]
        self.order: Order = MixtureOrder([each.order for each in datasets], weights, seed, length, counts)
        self.seed = seed
        self._firsts = np.concatenate([[0], np.cumsum(counts)])
        self.digest = digest_of_order("mixture of", [each.digest for each in datasets])

    def sample(self, number: int, epoch: int = 0, draw: int = 0) -> Record:
        """Return a sample. Numbers count through the data sets, one after the other.

        The errors are those of `Dataset.sample`.
        """
        number, epoch, draw = _whole_numbers(number=number, epoch=epoch, draw=draw)
        owner = int(np.searchsorted(self._firsts, number, side="right")) - 1
        if not 0 <= owner < len(self._datasets):
            raise IndexError(f"sample {number} does not exist: the data set has {len(self)} samples")
        return self._datasets[owner].sample(number - int(self._firsts[owner]), epoch, draw)

    def follow_job(self) -> int:
        """Call `follow_job` of each data set, and return the sum of the results."""
        return sum(each.follow_job() for each in self._datasets)

    def __len__(self) -> int:
        """Return the number of samples of all data sets together."""
        return int(self._firsts[-1])

    def __getitem__(self, number: int) -> Record:
        """Return a sample, augmented as in epoch 0."""
        return self.sample(number)
