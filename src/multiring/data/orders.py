"""The order of an epoch's samples: sample = f(seed, epoch, position), whoever asks.

An order knows no ranks, workers or hosts. It holds a few numbers for each shard at most, and nothing for each sample
beyond a table of 32 KiB where there are few.
"""

import hashlib
import json
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from multiring.data.permutation import Numbers, Permutation, hashed, keyed_words
from multiring.errors import ArgumentError

Value = TypeVar("Value")

# A mixture's draws are shuffled in blocks of so many.
_MIXTURE_BLOCK = 4096
_HALF = Fraction(1, 2)
_KINDS = ("exact", "windowed", "none")


@dataclass(frozen=True, slots=True)
class Shuffle:
    """How a data set's samples are mixed.

    Attributes:
        kind: "exact": every order is as likely as any other. "windowed": samples of `window` shards are mixed at a
            time, which reads each shard once wherever it is. "none": as they are stored.
        window: of a windowed order, in shards.
        read_amplification: how many times the data set's bytes an exact order may read, as far as the format makes
            that needed.

    Raises:
        ArgumentError: no such kind, a window of no shards, or an amplification below 1.
    """

    kind: str = "exact"
    _: KW_ONLY
    window: int = 16
    read_amplification: float = 1.5

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ArgumentError(f"shuffle={self.kind!r}: want {' or '.join(map(repr, _KINDS))}, or a Shuffle of one")
        if self.window < 1:
            raise ArgumentError(f"Shuffle(window={self.window!r}): want 1 shard or more")
        if not self.read_amplification >= 1:
            raise ArgumentError(f"Shuffle(read_amplification={self.read_amplification!r}): want 1 or more")


class Recent(Generic[Value]):
    """The last few values that were made, by what they were made for; it can be pickled, which lru_cache cannot."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._made: dict[Hashable, Value] = {}

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Return the value for `key`."""
        found = self._made.get(key)
        if found is None:
            kept = list(self._made.items())[1 - self._most :]
            found = make()
            self._made = {**dict(kept), key: found}  # at once: other threads may read it
        return found


class Order(Protocol):
    """An epoch's order.

    Attributes:
        length: how many samples an epoch has.
        digest: 16 hexadecimal digits that change with everything that decides which sample stands where: the kind of
            order, its length, seed, window, shards, weights and sources. See `digest_of_order`.
    """

    length: int
    digest: str

    def samples(self, epoch: int, places: Any) -> Numbers:
        """Return the samples at `places` of an epoch: int64 of shape (k,), as `places`, integers from 0 on."""
        ...


def digest_of_order(kind: str, *told: Any) -> str:
    """Return 16 hexadecimal digits that change with the kind of an order and with each of the values it depends on.

    Args:
        kind: "exact", "windowed" and so on; also the version of the way in which it is computed.
        told: what else decides where samples stand, as JSON can say it.
    """
    return hashlib.blake2b(json.dumps([kind, *told]).encode(), digest_size=8).hexdigest()


def _within(places: Any, length: int) -> Numbers:
    numbers = np.asarray(places, dtype=np.int64)
    if numbers.size and (numbers.min() < 0 or numbers.max() >= length):
        raise ArgumentError(f"positions {numbers.min()} to {numbers.max()} of an epoch: want 0 to {length - 1}")
    return numbers


def _require_length(length: int) -> int:
    if length < 1:
        raise ArgumentError(f"an order of {length} samples: want at least one")
    return length


class SequentialOrder:
    """The samples as they are stored, in each epoch."""

    def __init__(self, length: int) -> None:
        self.length = _require_length(length)
        self.digest = digest_of_order("none", length)

    def samples(self, epoch: int, places: Any) -> Numbers:  # noqa: ARG002 -- an order's signature
        """Return the places themselves."""
        return _within(places, self.length)

    def places_of(self, epoch: int, samples: Any) -> Numbers:  # noqa: ARG002 -- as above
        """Return the samples themselves."""
        return _within(samples, self.length)


class ExactOrder:
    """All samples in an order of which each is, as far as statistics can tell, equally likely; another each epoch."""

    def __init__(self, length: int, seed: int) -> None:
        self.length = _require_length(length)
        self.digest = digest_of_order("exact", length, seed)
        self._seed = seed
        self._made: Recent[Permutation] = Recent(4)

    def samples(self, epoch: int, places: Any) -> Numbers:
        """Return the samples at `places` of an epoch."""
        return self._of_epoch(epoch)(places)

    def places_of(self, epoch: int, samples: Any) -> Numbers:
        """Return when an epoch uses `samples`: what prefetching and eviction go by."""
        return self._of_epoch(epoch).places_of(samples)

    def _of_epoch(self, epoch: int) -> Permutation:
        return self._made.get(epoch, lambda: Permutation(self.length, "exact", self._seed, epoch))


class WindowedOrder:
    """The shards in an exact order, and within each `window` of them the samples in an exact order.

    So no more than `window` shards are in use at a time. How much of an exact order that leaves depends on how the
    samples lie in their shards: samples of different windows never meet in a batch, but at a window's end.

    Args:
        shard_samples: how many samples each shard has, in the data set's order.
        window: in shards.
        seed: of the orders.

    Raises:
        ArgumentError: a window of no shards, or an empty shard.
    """

    def __init__(self, shard_samples: Sequence[int], window: int, seed: int) -> None:
        counts = np.asarray(shard_samples, dtype=np.int64)
        if window < 1 or not len(counts) or counts.min() < 1:
            raise ArgumentError(f"a window of {window} of {len(counts)} shards: want at least one, and no empty shard")
        self.length = int(counts.sum())
        self.digest = digest_of_order("windowed", counts.tolist(), window, seed)
        self.window = window
        self._counts = counts
        self._firsts = np.concatenate([[0], np.cumsum(counts)])
        self._seed = seed
        self._layouts: Recent[tuple[Numbers, Numbers]] = Recent(4)
        self._inners: Recent[Permutation] = Recent(8)

    def shards(self, epoch: int) -> Numbers:
        """Return the shards in the order in which an epoch's windows take them."""
        return self._layout(epoch)[0]

    def samples(self, epoch: int, places: Any) -> Numbers:
        """Return the samples at `places` of an epoch."""
        numbers = _within(places, self.length)
        order, begins = self._layout(epoch)
        result = np.empty_like(numbers)
        # Where windows begin: every window-th shard's beginning.
        windows = np.searchsorted(begins[:: self.window], numbers, side="right") - 1
        for window in np.unique(windows):
            chosen = windows == window
            first = window * self.window
            inner = self._inner(epoch, int(window))(numbers[chosen] - begins[first])
            inner += begins[first]
            shard = np.searchsorted(begins, inner, side="right") - 1
            result[chosen] = self._firsts[order[shard]] + inner - begins[shard]
        return result

    def places_of(self, epoch: int, samples: Any) -> Numbers:
        """Return when an epoch uses `samples`."""
        numbers = _within(samples, self.length)
        order, begins = self._layout(epoch)
        turn = np.empty_like(order)
        turn[order] = np.arange(len(order))
        shard = np.searchsorted(self._firsts, numbers, side="right") - 1
        inner = begins[turn[shard]] + numbers - self._firsts[shard]
        windows = turn[shard] // self.window
        result = np.empty_like(numbers)
        for window in np.unique(windows):
            chosen = windows == window
            begin = begins[window * self.window]
            result[chosen] = self._inner(epoch, int(window)).places_of(inner[chosen] - begin) + begin
        return result

    def _layout(self, epoch: int) -> tuple[Numbers, Numbers]:
        return self._layouts.get(epoch, lambda: self._laid_out(epoch))

    def _inner(self, epoch: int, window: int) -> Permutation:
        return self._inners.get((epoch, window), lambda: self._permutation(epoch, window))

    def _laid_out(self, epoch: int) -> tuple[Numbers, Numbers]:
        """Return the shards' order, and where in the epoch each begins as if the windows were not mixed."""
        shards = len(self._counts)
        order = Permutation(shards, "shards", self._seed, epoch)(np.arange(shards))
        return order, np.concatenate([[0], np.cumsum(self._counts[order])])[:-1]

    def _permutation(self, epoch: int, window: int) -> Permutation:
        _, begins = self._layout(epoch)
        first, last = window * self.window, (window + 1) * self.window
        end = int(begins[last]) if last < len(begins) else self.length
        return Permutation(end - int(begins[first]), "window", self._seed, epoch, window)


class WeightedOrder:
    """Samples drawn with replacement, each as often as its weight says.

    Args:
        weights: one for each sample, >= 0; only their proportions count.
        length: how many are drawn in an epoch.
        seed: of the draws.

    Raises:
        ArgumentError: a weight is negative or not finite, or all are 0.
    """

    def __init__(self, weights: Sequence[float] | NDArray[np.floating[Any]], length: int, seed: int) -> None:
        self.length = _require_length(length)
        shares = np.asarray(weights, dtype=np.float64)
        if shares.ndim != 1 or not np.isfinite(shares).all() or (shares < 0).any() or not shares.sum() > 0:
            raise ArgumentError("weights: want one finite number >= 0 for each sample, and one > 0 among them")
        self._edges = np.cumsum(shares / shares.sum())
        told = hashlib.blake2b(self._edges.astype("<f8").tobytes(), digest_size=16).hexdigest()
        self.digest = digest_of_order("weighted", told, length, seed)
        # What rounding left of 1 belongs to the last sample that has a weight.
        self._last = int(np.flatnonzero(shares)[-1])
        self._seed = seed

    def samples(self, epoch: int, places: Any) -> Numbers:
        """Return the samples drawn at `places` of an epoch."""
        numbers = _within(places, self.length)
        (word,) = keyed_words(1, "weighted", self._seed, epoch)
        drawn = (hashed(numbers.astype(np.uint64), word) >> np.uint64(11)) * 2.0**-53
        found = np.searchsorted(self._edges, drawn, side="right")
        numbers_drawn: Numbers = np.minimum(found, self._last).astype(np.int64)
        return numbers_drawn


class MixtureOrder:
    """Several data sets by weight: each is gone through in its own order, again and again, as fast as its weight says.

    Samples are numbered through the data sets: those of the second follow those of the first. At the end of every
    4,096 draws of an epoch, and of the epoch, each data set has had what its weight says, as nearly as whole samples
    can, counted from the first epoch on. Within 4,096 draws it is random which data set comes when. The samples of each
    come in its own order all the same.

    Args:
        sources: their orders.
        weights: one for each, > 0; only their proportions count.
        seed: of the mixing.
        length: of an epoch, in samples; by default as many as all have together.
        numbered: how many numbers each data set takes, where an order's epoch is not as long as its data set.

    Raises:
        ArgumentError: no source, another number of weights, or one that is no number > 0.
    """

    def __init__(
        self,
        sources: Sequence[Order],
        weights: Sequence[float],
        seed: int,
        length: int | None = None,
        numbered: Sequence[int] | None = None,
    ) -> None:
        if not sources or len(weights) != len(sources) or not all(0 < each < math.inf for each in weights):
            raise ArgumentError(f"{len(sources)} data sets and weights {list(weights)}: want one > 0 for each")
        self.length = _require_length(sum(each.length for each in sources) if length is None else length)
        self._sources = tuple(sources)
        # Exact, so that counts are the same on every machine.
        exact = [Fraction(float(each)) for each in weights]
        self._parts = [each / sum(exact) for each in exact]
        counts = [each.length for each in sources] if numbered is None else list(numbered)
        self._firsts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._seed = seed
        self._blocks: Recent[tuple[Numbers, Numbers]] = Recent(8)
        told = [[each.digest, repr(float(weight)), n] for each, weight, n in zip(sources, weights, counts, strict=True)]
        self.digest = digest_of_order("mixture 2", told, self.length, seed)

    def samples(self, epoch: int, places: Any) -> Numbers:
        """Return the samples at `places` of an epoch, numbered through the data sets."""
        numbers = _within(places, self.length)
        blocks, inner = np.divmod(numbers, _MIXTURE_BLOCK)
        owners, turns = np.empty_like(inner), np.empty_like(inner)
        for block in np.unique(blocks):
            chosen = blocks == block
            of_block, turn_of = self._dealt(epoch, int(block))
            owners[chosen], turns[chosen] = of_block[inner[chosen]], turn_of[inner[chosen]]
        result = np.empty_like(numbers)
        for number, source in enumerate(self._sources):
            chosen = owners == number
            passes, within = np.divmod(turns[chosen], source.length)
            found = np.empty_like(within)
            for one in np.unique(passes):
                of_pass = passes == one
                found[of_pass] = source.samples(int(one), within[of_pass])
            result[chosen] = found + self._firsts[number]
        return result

    def _drawn(self, draws: int) -> Numbers:
        """Return how many of the first `draws` draws each source has, by Webster's method.

        More draws never give a source fewer (Balinski & Young, "Fair Representation", 1982), so that every block has a
        whole number of each source's draws, none of them below 0.
        """
        counts = [math.floor(each * draws + _HALF) for each in self._parts]
        numbers = range(len(counts))
        while (lacking := draws - sum(counts)) > 0:
            counts[min(numbers, key=lambda each: ((counts[each] + _HALF) / self._parts[each], each))] += 1
        while lacking < 0:
            counts[max(numbers, key=lambda each: ((counts[each] - _HALF) / self._parts[each], each))] -= 1
            lacking += 1
        return np.array(counts, np.int64)

    def _dealt(self, epoch: int, block: int) -> tuple[Numbers, Numbers]:
        return self._blocks.get((epoch, block), lambda: self._deal(epoch, block))

    def _deal(self, epoch: int, block: int) -> tuple[Numbers, Numbers]:
        """Return for each draw of a block whose it is, and which of that source's samples, counted from epoch 0 on."""
        begin = block * _MIXTURE_BLOCK
        size = min(_MIXTURE_BLOCK, self.length - begin)
        before = self._drawn(epoch * self.length + begin)
        counts = self._drawn(epoch * self.length + begin + size) - before
        shuffled = Permutation(size, "mixture", self._seed, epoch, block)(np.arange(size))
        owners = np.searchsorted(np.cumsum(counts), shuffled, side="right").astype(np.int64)
        # Draws of one source, in the order in which they come, take its next samples.
        by_source = np.argsort(owners, kind="stable")
        turns = np.empty(size, np.int64)
        turns[by_source] = np.arange(size) - np.repeat(np.cumsum(counts) - counts - before, counts)
        return owners, turns
