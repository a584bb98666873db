"""The order of an epoch's samples: sample = f(seed, epoch, position).

An order does not depend on ranks, workers or hosts. It stores at most a few numbers for each shard. It stores nothing
for each sample, except a table of 32 KiB if there are few samples.
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

from multiring._arguments import is_number, is_of, require_whole, shown, whole
from multiring.data.permutation import Numbers, Permutation, hashed, keyed_words
from multiring.errors import ArgumentError

Value = TypeVar("Value")

# A mixture's draws are shuffled within blocks of this size.
_MIXTURE_BLOCK = 4096
_HALF = Fraction(1, 2)
_KINDS = ("exact", "windowed", "none")


@dataclass(frozen=True, slots=True)
class Shuffle:
    """How a data set's samples are shuffled.

    Attributes:
        kind: "exact": every order is equally likely. "windowed": the samples of `window` shards are mixed at a time, so
            that each shard is read once, wherever it is stored. "none": the stored order.
        window: the number of shards in a window of a windowed order.
        read_amplification: how many times the data set's bytes an exact order may read in an epoch. A format that
            cannot read single samples needs more than 1.

    Raises:
        ArgumentError: the kind is unknown, the window has no shards, or the amplification is below 1.
    """

    kind: str = "exact"
    _: KW_ONLY
    window: int = 16
    read_amplification: float = 1.5

    def __post_init__(self) -> None:
        if not is_of(self.kind, str) or self.kind not in _KINDS:
            raise ArgumentError(f"shuffle={self.kind!r}: want {' or '.join(map(repr, _KINDS))}, or a Shuffle of these")
        require_whole("Shuffle: window", self.window, 1, wanted="1 shard or more, a whole number")
        if not is_number(self.read_amplification) or not self.read_amplification >= 1:  # so that NaN is wrong
            raise ArgumentError(f"Shuffle: read_amplification={shown(self.read_amplification)}: want 1 or more")


class Recent(Generic[Value]):
    """A cache of the last few computed values by key.

    Unlike lru_cache, it can be pickled.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._made: dict[Hashable, Value] = {}

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Return the value for `key`; call `make` if it is not cached."""
        found = self._made.get(key)
        if found is None:
            kept = list(self._made.items())[1 - self._most :]
            found = make()
            self._made = {**dict(kept), key: found}  # one assignment, because other threads may read the dict
        return found


class Order(Protocol):
    """The order of the samples in each epoch.

    Attributes:
        length: the number of samples of an epoch.
        digest: 16 hexadecimal digits, a digest of everything that determines the position of each sample: the kind of
            order, its length, seed, window, shards, weights and sources. See `digest_of_order`.
    """

    length: int
    digest: str

    def samples(self, epoch: int, places: Any) -> Numbers:
        """Return the samples at `places` of an epoch, integers (k,), as int64 (k,)."""
        ...


def digest_of_order(kind: str, *told: Any) -> str:
    """Return a digest of an order: 16 hexadecimal digits.

    Args:
        kind: "exact", "windowed" and so on, with a version number if its computation has changed.
        told: the other values that determine the order, of types that JSON can encode.
    """
    return hashlib.blake2b(json.dumps([kind, *told]).encode(), digest_size=8).hexdigest()


def _within(places: Any, length: int) -> Numbers:
    numbers = np.asarray(places, dtype=np.int64)
    if numbers.size and (numbers.min() < 0 or numbers.max() >= length):
        raise ArgumentError(f"positions {numbers.min()} to {numbers.max()} of an epoch: want 0 to {length - 1}")
    return numbers


def _require_length(length: int) -> int:
    found = whole(length)
    if found is None or found < 1:
        raise ArgumentError(f"an order of {shown(length)} samples: want at least one, and a whole number")
    return found


class SequentialOrder:
    """The order in which samples are stored; it is the same in each epoch."""

    def __init__(self, length: int) -> None:
        self.length = _require_length(length)
        self.digest = digest_of_order("none", length)

    def samples(self, epoch: int, places: Any) -> Numbers:  # noqa: ARG002 -- an order's signature
        """Return the places themselves: the stored order."""
        return _within(places, self.length)

    def places_of(self, epoch: int, samples: Any) -> Numbers:  # noqa: ARG002 -- as above
        """Return the samples themselves."""
        return _within(samples, self.length)


class ExactOrder:
    """A new order of all samples for each epoch.

    As far as statistics can tell, all orders are equally likely.
    """

    def __init__(self, length: int, seed: int) -> None:
        self.length = _require_length(length)
        self.digest = digest_of_order("exact", length, seed)
        self._seed = seed
        self._made: Recent[Permutation] = Recent(4)

    def samples(self, epoch: int, places: Any) -> Numbers:
        """Return the samples at `places` of an epoch."""
        return self._of_epoch(epoch)(places)

    def places_of(self, epoch: int, samples: Any) -> Numbers:
        """Return the positions of `samples` in an epoch.

        Prefetching and eviction use them.
        """
        return self._of_epoch(epoch).places_of(samples)

    def _of_epoch(self, epoch: int) -> Permutation:
        return self._made.get(epoch, lambda: Permutation(self.length, "exact", self._seed, epoch))


class WindowedOrder:
    """The shards in an exact order, divided into windows; each window is shuffled.

    At most `window` shards are in use at a time. Samples of two windows meet in a batch only where a window ends. If
    neighbouring samples of a shard are similar, the result is therefore less random than an exact order.

    Args:
        shard_samples: the number of samples of each shard, in the data set's order.
        window: the number of shards in a window.
        seed: the seed of the orders.

    Raises:
        ArgumentError: `window` is below 1, or a shard is empty.
    """

    def __init__(self, shard_samples: Sequence[int], window: int, seed: int) -> None:
        counts = np.asarray(shard_samples, dtype=np.int64)
        if window < 1 or not len(counts) or counts.min() < 1:
            raise ArgumentError(
                f"a window of {window} of {len(counts)} shards: want at least one shard, and no empty shard"
            )
        self.length = int(counts.sum())
        self.digest = digest_of_order("windowed", counts.tolist(), window, seed)
        self.window = window
        self._counts = counts
        self._firsts = np.concatenate([[0], np.cumsum(counts)])
        self._seed = seed
        self._layouts: Recent[tuple[Numbers, Numbers]] = Recent(4)
        self._inners: Recent[Permutation] = Recent(8)

    def shards(self, epoch: int) -> Numbers:
        """Return the shards in the order in which an epoch reads them."""
        return self._layout(epoch)[0]

    def samples(self, epoch: int, places: Any) -> Numbers:
        """Return the samples at `places` of an epoch."""
        numbers = _within(places, self.length)
        order, begins = self._layout(epoch)
        result = np.empty_like(numbers)
        # A window begins at every window-th shard.
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
        """Return the positions of `samples` in an epoch."""
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
        """Return the shards' order, and the position at which each shard would begin if samples were not mixed."""
        shards = len(self._counts)
        order = Permutation(shards, "shards", self._seed, epoch)(np.arange(shards))
        return order, np.concatenate([[0], np.cumsum(self._counts[order])])[:-1]

    def _permutation(self, epoch: int, window: int) -> Permutation:
        _, begins = self._layout(epoch)
        first, last = window * self.window, (window + 1) * self.window
        end = int(begins[last]) if last < len(begins) else self.length
        return Permutation(end - int(begins[first]), "window", self._seed, epoch, window)


def numbers_of(values: Any) -> NDArray[np.float64] | None:
    """Return numbers as float64; None if they are texts or truth values, or no sequence of numbers."""
    if isinstance(values, list | tuple) and any(isinstance(each, bool | str | bytes) for each in values):
        return None  # NumPy would make numbers of truth values beside numbers
    try:
        found = np.asarray(values)
        return found.astype(np.float64) if found.dtype.kind in "iufO" else None
    except (TypeError, ValueError, RuntimeError):  # of objects that are no numbers, or of an array on a device
        return None


class WeightedOrder:
    """Samples drawn with replacement, in proportion to their weights.

    Args:
        weights: one weight >= 0 for each sample; only their proportions matter.
        length: draws of an epoch.
        seed: the seed of the draws.

    Raises:
        ArgumentError: a weight is negative or not finite, or all weights are 0.
    """

    def __init__(self, weights: Sequence[float] | NDArray[np.floating[Any]], length: int, seed: int) -> None:
        self.length = _require_length(length)
        shares = numbers_of(weights)
        is_right = shares is not None and shares.ndim == 1 and np.isfinite(shares).all() and (shares >= 0).all()
        if shares is None or not is_right or not shares.sum() > 0:
            raise ArgumentError("weights: want one finite number >= 0 for each sample, and at least one weight > 0")
        self._edges = np.cumsum(shares / shares.sum())
        told = hashlib.blake2b(self._edges.astype("<f8").tobytes(), digest_size=16).hexdigest()
        self.digest = digest_of_order("weighted", told, self.length, seed)
        # If rounding leaves the last edge below 1, draws beyond it take the last sample with a weight above 0.
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
    """Several data sets mixed by weight.

    Each data set is repeated in its own order, at a rate given by its weight.

    Samples are numbered through the data sets: the numbers of the second follow those of the first. An epoch's draws
    are divided into blocks of 4,096. After each block, every data set has contributed its share of all draws since the
    first epoch, rounded to whole samples. Within a block, the data sets come in random order. The samples of each data
    set still come in that data set's own order.

    Args:
        sources: the orders of the data sets.
        weights: one weight > 0 for each data set; only their proportions matter.
        seed: the seed of the mixing.
        length: samples of an epoch; by default the sum of the lengths of `sources`.
        numbered: the number of samples of each data set, needed if an order's epoch has another length.

    Raises:
        ArgumentError: there is no source, the number of weights is wrong, or a weight is not a finite number > 0.
    """

    def __init__(
        self,
        sources: Sequence[Order],
        weights: Sequence[float],
        seed: int,
        length: int | None = None,
        numbered: Sequence[int] | None = None,
    ) -> None:
        shares = numbers_of(weights)
        is_right = shares is not None and shares.shape == (len(sources),) and np.isfinite(shares).all()
        if shares is None or not sources or not is_right or not (shares > 0).all():
            raise ArgumentError(f"{len(sources)} data sets and weights {shown(weights)}: want a weight > 0 for each")
        self.length = _require_length(sum(each.length for each in sources) if length is None else length)
        self._sources = tuple(sources)
        # Fractions are exact, so that the counts are the same on every machine.
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
        """Return each source's share of the first `draws` draws, by Webster's method.

        With this method, more draws never reduce a source's share (Balinski & Young, "Fair Representation", 1982). A
        block's draws of a source are the difference of two shares, and are therefore never negative.
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
        """Return each draw's source, and its index among all draws of this source since epoch 0."""
        begin = block * _MIXTURE_BLOCK
        size = min(_MIXTURE_BLOCK, self.length - begin)
        before = self._drawn(epoch * self.length + begin)
        counts = self._drawn(epoch * self.length + begin + size) - before
        shuffled = Permutation(size, "mixture", self._seed, epoch, block)(np.arange(size))
        owners = np.searchsorted(np.cumsum(counts), shuffled, side="right").astype(np.int64)
        # The draws of one source take this source's next samples, in the order of the draws.
        by_source = np.argsort(owners, kind="stable")
        turns = np.empty(size, np.int64)
        turns[by_source] = np.arange(size) - np.repeat(np.cumsum(counts) - counts - before, counts)
        return owners, turns
