"""Rows of a file, read by one native call: complete rows, short rows and rejected calls."""

import os
from pathlib import Path

import numpy as np
import pytest
from tests.support.data_sets import COUNT, npy_files

from multiring._native import read_rows
from multiring.data import Dataset, Loader
from multiring.data.packing.writing import PackOptions, pack
from multiring.data.readers.storage import LocalStorage, Tails
from multiring.errors import DataError


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_rows_and_what_follows_them(tmp_path: Path) -> None:
    names = [str(number) for number in range(100)]
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(bytes((number + each) % 256 for each in range(100)))
    storage = LocalStorage(str(tmp_path))
    rows, tails = np.zeros(12, np.uint8), Tails.of_sizes(numbers(2, 0, 3))
    storage.read_rows(["0", "1"], numbers(0, 1, 0), numbers(10, 50, 90), rows, tails)
    assert rows.reshape(3, 4).tolist() == [[*range(10, 14)], [*range(51, 55)], [*range(90, 94)]]
    assert tails.memory.tolist() == [14, 15, 94, 95, 96]
    # More files than the storage keeps open at a time.
    rows, tails, files = np.zeros(300, np.uint8), Tails.of_sizes(np.ones(100, np.int64)), np.arange(100)[::-1]
    storage.read_rows(names, files, np.arange(100) % 90, rows, tails)
    firsts = files + np.arange(100) % 90
    assert rows.reshape(100, 3).tolist() == (firsts[:, None] + np.arange(3)).tolist()
    assert tails.memory.tolist() == (firsts + 3).tolist()


def test_a_file_that_ends_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    storage = LocalStorage(str(tmp_path))
    with pytest.raises(DataError, match="ends at byte 100; bytes 98 to 102 are needed"):
        storage.read_rows(["file"], numbers(0, 0), numbers(0, 98), np.zeros(8, np.uint8), Tails.of_sizes(numbers(0, 0)))
    with pytest.raises(DataError, match="ends at byte 100; bytes 98 to 104 are needed"):
        storage.read_rows(["file"], numbers(0), numbers(94), np.zeros(4, np.uint8), Tails.of_sizes(numbers(6)))


def test_memory_of_other_sizes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    none, some = np.zeros(0, np.uint8), np.zeros(7, np.uint8)
    files = np.array([descriptor], np.int32)
    try:
        for begins, rows, sizes, tails in (
            (numbers(0, 1), some, numbers(0, 0), none),
            (numbers(0), some, numbers(0, 0), none),
            (numbers(0), some, numbers(1), none),
            (numbers(0), some, numbers(-1), none),
        ):
            with pytest.raises(ValueError, match="read_rows"):
                read_rows(files.repeat(len(begins)), begins, rows, sizes, tails)
        with pytest.raises(ValueError, match="as many descriptors"):
            read_rows(files.repeat(2), numbers(0), some, numbers(0), none)
        assert read_rows(files[:0], numbers(), none, numbers(), none) == 0
        assert read_rows(np.array([-1], np.int32), numbers(0), some, numbers(0), none) == 0
    finally:
        os.close(descriptor)


def test_batches_of_rows_are_those_of_single_samples(tmp_path: Path) -> None:
    source = Dataset(npy_files(tmp_path / "files"), format="npy-files", shuffle="none").source
    pack(source, COUNT, tmp_path / "pack", PackOptions(shard_bytes=600), lambda *_: None)
    data = Dataset(str(tmp_path / "pack"), seed=3)
    assert len(data.shards) > 2
    assert data.is_only_read
    seen = 0
    for batch in Loader(data, 5, workers=3):
        for row, name in enumerate(batch["name"]):
            sample = next(each for each in data if each["name"] == name)
            assert batch["array"][row].tobytes() == sample["array"].tobytes()
            seen += 1
    assert seen == len(data)
