"""A computed permutation: each number occurs once, the inverse works, and the statistics find no pattern."""

import numpy as np
import pytest
from tests.support.order_statistics import affine, fisher_yates, p_values

from multiring.data import permutation
from multiring.data.permutation import MOST, Permutation
from multiring.errors import ArgumentError

SIZES = (1, 2, 3, 7, 4096, 4097, 5000, 100_003)


@pytest.mark.parametrize("length", SIZES)
def test_each_number_comes_once_and_is_found_again(length: int) -> None:
    order = Permutation(length, 5, "some")
    found = order(np.arange(length))
    assert found.dtype == np.int64
    assert np.array_equal(np.sort(found), np.arange(length))
    assert np.array_equal(order.places_of(found), np.arange(length))
    some = np.arange(0, length, 3)[::-1]
    assert np.array_equal(order(some), found[some]), "a part gives other numbers than the whole"


@pytest.mark.parametrize("length", [2**33 + 1, MOST])
def test_large_domains_are_computed_where_they_are_asked_for(length: int) -> None:
    order = Permutation(length, 1)
    places = np.linspace(0, length - 1, 30_000).astype(np.int64)
    found = order(places)
    assert found.min() >= 0
    assert found.max() < length
    assert len(np.unique(found)) == len(np.unique(places))
    assert np.array_equal(order.places_of(found), places)


def test_it_is_the_same_on_every_machine() -> None:
    assert Permutation(10, 1, 2)(np.arange(10)).tolist() == [9, 5, 0, 3, 2, 7, 6, 1, 4, 8]
    assert Permutation(10**6, 1, 2)(np.arange(4)).tolist() == [151223, 245487, 533432, 978182]


@pytest.mark.parametrize(("length", "places"), [(0, []), (MOST + 1, []), (5, [5]), (5, [-1]), (10**6, [10**6])])
def test_what_is_out_of_range_is_refused(length: int, places: list[int]) -> None:
    with pytest.raises(ArgumentError, match="want"):
        Permutation(length, 0)(np.array(places, np.int64))


CASES = ((7, 3), (64, 8), (5000, 64), (1_000_000, 512))


@pytest.mark.parametrize(("length", "batch"), CASES)
def test_statistics_are_those_of_fisher_and_yates(length: int, batch: int) -> None:
    values = p_values(length, lambda key, places: Permutation(length, "test", key)(places), batch)
    assert min(values.values()) > 0.001, values


@pytest.mark.parametrize(("length", "batch"), CASES[:3])
def test_the_statistics_pass_fisher_and_yates(length: int, batch: int) -> None:
    values = p_values(length, fisher_yates(length), batch)
    assert min(values.values()) > 0.001, values


@pytest.mark.parametrize(("length", "batch"), CASES[2:])
def test_the_statistics_find_an_affine_map(length: int, batch: int) -> None:
    assert min(p_values(length, affine(length), batch).values()) < 1e-6


@pytest.mark.parametrize(("length", "batch"), CASES[2:])
def test_the_statistics_find_a_network_of_two_rounds(length: int, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutation, "_ROUNDS", 2)
    values = p_values(length, lambda key, places: Permutation(length, "test", key)(places), batch)
    assert min(values.values()) < 1e-6
