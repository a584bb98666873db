"""Invalid files of data sets raise an error that names the file and the fault, and have no other effect."""

import json
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from tests.support import data_sets
from tests.support.data_sets import MAKERS, opened

from multiring._cli import main
from multiring.data import Dataset
from multiring.data.packing.casting import ChannelStatistics, HalfPrecision
from multiring.data.packing.writing import PackOptions, pack
from multiring.data.readers.manifest import xxh3
from multiring.data.readers.source import Record
from multiring.data.readers.tfrecord import example_of, masked_crc
from multiring.errors import ArgumentError, DataError, MultiringError, UnsupportedError


def none_of(*names: str) -> Callable[[Path], None]:
    """Return a function that creates empty files with these names in a folder."""

    def make(place: Path) -> None:
        for name in names:
            (place / name).write_bytes(b"")

    return make


def loose_image(place: Path) -> None:
    (place / "a").mkdir()
    for name in ("a/b.png", "c.png"):
        (place / name).write_bytes(data_sets.picture(0))


def unlike_arrays(place: Path) -> None:
    np.save(place / "a.npy", np.zeros((2, 3)))
    np.save(place / "b.npy", np.zeros((2, 4)))


def unlike_fields(place: Path) -> None:
    for name in ("x", "y"):
        with h5py.File(place / f"{name}.h5", "w") as file:
            file[name] = np.zeros(3)


def unlike_counts(place: Path) -> None:
    with h5py.File(place / "a.h5", "w") as file:
        file["x"], file["y"] = np.zeros(3), np.zeros(4)


def no_rows(place: Path) -> None:
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), place / "a.parquet")


def same_ending(place: Path) -> None:
    with tarfile.open(place / "a.tar", "w") as file:
        for _ in range(2):
            file.addfile(tarfile.TarInfo("0001.cls"))


@pytest.mark.parametrize(
    ("format", "make", "text"),
    [
        ("imagefolder", none_of("a.txt"), "want a folder for each class, with images in it; there is no image"),
        ("imagefolder", loose_image, r"want a folder for each class, with images in it; c\.png is in no folder"),
        ("npy", none_of("a.txt"), r"has no \.npy file"),
        ("npy-files", none_of("a.txt"), r"has no \.npy file"),
        ("npy", unlike_arrays, "its arrays differ, or have no axis of samples"),
        ("hdf5", none_of("a.txt"), "has no HDF5 file with samples"),
        ("hdf5", unlike_fields, "its files have different data sets: .*x.*y"),
        ("hdf5", unlike_counts, r"a\.h5: its data sets have different numbers of samples: .*'x': 3, 'y': 4"),
        ("parquet", no_rows, r"has no \.parquet file with rows"),
        ("tar", none_of("a.txt"), r"has no \.tar file"),
        ("tar", same_ending, r"a\.tar: '0001\.cls' occurs twice in a sample"),
        ("tfrecord", none_of("a.tfrecord"), "has no TFRecord file with records"),
    ],
)
def test_a_folder_that_holds_no_samples(
    format: str,  # noqa: A002 -- as Dataset's
    make: Callable[[Path], None],
    text: str,
    tmp_path: Path,
) -> None:
    make(tmp_path)
    with pytest.raises(DataError, match=text):
        Dataset(str(tmp_path), format=format, shuffle="windowed")


def test_lists_with_missing_values_in_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.table({"words": [["a", None], ["b"]], "numbers": [[1, None], [2]]}), tmp_path / "a.parquet")
    data = Dataset(str(tmp_path), shuffle="windowed")
    with pytest.raises(DataError, match=r"a\.parquet: row 0 of group 0: column numbers .* missing values"):
        data[0]
    assert data[1]["words"] == ["b"]


# ---- MDS: invalid indexes ----


@pytest.mark.parametrize(
    ("kind", "change", "text"),
    [
        ("mds", {"samples": 10**6}, r"shard\.00000\.mds of \d+ bytes claims 1000000 samples"),
        ("mds", {"samples": -1}, "claims -1 samples"),
        ("mds", {"samples": 5}, "its table of 6 samples is damaged; the index says 5"),
        ("mds", {"column_names": ["array"]}, "1 columns, 3 encodings, 3 sizes"),
        (
            "mds",
            {"column_encodings": ["float", "png", "int"]},
            "columns in encoding 'float' are not supported; want one of .*ndarray",
        ),
        ("mds", {"column_encodings": ["ndarray:float32:x", "png", "int"]}, "invalid literal"),
        ("mds", {"column_sizes": [10**6, None, 8]}, "column array claims 1000000 bytes of"),
        ("mds", {"format": "csv"}, "format csv, compression None; want format mds, with compression zstd or none"),
        ("mds-zstd", {"compression": "lz4"}, "compression lz4; want format mds, with compression zstd or none"),
    ],
)
def test_an_index_of_mds_that_cannot_be(kind: str, change: dict[str, Any], text: str, tmp_path: Path) -> None:
    root = Path(MAKERS[kind](tmp_path / "d"))
    index = json.loads((root / "index.json").read_text())
    index["shards"][0] |= change
    (root / "index.json").write_text(json.dumps(index))
    with pytest.raises((DataError, UnsupportedError), match=text):
        opened(kind, str(root))[0]


def test_an_index_of_mds_without_samples(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"version": 2, "shards": []}')
    with pytest.raises(DataError, match=r"index\.json lists no samples"):
        Dataset(str(tmp_path), format="mds")


def test_a_shard_of_mds_whose_header_claims_another_size(tmp_path: Path) -> None:
    root = Path(MAKERS["mds-zstd"](tmp_path / "d"))
    index = json.loads((root / "index.json").read_text())
    shard = root / index["shards"][0]["zip_data"]["basename"]
    other = zstandard.compress(bytes(index["shards"][0]["raw_data"]["bytes"] + 1))
    shard.write_bytes(other)
    index["shards"][0]["zip_data"]["bytes"] = len(other)
    (root / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"it declares \d+ decompressed bytes, but its index \d+"):
        opened("mds-zstd", str(root))[0]


# ---- TFRecord: invalid Examples ----


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x0a\xff", r"index out of range|claims"),
        (b"\x0a\x7f\x00", "a field claims 127 bytes of 1"),
        (b"\x08\x01", "found a number, want a message"),
        (b"\x0b\x01", "a field has the unknown kind 3"),
        (b"\x08" + b"\xff" * 10, "a number of more than 64 bits"),
    ],
)
def test_a_record_that_is_no_example(data: bytes, text: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, IndexError), match=text):
        example_of(data)
    length = struct.pack("<Q", len(data))
    framed = length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data))
    (tmp_path / "a.tfrecord").write_bytes(framed)
    with pytest.raises(DataError, match=rf"a\.tfrecord: record 0 is not a tf\.train\.Example: .*({text})"):
        Dataset(str(tmp_path))[0]


# ---- packs: their manifest, index and blocks ----


def with_pack(place: Path, change: Callable[[dict[str, Any]], None]) -> str:
    """Return the path of a pack with a changed manifest."""
    root = Path(data_sets.packed(place / "d"))
    (file,) = root.glob("*.json")
    told = json.loads(file.read_text())
    change(told)
    file.write_text(json.dumps(told))
    return str(root)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda told: told.update(format="other"), "format 'other', want .*: packed by another version"),
        (lambda told: told.update(shards=[]), r"0 shards; want 1 to \d+, of different names"),
        (lambda told: told["shards"].append(told["shards"][0]), "shards; want 1 to .*, of different names"),
        (lambda told: told["shards"][0].update(samples=True), "True is not a count: want an integer"),
        (lambda told: told["shards"][0].update(size_bytes=-1), "-1 is not a count: want an integer"),
        (lambda told: told["fields"][0].update(kind="pickle"), "fields have the kinds .*pickle.*; want only"),
        (lambda told: told["shards"][0].update(samples=told["shards"][0]["samples"] + 1), "want int64"),
        (lambda told: told["shards"][0].update(size_bytes=10), "sample 0: its field array lies outside its shard"),
        (lambda told: told.update(index_xxh3="0"), "is damaged, or belongs to another pack: its xxh3"),
    ],
)
def test_a_manifest_that_cannot_be(change: Callable[[dict[str, Any]], None], text: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=text):
        Dataset(with_pack(tmp_path, change))


def test_check_sums_that_are_no_list_of_them(tmp_path: Path) -> None:
    root = Path(data_sets.packed(tmp_path / "d"))
    (manifest,) = root.glob("*.json")
    told = json.loads(manifest.read_text())
    for file in root.glob("*.npy"):
        if xxh3(file.read_bytes()) == int(told["blocks_xxh3"], 16):
            np.save(file, np.zeros(3, np.uint8))
            told["blocks_xxh3"] = f"{xxh3(file.read_bytes()):x}"
    manifest.write_text(json.dumps(told))
    with pytest.raises(DataError, match=r"uint8 \(3,\), want uint64"):
        Dataset(str(root), cache=tmp_path / "cache")


# ---- samples that cannot be packed ----


class Samples:
    """A source of given records."""

    format, digest = "npy", "of these"

    def __init__(self, *records: Record) -> None:
        self._records = records

    def record(self, number: int) -> Record:
        return self._records[number]

    def __len__(self) -> int:
        return len(self._records)


ONES = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("records", "options", "text"),
    [
        (({"a": object()},), {}, "a field holds a object, which cannot be packed; want arrays, numbers, text, bytes"),
        (({"a": 1}, {"b": 1}), {}, r"has the fields \{'b': 'number'\}, but the first sample"),
        (({"a.b": 1},), {}, r"a field is named 'a\.b': want a name without dots and slashes"),
        ((), {}, "no sample to pack"),
        (({"a": 1},), {"to_float16": True}, "to float16: the samples have no arrays of floating-point numbers"),
        (({"a": ONES * np.nan},), {"to_float16": True}, "sample 0: a contains NaN or infinity"),
        (
            ({"a": ONES}, {"a": np.ones((3, 3))}),
            {"to_float16": True},
            "sample 1: a has 3 channels, but earlier arrays have 2",
        ),
        (({"a": ONES},), {"to_float16": True, "channel_axis": 2}, r"shape \(2, 3\) has no channels on axis 2"),
    ],
)
def test_what_no_pack_can_hold(records: tuple[Record, ...], options: dict[str, Any], text: str, tmp_path: Path) -> None:
    source: Any = Samples(*records)
    with pytest.raises(MultiringError, match=text):
        pack(source, len(source), tmp_path / "pack", PackOptions(**options), lambda *_: None)
    assert not list(tmp_path.iterdir())


def test_a_value_beyond_float16() -> None:
    statistics = ChannelStatistics(0)
    statistics.add("sample 0", np.array([[0.0, 1e-6]]))
    with pytest.raises(DataError, match=r"sample 1: a is 2e\+06 standard deviations from its mean: beyond float16"):
        HalfPrecision(statistics, 0).cast("sample 1: a", np.array([[1.0, 0.0]]))


# ---- invalid requests to a data set ----


def test_what_a_data_set_is_asked(tmp_path: Path) -> None:
    data = Dataset(data_sets.npy(tmp_path / "d"))
    with pytest.raises(ArgumentError, match="2 weights for 12 samples"):
        data.weighted([1, 1])
    with pytest.raises(IndexError, match="sample 12 of 12: want 0 to 11"):
        data[12]
    with pytest.raises(ArgumentError, match="with format='npy': want a pack, which has check sums"):
        Dataset(data_sets.npy(tmp_path / "e"), format="npy", cache=tmp_path / "cache")


TOPOLOGY = '[[rails]]\ninterface = "eth0"\nbandwidth_mbit_per_s = 941\n[[hosts]]\nname = "a"\n'


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["bench", "DATA", "--seconds", "0"], "--seconds 0: want a number of seconds above 0"),
        (["bench", "DATA", "--seconds", "nan"], "--seconds nan: want a number of seconds above 0"),
        (["bench", "DATA", "--workers", "0"], "--workers 0: want a whole number, 1 to"),
        (["bench", "DATA", "--save", "no/such/folder"], "--save no/such/folder: there is no directory no/such"),
        (
            ["stage", "DATA", "--format", "npy"],
            "--format npy: only packs can be staged; make a pack with multiring data pack",
        ),
        (["stage", "DATA", "--quota=-1MB"], "'-1MB': want a size like 64MiB or 56.6MB"),
        (["stage", "DATA", "--quota", "1 megabyte"], "'1 megabyte': want a size like 64MiB or 56.6MB"),
        (
            ["plan", "--topology", "EMPTY", "--samples", "9", "--sample-bytes", "9", "--source-rate", "9"],
            "names no hosts",
        ),
        (
            ["plan", "--topology", "TOML", "--samples", "0", "--sample-bytes", "9", "--source-rate", "9"],
            "--samples 0: want a whole number, 1 to",
        ),
        (
            ["plan", "--topology", "TOML", "--samples", "9", "--sample-bytes", "9", "--source-rate", "0"],
            "--source-rate 0: want a number above 0",
        ),
    ],
)
def test_what_a_command_is_asked(
    words: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {
        "DATA": data_sets.npy(tmp_path / "d"),
        "EMPTY": str(tmp_path / "e.toml"),
        "TOML": str(tmp_path / "t.toml"),
    }
    Path(places["EMPTY"]).write_text("")
    Path(places["TOML"]).write_text(TOPOLOGY)
    try:
        code = main(["data", *(places.get(word, word) for word in words)])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    assert code == 2
    assert text in capsys.readouterr().err
