"""Batches, readers, packs and caches return exactly the stored values and types."""

import bz2
import gzip
import io
import json
import lzma
import os
import struct
import subprocess
import sys
import tarfile
import zlib
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow

from multiring._cli import main
from multiring.data import Dataset, Loader
from multiring.data.decoding import decoded
from multiring.data.feeding.widening import put_exactly, widened
from multiring.data.packing.writing import PackOptions, pack
from multiring.data.readers.limits import Limits
from multiring.data.readers.source import Image, Record
from multiring.data.readers.tar import split_name
from multiring.data.readers.unpacking import codec_of, unpacked
from multiring.errors import DataError

NUMBERS = [np.dtype(each) for each in "?bhilBHILefdFD"]
TYPES = st.sampled_from(NUMBERS)


def extremes(dtype: np.dtype[Any]) -> Any:
    """Return the extreme values of a type."""
    if dtype.kind in "iu":
        ends = np.iinfo(dtype)
        return np.array([ends.min, ends.max, ends.max - 1, 0, 1, ends.max // 3], dtype)
    if dtype.kind == "b":
        return np.array([False, True], dtype)
    part = np.finfo(dtype)
    return np.array([part.max, part.tiny, -0.1, np.nan, np.inf, 1 / 3], dtype)


# ---- types of batches ----


@given(first=TYPES, other=TYPES)
@settings(max_examples=150, deadline=None)
def test_a_value_is_kept_exactly_or_refused(first: np.dtype[Any], other: np.dtype[Any]) -> None:
    together = widened(first, other)
    assert together is not None
    for dtype in (first, other):
        for value in extremes(dtype):
            out = np.empty((), together)
            if put_exactly(out, np.asarray(value)):
                assert out.item() == value.item() or np.isnan(value), f"{dtype} in {together}"
            else:
                assert dtype.kind in "iu"
                assert dtype.itemsize == 8
                assert int(out.item().real) != int(value) or abs(int(value)) > 2**53


@pytest.mark.parametrize(("first", "other"), [("S3", "i8"), ("U3", "i8"), ("M8[s]", "i8"), ("V3", "i4"), ("S2", "U2")])
def test_types_that_have_nothing_in_common_are_not_widened(first: str, other: str) -> None:
    assert widened(np.dtype(first), np.dtype(other)) is None
    assert widened(np.dtype(other), np.dtype(first)) is None
    assert widened(np.dtype(ml_dtypes.bfloat16), np.dtype("f4")) is None


def arrays_in(folder: Path, *values: Any) -> Dataset:
    folder.mkdir(exist_ok=True)
    for number, value in enumerate(values):
        np.save(folder / f"{number:03}.npy", value)
    return Dataset(folder, format="npy-files", shuffle="none")


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([np.int8(1), np.int64(-70_000), np.uint8(200)], "i8"),
        ([np.float16(0.5), np.float64(1e300)], "f8"),
        ([np.bool_(True), np.uint16(40_000)], "u2"),
        ([np.array(1, ">i2"), np.array(2**31, ">u4")], "i8"),
        ([np.str_("ab"), np.str_("longer")], None),
        ([np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(6).reshape(2, 3) * 2], "i8"),
        ([np.float32(1), np.complex64(1j)], "c8"),
    ],
)
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_batch_holds_its_samples_whatever_their_types(
    values: list[Any], dtype: str | None, batch: int, tmp_path: Path
) -> None:
    loader = Loader(arrays_in(tmp_path / "d", *values), batch, workers=1)
    found = [row for each in loader for row in np.asarray(each["array"]).tolist()]
    assert found == [each.tolist() for each in values]
    if dtype is not None and batch == 3:
        assert next(iter(loader))["array"].dtype == np.dtype(dtype)


def test_what_no_type_holds_is_refused_by_name(tmp_path: Path) -> None:
    data = arrays_in(tmp_path / "d", np.int64(2**62 + 1), np.float64(0.5))
    with pytest.raises(
        DataError, match="sample 0: array is int64, but other samples need float64, which does not hold"
    ):
        next(iter(Loader(data, 2)))


def test_records_of_python_numbers_and_ragged_lists(tmp_path: Path) -> None:
    def changed(record: Record, _: Any) -> Record:
        number = int(record["name"][:3])
        return {"n": number if number < 2 else number + 0.5, "v": [[1], [2, 3]] if number == 3 else np.ones(2)}

    arrays_in(tmp_path / "d", *[np.zeros(1)] * 4)
    data = Dataset(tmp_path / "d", format="npy-files", shuffle="none", transform=changed)
    loader = Loader(data, 4, skip_bad=True)
    assert [each["n"].tolist() for each in loader] == [[0.0, 1.0, 2.5]]
    assert loader.skipped == 1


# ---- readers ----


def test_parquets_columns_keep_their_types(tmp_path: Path) -> None:
    columns = {
        "uint64": pa.array([2**64 - 1, 3], pa.uint64()),
        "time": pa.array([1_700_000_000_123_456_789, 5], pa.timestamp("ns")),
        "lists": pa.array([[2**63, 1], []], pa.list_(pa.uint64())),
        "blobs": pa.array([[b"a\0\0"], []], pa.list_(pa.binary())),
        "map": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int32())),
        "ragged": pa.array([[[1], [2, 3]], [[1, 2], [3, 4]]], pa.list_(pa.list_(pa.int8()))),
        "words": pa.array(["a", "b"]).dictionary_encode(),
        "null": pa.array([None, 1], pa.int16()),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    data = Dataset(tmp_path, shuffle="none")
    first, second = data[0], data[1]
    assert first["uint64"] == 2**64 - 1
    assert first["uint64"].dtype == np.uint64
    assert first["time"] == np.datetime64(1_700_000_000_123_456_789, "ns")
    assert first["lists"].tolist() == [2**63, 1]
    assert (second["lists"].dtype, second["lists"].shape) == (np.uint64, (0,))
    assert first["blobs"] == [b"a\0\0"]
    assert first["map"] == [("k", 1)]
    assert [each.tolist() for each in first["ragged"]] == [[1], [2, 3]]
    assert (second["ragged"].dtype, second["ragged"].tolist()) == (np.int8, [[1, 2], [3, 4]])
    assert (first["words"], first["null"], second["null"]) == ("a", None, 1)


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="several have one name"):
        Dataset(tmp_path, shuffle="none")


def test_a_row_group_that_takes_more_than_it_says_is_given_up(tmp_path: Path) -> None:
    limits = Limits(group_bytes=50 << 20)
    pq.write_table(pa.table({"n": np.zeros(10_000_000)}), tmp_path / "a.parquet", row_group_size=10_000_000)
    assert (tmp_path / "a.parquet").stat().st_size < 50_000
    data = Dataset(tmp_path, shuffle="none", limits=limits)
    with pytest.raises(DataError, match="takes more than 52428800 bytes"):
        data[0]
    long = "x" * 100_000
    table = pa.table({"s": [long, "y", long] * 1000, "n": np.arange(3000)})
    pq.write_table(table, tmp_path / "a.parquet")
    del table
    before = pa.total_allocated_bytes()
    data = Dataset(tmp_path, shuffle="none", limits=limits)
    assert [len(data[number]["s"]) for number in (0, 1, 2999)] == [100_000, 1, 100_000]
    assert pa.total_allocated_bytes() - before < 10 << 20, "the values were copied out of their dictionary"
    pq.write_table(pa.table({"s": [[long]] * 3000}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="takes more than 52428800 bytes"):
        Dataset(tmp_path, shuffle="none", limits=limits)[0]


FED = """
import sys
from multiring.data import Dataset, Loader
for _ in range(2):
    loader = Loader(Dataset(sys.argv[1]), 3)
    print(sum(batch["x"].sum() for batch in loader))
print(next(iter(loader))["x"].shape)
"""


def test_a_program_that_fed_hdf5_ends_well(tmp_path: Path) -> None:
    for number in range(20):  # more files than the reader keeps open
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"] = np.arange(5)
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", FED, str(tmp_path)], capture_output=True, text=True, timeout=240, check=False
        )
        assert (done.returncode, done.stdout) == (0, "200\n200\n(3,)\n"), done.stderr


def test_hdf5s_texts_and_records(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("s", data=[b"ok", b"caf\xe9", b"ok2"], dtype=h5py.string_dtype("ascii"))
        file["row"] = np.array([(1, 0.5)] * 3, [("id", ">i4"), ("value", "f8")])
        file.create_dataset("words", data=[["a", "b"]] * 3, dtype=h5py.string_dtype())
    data = Dataset(tmp_path, shuffle="none")
    assert data[0]["row"] == np.void((1, 0.5), [("id", ">i4"), ("value", "f8")])
    assert data[0]["words"] == ["a", "b"]
    with pytest.raises(DataError, match=r"a\.h5: sample 1: s "):
        data[1]
    loader = Loader(data, 3, skip_bad=True)
    (batch,) = list(loader)
    assert batch["s"] == ["ok", "ok2"]
    assert batch["row"]["id"].tolist() == [1, 1]


def test_a_chunk_that_unpacks_to_more_than_it_says_is_given_up(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset("x", (4, 2), "f4", chunks=(2, 2), compression="gzip")
        made[:] = 1
        made.id.write_direct_chunk((2, 0), zlib.compress(bytes(50 << 20)))
    data = Dataset(tmp_path, shuffle="none", limits=Limits(record_bytes=1 << 20))
    assert data[1]["x"].tolist() == [1, 1]
    with pytest.raises(DataError, match=r"a\.h5: sample 2: x has a chunk that unpacks to more than its size"):
        data[2]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        large = np.random.default_rng(1).normal(size=(3, 300, 300))
        file.create_dataset("x", data=large, chunks=(2, 100, 300), compression="gzip")
    data = Dataset(tmp_path, shuffle="none", limits=Limits(record_bytes=1 << 20))
    assert all(np.array_equal(data[number]["x"], large[number]) for number in range(3))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("a.jpg", ("a", "jpg")),
        ("d/a.seg.PNG", ("d/a", "seg.png")),
        ("a.b/c.txt", ("a.b/c", "txt")),
        ("./0.cls", ("./0", "cls")),
        ("README", None),
        ("d/README", None),
        ("._a.jpg", None),
        ("__meta__/x.json", None),
        ("__info__", None),
        ("d/__x__.txt", ("d/__x__", "txt")),
    ],
)
def test_webdatasets_names(name: str, wanted: tuple[str, str] | None) -> None:
    assert split_name(name) == wanted


def shard(*members: tuple[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def test_compressed_shards_and_what_their_files_say(tmp_path: Path) -> None:
    long = "9" * 40
    plain = shard(("0.cls", long.encode()), ("0.text", b"t"), ("0.jsn", b"[1]"), ("README", b"no"), ("1.cls2", b"-3"))
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(plain))
    (tmp_path / "b.tar").write_bytes(gzip.compress(plain))  # compressed, although its name does not show it
    data = Dataset(tmp_path, shuffle="none")
    wanted = [{"key": "0", "cls": int(long), "text": "t", "jsn": [1]}, {"key": "1", "cls2": -3}]
    assert [data[number] for number in range(4)] == wanted * 2
    with pytest.raises(DataError, match="unpacks to more than 5000 bytes"):
        Dataset(tmp_path, shuffle="none", limits=Limits(group_bytes=5000))
    (tmp_path / "b.tar").write_bytes(gzip.compress(plain)[:-9])
    with pytest.raises(DataError, match=r"b\.tar is damaged"):
        Dataset(tmp_path, shuffle="none")


def tfrecord(*examples: bytes) -> bytes:
    from multiring.data.readers.tfrecord import masked_crc  # noqa: PLC0415 -- of these tests alone

    out = b""
    for each in examples:
        head = struct.pack("<Q", len(each))
        out += head + struct.pack("<I", masked_crc(head)) + each + struct.pack("<I", masked_crc(each))
    return out


def numbers_example(*numbers: int) -> bytes:
    def message(field: int, data: bytes) -> bytes:
        return bytes([field << 3 | 2]) + varint(len(data)) + data

    def varint(value: int) -> bytes:
        value &= (1 << 64) - 1
        out = b""
        while value > 127:
            out, value = out + bytes([value & 127 | 128]), value >> 7
        return out + bytes([value])

    feature = message(3, message(1, b"".join(map(varint, numbers))))
    return message(1, message(1, message(1, b"n") + message(2, feature)))


@pytest.mark.parametrize("packed", [bytes, gzip.compress, zlib.compress])
@pytest.mark.parametrize("name", ["a.tfrecord", "train-00000-of-00001"])
def test_tfrecords_are_found_and_unpacked(packed: Any, name: str, tmp_path: Path) -> None:
    numbers = [0, -1, 2**63 - 1, -(2**63), 127, 128]
    # A plain file may begin like a compressed one: its first record has 120 bytes.
    first = numbers_example(*range(107))
    assert len(first) == 120
    (tmp_path / name).write_bytes(packed(tfrecord(first, numbers_example(*numbers))))
    data = Dataset(tmp_path, format="tfrecord", shuffle="none")
    assert data[0]["n"].tolist() == list(range(107))
    assert data[1]["n"].tolist() == numbers


@pytest.mark.parametrize("packs", [gzip.compress, bz2.compress, lzma.compress, zlib.compress])
def test_compressed_files_that_stand_behind_each_other(packs: Any) -> None:
    codec = codec_of(packs(b""))
    assert codec is not None
    one, other = np.random.default_rng(0).bytes(200_000), bytes(3 << 20)
    joined = packs(one) + packs(other)
    if codec == "zlib":
        with pytest.raises(DataError, match="follow the end of the compressed data"):
            unpacked("x", joined, codec, 1 << 30)
        return
    assert unpacked("x", joined, codec, 1 << 30) == one + other
    assert unpacked("x", packs(one) + bytes(8), codec, 1 << 30) == one
    for cut in (joined[:-3], packs(one) + b"junk"):
        with pytest.raises(DataError, match="damaged"):
            unpacked("x", cut, codec, 1 << 30)


def deep_png(array: Any) -> bytes:
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in array)
    kind = {1: 0, 3: 2, 4: 6}[array.shape[2]]

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", array.shape[1], array.shape[0], 16, kind, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def test_images_of_more_than_eight_bits_are_not_narrowed() -> None:
    grey = np.array([[[0], [300]], [[65_535], [7]]], np.uint16)
    found = decoded("x", deep_png(grey), Limits())
    assert found.dtype == np.uint16
    assert np.array_equal(found, np.repeat(grey, 3, axis=2))
    for channels in (3, 4):
        with pytest.raises(DataError, match="x has colours of 16 bits, which Pillow narrows to 8"):
            decoded("x", deep_png(np.ones((2, 2, channels), np.uint16)), Limits())
    with pytest.raises(DataError, match="colours of 16 bits"):
        decoded("x", b"P6\n# it says\n1 1\n65535\n" + bytes(6), Limits())
    floats = io.BytesIO()
    Pillow.fromarray(np.array([[0.25, 1e6]], np.float32)).save(floats, format="tiff")
    assert decoded("x", floats.getvalue(), Limits())[0, 1].tolist() == [1e6] * 3


# ---- packs ----


class Records:
    """A source of records."""

    format = "test"
    digest = "0" * 16

    def __init__(self, *records: Record) -> None:
        self._records = records

    def record(self, number: int) -> Record:
        return self._records[number]


def packed(folder: Path, *records: Record, **options: Any) -> Dataset:
    source: Any = Records(*records)
    pack(source, len(records), folder, PackOptions(**options), lambda *_: None)
    return Dataset(folder, shuffle="none", decode=False)


def test_fields_in_another_order_are_packed_under_their_own_names(tmp_path: Path) -> None:
    data = packed(tmp_path / "p", {"a": 1, "b": b"x", "c": np.ones(2)}, {"c": np.zeros(2), "b": b"yy", "a": 2})
    assert (data[1]["a"], data[1]["b"], data[1]["c"].tolist()) == (2, b"yy", [0.0, 0.0])


def test_a_field_of_a_long_name_in_another_script_is_packed(tmp_path: Path) -> None:
    name = "字" * 40
    assert packed(tmp_path / "p", {name: np.arange(3)})[0][name].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "value",
    [
        *(
            True,
            5,
            -(2**63),
            np.float32(0.1),
            np.complex64(1j),
            np.datetime64(5, "ns"),
            np.int8(-5),
            np.uint64(2**63 - 1),
            np.bool_(True),
        ),
        *(np.array([1, 2], ">i2"), np.array([1 + 2j], "c16"), np.array([(1, 2.0)], [("a", ">i2"), ("b", "f4")])),
        *(np.array(["2020-01-01"], "M8[D]"), np.array([0.1], "f2"), np.array(["ab", "c"])),
        *({"a": [1, 2.5, None, "\ud800"]}, "text\0", b"\0\0", Image(b"\x89PNG...")),
    ],
    ids=repr,
)
def test_a_pack_gives_back_values_and_types(value: Any, tmp_path: Path) -> None:
    found = packed(tmp_path / "p", {"x": value}, {"x": value})[1]["x"]
    assert type(found) is type(value)
    assert getattr(found, "dtype", None) == getattr(value, "dtype", None)
    assert np.array_equal(found, value) if isinstance(value, np.ndarray) else found == value


@pytest.mark.parametrize(
    "value",
    [
        *(2**63, [b"x"], [("k", 1)], {1: 2}, [float("nan")], "\ud800", None, np.array([{"a"}])),
        *(np.ones(2, ml_dtypes.bfloat16), np.ones(2, ml_dtypes.float8_e4m3fn), np.ma.array([1, 2], mask=[False, True])),
    ],
    ids=repr,
)
def test_what_a_pack_could_not_give_back_is_refused_when_it_is_written(value: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        packed(tmp_path / "p", {"x": value})
    assert list(tmp_path.iterdir()) == []
    left: list[int] = []
    data = packed(tmp_path / "q", {"x": 1}, {"x": value}, {"x": 2}, on_bad=lambda number, _: left.append(number))
    assert ([data[0]["x"], data[1]["x"]], left) == ([1, 2], [1])


@pytest.mark.parametrize(("first", "then"), [(1, np.int8(1)), (np.int8(1), np.int16(1)), (True, 1)])
def test_numbers_of_two_types_are_refused(first: Any, then: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="want one type"):
        packed(tmp_path / "p", {"x": first}, {"x": then})


def broken_folder(folder: Path) -> Path:
    (folder / "class").mkdir(parents=True)
    for number in range(4):
        Pillow.new("RGB", (8, 8), (number, 0, 0)).save(folder / "class" / f"{number}.png")
    os.truncate(folder / "class" / "2.png", 40)
    return folder


def test_a_broken_image_is_not_packed_without_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = str(broken_folder(tmp_path / "d"))
    assert main(["data", "pack", url, str(tmp_path / "p")]) != 0
    assert "2.png" in capsys.readouterr().err
    assert main(["data", "pack", url, str(tmp_path / "p"), "--skip-bad"]) == 0
    told = capsys.readouterr()
    assert "left out: 1 of 4 samples: 2\n" in told.out
    assert "2.png" in told.err
    assert json.loads((tmp_path / "p" / "manifest.json").read_text())["note"].endswith("; left out 1 sample: 2")
    assert main(["data", "verify", str(tmp_path / "p")]) == 0
    assert (
        "whole (check sums, and every sample read)\nwhen it was made: left out 1 sample: 2\n" in capsys.readouterr().out
    )
    assert main(["data", "pack", url, str(tmp_path / "raw"), "--no-decode"]) == 0
    assert main(["data", "verify", str(tmp_path / "raw")]) == 1
    assert "sample 2" in capsys.readouterr().out


def test_a_local_pack_is_verified_when_it_is_read(tmp_path: Path) -> None:
    records = [{"x": np.full(1000, number), "t": "t" * number} for number in range(40)]
    packed(tmp_path / "p", *records, shard_bytes=100_000)
    path = tmp_path / "p" / "shard-00001.tar"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    data = Dataset(tmp_path / "p", shuffle="none")
    damaged = data.shards[0].samples
    assert data[0]["x"][0] == 0
    for _ in range(2):
        with pytest.raises(
            DataError, match=r"shard-00001\.tar is damaged: bytes [0-9]+ to [0-9]+ differ from the packed"
        ):
            data[damaged]
    with pytest.raises(DataError, match=r"shard-00001\.tar is damaged: bytes [0-9]+ to [0-9]+ differ from the packed"):
        list(Loader(Dataset(tmp_path / "p", shuffle="none"), 40))
