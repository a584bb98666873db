"""`skip_bad`: unreadable samples are skipped and counted, and the remaining samples have the right weight."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiring.data import Dataset, Loader, Mixture
from multiring.data.feeding import leaving_out
from multiring.errors import DataError


def folder_of(where: Path, count: int, bad: set[int]) -> Dataset:
    where.mkdir()
    for number in range(count):
        np.save(where / f"{number:03}.npy", np.full(2, number))
    for number in bad:
        os.truncate(where / f"{number:03}.npy", 10)
    return Dataset(where, format="npy-files", shuffle="none")


@given(data=st.data(), count=st.integers(1, 12), batch=st.integers(1, 12), ranks=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_each_sample_that_can_be_read_counts_once_and_alike(
    data: st.DataObject, count: int, batch: int, ranks: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bad = data.draw(st.sets(st.integers(0, count - 1), max_size=count - 1))
    samples = folder_of(tmp_path_factory.mktemp("left") / "d", count, bad)
    weights: dict[int, dict[int, float]] = {}
    exact: dict[int, list[int]] = {}
    for rank in range(ranks):
        loader = Loader(samples, batch, rank=rank, ranks=ranks, skip_bad=True, workers=1)
        for each in loader:
            step = loader.state_dict()["samples"] + count * loader.state_dict()["epoch"]
            share = loader.share
            exact.setdefault(step, []).append(share.samples)
            assert len(each["array"]) == max(1, share.samples)
            for value in each["array"][: share.samples, 0].tolist():
                weights.setdefault(step, {})[value] = share.weight / share.samples
        loader.close()
    found = sorted(value for each in weights.values() for value in each)
    assert found == sorted(set(range(count)) - bad)
    for counts in weights.values():
        assert max(counts.values()) - min(counts.values()) < 1e-9
        if ranks == 1:
            assert sum(counts.values()) == pytest.approx(1)


def test_ranks_that_tell_each_other_have_the_exact_mean(tmp_path: Path) -> None:
    samples = folder_of(tmp_path / "d", 6, {0, 2, 5})
    counts = {0: [1, 2], 1: [3, 1], 2: [4, 2]}
    told: list[int] = []
    loader = Loader(samples, 3, ranks=1, skip_bad=True)
    loader.count_by(lambda own: (told.append(own), (counts[1][0] + own, 0))[1])  # type: ignore[func-returns-value]
    shares = [loader.share for _ in loader]
    assert told == [1, 2]
    assert [(each.samples, each.total, each.least) for each in shares] == [(1, 4, 0), (2, 5, 0)]


def test_the_first_sample_may_be_the_damaged_one(tmp_path: Path) -> None:
    loader = Loader(folder_of(tmp_path / "d", 8, {0, 1, 2, 3}), 4, skip_bad=True)
    assert [each["array"][:, 0].tolist() for each in loader] == [[4, 5, 6, 7]]
    assert loader.skipped == 4
    assert loader.state_dict()["samples"] == 0
    assert loader.state_dict()["epoch"] == 1


@pytest.mark.parametrize("odd", range(4))
def test_one_sample_unlike_the_others_is_left_out_not_the_others(odd: int, tmp_path: Path) -> None:
    samples = folder_of(tmp_path / "d", 8, set())
    np.save(tmp_path / "d" / f"{odd:03}.npy", np.full(3, odd))
    loader = Loader(samples, 4, skip_bad=True)
    found = [value for each in loader for value in each["array"][:, 0].tolist()]
    assert found == [number for number in range(8) if number != odd]
    assert loader.skipped == 1
    loader.close()


def test_a_source_that_fails_altogether_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving_out, "MOST", 4)
    with pytest.raises(DataError, match=r"none of the next samples \(at most 4\) can be read"):
        next(iter(Loader(folder_of(tmp_path / "d", 9, set(range(9))), 2, skip_bad=True)))
    loader = Loader(folder_of(tmp_path / "e", 9, set(range(3, 9))), 2, skip_bad=True)
    with pytest.raises(DataError, match="4 consecutive samples cannot be read"):
        list(loader)
    loader.close()


def test_a_mixture_with_damages(tmp_path: Path) -> None:
    parts = [folder_of(tmp_path / "a", 5, {1}), folder_of(tmp_path / "b", 5, {0, 4})]
    found: list[Any] = []
    loader = Loader(Mixture(parts, [1, 1]), 1, skip_bad=True)
    for each in loader:
        found += each["array"][:, 0].tolist()
    assert sorted(found) == [0, 1, 2, 2, 3, 3, 4]
    assert loader.skipped == 3
