"""Permutations of 0 ... n - 1 that a key determines. Permutations and their inverses are computed, not stored.

For a large n, a Feistel network works on pairs (x // b, x mod b), with b a power of two near the square root of n. It
adds to one half modulo a = ceil(n / b), and XORs the other half. The network permutes 0 ... a b - 1, which exceeds n by
less than b. A result of n or more goes through the network again until it is below n (cycle walking: Black & Rogaway,
"Ciphers with Arbitrary Finite Domains", CT-RSA 2002, doi:10.1007/3-540-45760-7_9).

For a small n, the numbers are sorted by a hash, so that each order is equally likely. A network with such narrow halves
would favour some orders.

The permutation is not a cipher: its order has no visible pattern, but it is not secret. tests/pure/test_permutation.py
compares it with Fisher-Yates.
"""

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.errors import ArgumentError

MOST = 1 << 48
# Up to this many numbers, the permutation is a sorted table of 32 KiB.
_TABLE = 1 << 12
_ROUNDS = 8
# Numbers that are computed at a time: the intermediate arrays then fit into the fastest CPU caches.
_BLOCK = 1 << 13
# The multipliers of lowbias32, found by search (C. Wellons, github.com/skeeto/hash-prospector, public domain).
_FIRST, _SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_LOW, _HIGH = np.uint32(16), np.uint32(15)
_WORD = np.uint64(32)

Numbers = NDArray[np.int64]


def keyed_words(count: int, *key: int | str) -> NDArray[np.uint64]:
    """Return `count` 64-bit words derived from `key`, the same on every machine."""
    text = " ".join(str(each) for each in key).encode()
    data = hashlib.shake_128(text).digest(8 * count)
    return np.frombuffer(data, dtype="<u8").astype(np.uint64)


def hashed(numbers: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each number, by splitmix64's finaliser.

    Source: Steele et al., OOPSLA 2014, doi:10.1145/2660193.2660195.
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
    """A permutation of 0 ... `length` - 1, determined by a key.

    Args:
        length: 1 to 2^48.
        key: integers and strings. Different keys give different orders.

    Raises:
        ArgumentError: the length is out of range.
    """

    def __init__(self, length: int, *key: int | str) -> None:
        if not 1 <= length <= MOST:
            raise ArgumentError(f"a permutation of {length} numbers: want 1 to 2^48")
        self.length = length
        self._key = key
        self._numbers: Numbers | None = None
        self._places: Numbers | None = None
        if length > _TABLE:
            self._bits = max(1, (length - 1).bit_length() // 2)
            self._rows = -(-length >> self._bits)
            words = keyed_words(_ROUNDS, "rounds", length, *key)
            self._keys = [(np.uint32(word & np.uint64(0xFFFFFFFF)), np.uint32(word >> _WORD)) for word in words]

    def __call__(self, places: Any) -> Numbers:
        """Return the numbers at `places`, integers (k,) below `length`, as int64 (k,)."""
        return self._mapped(places, back=False)

    def places_of(self, numbers: Any) -> Numbers:
        """Return the places of `numbers`, integers (k,), as int64 (k,): the inverse."""
        return self._mapped(numbers, back=True)

    def _mapped(self, given: Any, *, back: bool) -> Numbers:
        numbers = np.ascontiguousarray(given, dtype=np.int64)
        if numbers.size and (numbers.min() < 0 or numbers.max() >= self.length):
            raise ArgumentError(f"numbers {numbers.min()} to {numbers.max()}: want 0 to {self.length - 1}")
        if self.length <= _TABLE:
            found: Numbers = (self._back() if back else self._table())[numbers]
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

    # Python 3.11's `cached_property` has one lock for all objects, which a fork could find taken, without an end.

    def _table(self) -> Numbers:
        """Return the numbers by place, int64 (length,)."""
        if self._numbers is None:
            (word,) = keyed_words(1, "table", self.length, *self._key)
            # A stable sort gives the same order on every machine, even if two hashes are equal.
            self._numbers = np.argsort(hashed(np.arange(self.length, dtype=np.uint64), word), kind="stable")
        return self._numbers

    def _back(self) -> Numbers:
        """Return the places by number, int64 (length,)."""
        if self._places is None:
            back = np.empty_like(self._table())
            back[self._table()] = np.arange(self.length)
            self._places = back
        return self._places

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
            # The upper half of the product is in 0 ... rows - 1. Without `dtype`, NumPy 1 would compute only 32 bits.
            np.multiply(mixed, np.uint64(rows), out=wide, dtype=np.uint64, casting="unsafe")
            np.right_shift(wide, _WORD, out=wide)
            np.copyto(mixed, wide, casting="unsafe")
            if back:
                np.subtract(np.uint32(rows), mixed, out=mixed)
            row += mixed
            # Reduce modulo `rows`: if row < rows, the subtraction wraps to a large number, and the minimum is row.
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
