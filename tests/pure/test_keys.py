"""Keys, sums and words of equal things are equal in any order of arrival, and differ for different things."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from multiring._frontend.checkpoint.arrays import WordSum
from multiring._frontend.signatures import allreduce_signature, plain_signature, rows_signature

EQUALS: list[tuple[Callable[..., Any], list[tuple[Any, ...]]]] = [
    (
        allreduce_signature,
        [
            ("float32", shape, "sum", scales, None)
            for shape in ((2, 3), (np.int64(2), np.int32(3)))
            for scales in ((1.0, 0.0), (1, 0), (True, -0.0), (np.float32(1), np.float64(0)))
        ],
    ),
    (plain_signature, [("x", "int8", shape) for shape in ((1, 2), (np.int64(1), np.int64(2)), (True, 2))]),
    (rows_signature, [("x", "int8", shape) for shape in ((1, 2), (np.int64(1), np.int64(2)), (1, np.uint8(2)))]),
]


@pytest.mark.parametrize(("words", "equals"), EQUALS, ids=lambda each: getattr(each, "__name__", ""))
def test_words_of_equal_calls_are_equal_whoever_was_first(words: Any, equals: list[Any]) -> None:
    found = []
    for first in equals:
        words.cache_clear()
        found += [words(*first), words(*equals[0])]
    assert len(set(map(str, found))) == 1, set(map(str, found))


def summed(data: bytes, chosen: random.Random) -> str:
    """Return the sum of bytes that arrive in pieces of any size."""
    total, at = WordSum(), 0
    while at < len(data):
        size = chosen.choice((1, 3, 8, 100, 4096, 5000, 100_000))
        total.add(data[at : at + size])
        at += size
    return total.value()


def test_a_checkpoints_sum_changes_with_every_word_and_with_the_order_of_pages() -> None:
    chosen = random.Random(1)  # noqa: S311 -- no secret
    data = chosen.randbytes(5 * 4096 + 1001)
    wanted = summed(data, chosen)
    assert {summed(data, chosen) for _ in range(20)} == {wanted}
    others = {summed(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], chosen) for at in range(0, len(data), 61)}
    pages = [data[at : at + 4096] for at in range(0, len(data), 4096)]
    for one in range(5):
        for other in range(one):
            swapped = list(pages)
            swapped[one], swapped[other] = pages[other], pages[one]
            others.add(summed(b"".join(swapped), chosen))
    assert wanted not in others
