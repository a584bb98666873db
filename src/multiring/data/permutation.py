"""A permutation of 0 ... n - 1 that is computed, not stored: where a key puts each number, and back.

Large domains take a Feistel network on pairs (x // b, x mod b) with b a power of two near the square root of n; one
half is added to modulo a = ceil(n / b), the other xored, so that the domain a b has less than b numbers too many, which
are walked on from until they fall within n (Black & Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002,
doi:10.1007/3-540-45760-7_9). Few numbers are sorted by a hash instead, which gives each order equally often; a network
of so narrow halves would not.

It is no cipher: its order is to be without pattern, not secret. tests/pure/test_permutation.py holds it against
Fisher-Yates.
"""

import hashlib
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.errors import ArgumentError

MOST = 1 << 48
# Up to so many numbers a table is sorted: 32 KiB.
_TABLE = 1 << 12
_ROUNDS = 8
# So many numbers at a time: what is computed with stays in the nearest caches.
_BLOCK = 1 << 13
# The multipliers of lowbias32, found by search (C. Wellons, github.com/skeeto/hash-prospector, public domain).
_FIRST, _SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_LOW, _HIGH = np.uint32(16), np.uint32(15)
_WORD = np.uint64(32)

Numbers = NDArray[np.int64]


def keyed_words(count: int, *key: int | str) -> NDArray[np.uint64]:
    """Return `count` 64-bit words that `key` says, the same on every machine."""
    text = " ".join(str(each) for each in key).encode()
    data = hashlib.shake_128(text).digest(8 * count)
    return np.frombuffer(data, dtype="<u8").astype(np.uint64)


def hashed(numbers: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Return 64 bits for each number, without pattern: splitmix64's finaliser (Steele et al., OOPSLA 2014).

    Source: doi:10.1145/2660193.2660195.
    """
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15) + key
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    found: NDArray[np.uint64] = mixed
    return found


class Permutation:
    """The order that a key gives to 0 ... `length` - 1.

    Args:
        length: 1 to 2^48.
        key: integers and words; another key gives another order.

    Raises:
        ArgumentError: the length is out of range.
    """

    def __init__(self, length: int, *key: int | str) -> None:
        if not 1 <= length <= MOST:
            raise ArgumentError(f"a permutation of {length} numbers: want 1 to 2^48")
        self.length = length
        self._key = key
        if length > _TABLE:
            self._bits = max(1, (length - 1).bit_length() // 2)
            self._rows = -(-length >> self._bits)
            words = keyed_words(_ROUNDS, "rounds", length, *key)
            self._keys = [(np.uint32(word & np.uint64(0xFFFFFFFF)), np.uint32(word >> _WORD)) for word in words]

    def __call__(self, places: Any) -> Numbers:
        """Return the numbers at `places`, integers in 0 ... length - 1 of shape (k,): int64 of the same shape."""
        return self._mapped(places, back=False)

    def places_of(self, numbers: Any) -> Numbers:
        """Return where `numbers` of shape (k,) stand: the inverse."""
        return self._mapped(numbers, back=True)

    def _mapped(self, given: Any, *, back: bool) -> Numbers:
        numbers = np.ascontiguousarray(given, dtype=np.int64)
        if numbers.size and (numbers.min() < 0 or numbers.max() >= self.length):
            raise ArgumentError(f"{numbers.min()} to {numbers.max()}: want 0 to {self.length - 1}")
        if self.length <= _TABLE:
            found: Numbers = (self._back if back else self._table)[numbers]
            return found
        result = np.empty_like(numbers)
        for begin in range(0, len(numbers), _BLOCK):
            block = self._network(numbers[begin : begin + _BLOCK], back=back)
            beyond = np.flatnonzero(block >= self.length)
            while len(beyond):
                block[beyond] = self._network(block[beyond], back=back)
                beyond = beyond[block[beyond] >= self.length]
            result[begin : begin + _BLOCK] = block
        return result

    @cached_property
    def _table(self) -> Numbers:
        (word,) = keyed_words(1, "table", self.length, *self._key)
        # Stable: should two hashes ever be equal, every machine breaks the tie alike.
        return np.argsort(hashed(np.arange(self.length, dtype=np.uint64), word), kind="stable")

    @cached_property
    def _back(self) -> Numbers:
        back = np.empty_like(self._table)
        back[self._table] = np.arange(self.length)
        return back

    def _network(self, numbers: Numbers, *, back: bool) -> Numbers:
        rows, mask = self._rows, np.uint32((1 << self._bits) - 1)
        row = (numbers >> self._bits).astype(np.uint32)
        column = numbers.astype(np.uint32) & mask
        mixed, moved = np.empty_like(row), np.empty_like(row)
        wide = np.empty(len(row), np.uint64)
        for number in reversed(range(_ROUNDS)) if back else range(_ROUNDS):
            if number % 2:
                self._mix(row, number, mixed, moved)
                np.right_shift(mixed, _LOW if self._bits <= 16 else np.uint32(32 - self._bits), out=mixed)
                mixed &= mask
                column ^= mixed
                continue
            self._mix(column, number, mixed, moved)
            # In 0 ... rows - 1: the upper half of the product, which NumPy 1 would compute as wide as rows is.
            np.multiply(mixed, np.uint64(rows), out=wide, dtype=np.uint64, casting="unsafe")
            np.right_shift(wide, _WORD, out=wide)
            np.copyto(mixed, wide, casting="unsafe")
            if back:
                np.subtract(np.uint32(rows), mixed, out=mixed)
            row += mixed
            # Modulo rows: what is smaller than it wraps far beyond when it is taken off.
            np.subtract(row, np.uint32(rows), out=moved)
            np.minimum(row, moved, out=row)
        result = row.astype(np.int64)
        result <<= self._bits
        result |= column
        return result

    def _mix(self, half: NDArray[np.uint32], number: int, out: NDArray[np.uint32], moved: NDArray[np.uint32]) -> None:
        first, second = self._keys[number]
        np.add(half, first, out=out)
        np.multiply(out, _FIRST, out=out)
        np.right_shift(out, _HIGH, out=moved)
        np.bitwise_xor(out, moved, out=out)
        np.bitwise_xor(out, second, out=out)
        np.multiply(out, _SECOND, out=out)
        np.right_shift(out, _LOW, out=moved)
        np.bitwise_xor(out, moved, out=out)
