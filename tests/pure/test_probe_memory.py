"""The probe within one host: the link computed from measured times, and the detection of other work."""

import random

import numpy as np
import pytest

from multiring._collectives import build
from multiring._probe.fit import memory_link
from multiring._probe.other_work import most_taken
from multiring._schedule import Collective, Frame, price
from multiring._topology import Link

MIB = 1 << 20


def seconds(algorithm: str, ranks: int, size_bytes: int, link: Link) -> float:
    frame = Frame(collective=Collective.ALL_REDUCE, grid=(ranks,), order=tuple(range(ranks)))
    return price(build(algorithm, frame), size_bytes, (link,))


@pytest.mark.parametrize("seed", range(20))
def test_the_link_has_the_prices_that_were_measured(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 -- a test's
    ranks, small_s, direct_s = draw.choice([2, 3, 4, 8]), draw.uniform(1e-6, 1e-4), draw.uniform(1e-3, 1e-1)
    # Times that some link can produce. For 2 ranks their ratio is 4 without sending costs and 1 without reducing costs.
    exchange_s = direct_s * draw.uniform(1.3, 3.5) * ranks / 2
    link = memory_link(ranks, small_s, direct_s, exchange_s, 8 * MIB)
    assert seconds("exchange", ranks, 8 * MIB, link) == pytest.approx(exchange_s, rel=0.1)
    assert seconds("direct", ranks, 8 * MIB, link) == pytest.approx(direct_s, rel=0.1)
    assert seconds("exchange", ranks, 4, link) == pytest.approx(small_s, rel=0.05)


@pytest.mark.parametrize("times", [0.1, 1.0, 4.4, 10.0, 1000.0])
def test_whatever_an_exchange_took_a_direct_sum_keeps_its_price(times: float) -> None:
    link = memory_link(2, 5e-6, 1e-3, times * 1e-3, 8 * MIB)
    assert seconds("direct", 2, 8 * MIB, link) == pytest.approx(1e-3, rel=0.05)


def table(*rows: tuple[float, ...]) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
    return np.array(rows)


def test_what_others_took_is_told_of_the_machine_where_it_was_most() -> None:
    # (machine, cores, seconds, core seconds of all work, core seconds of this rank)
    mine = [(1, 2, 10, 18.0, 4.0), (1, 2, 10, 18.1, 5.0)]
    other = [(2, 4, 10, 11.0, 10.0)]
    found = most_taken(table(*mine), [0, 0], ("a",))
    assert str(found) == "Other work took 0.9 of 2 cores meanwhile"
    found = most_taken(table(*mine, *other), [0, 0, 1], ("a", "b"))
    assert str(found) == "Other work took 0.9 of 2 cores of host a meanwhile"
    assert most_taken(table(*other), [0], ("b",)) is None
    assert str(most_taken(table((3, 1, 10, 9.0, 2.0)), [0], ("c",))) == "Other work took 0.7 of 1 core meanwhile"
