"""Readers return the same samples from every format, and reject damaged, dangerous or foreign files."""

import io
import json
import pickle
import re
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import fsspec
import h5py
import numpy as np
import pytest
import zstandard
from tests.support.data_sets import COUNT, MAKERS, array, npy_files, opened, picture, tar

from multiring.data import Dataset, Shuffle
from multiring.data.decoding import decoded
from multiring.data.orders import ExactOrder, SequentialOrder, WindowedOrder
from multiring.data.readers.limits import Limits
from multiring.data.readers.storage import open_storage
from multiring.errors import ArgumentError, DataError, MultiringError, UnsupportedError

PIXELS = {ending: [decoded("", picture(n, ending), Limits()) for n in range(COUNT)] for ending in ("png", "jpg")}


@pytest.mark.parametrize("kind", MAKERS)
def test_every_format_gives_the_samples_that_it_holds(kind: str, tmp_path: Path) -> None:
    data = opened(kind, MAKERS[kind](tmp_path / "d"))
    assert len(data) == COUNT
    assert sum(each.samples for each in data.shards) == COUNT
    for number, record in enumerate(data):
        found: Any = next((record[each] for each in ("array", "npy") if each in record), None)
        if kind == "imagefolder":
            number = int(Path(record["name"]).stem)  # noqa: PLW2901 -- by class, then by number
            assert record["label"] == number % 2
            assert np.array_equal(record["image"], PIXELS["jpg" if number % 3 == 0 else "png"][number])
            continue
        assert np.array_equal(np.reshape(found, (3, 4)), array(number))
        if "image" in record:
            assert np.array_equal(record["image"], PIXELS["png"][number])
        assert record.get("label", record.get("cls", number)) == number
    with pytest.raises(IndexError, match=f"sample {COUNT}"):
        data[COUNT]


@pytest.mark.parametrize("kind", MAKERS)
def test_what_fsspec_reads_is_the_same(kind: str, tmp_path: Path) -> None:
    url = MAKERS[kind](tmp_path / "d")
    memory = fsspec.filesystem("memory")
    memory.put(url, f"/{kind}", recursive=True)
    near, far = opened(kind, url), opened(kind, f"memory://{kind}")
    assert near.digest == far.digest
    for one, other in zip(near, far, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)
    again: Dataset = pickle.loads(pickle.dumps(far))  # noqa: S301 -- its own
    assert again[3].keys() == far[3].keys()


@pytest.mark.parametrize("kind", MAKERS)
def test_damaged_files_are_named_and_take_no_memory(kind: str, tmp_path: Path) -> None:
    """After bytes are changed, cut off or inserted, the reader returns correct samples or raises DataError."""
    root = Path(MAKERS[kind](tmp_path / "d"))
    files = sorted(each for each in root.rglob("*") if each.is_file())
    generator = np.random.default_rng(7)
    few = Limits(group_bytes=1 << 24, index_bytes=1 << 22, record_bytes=1 << 22)
    outcomes = []
    tracemalloc.start()
    for _ in range(60):  # benchmarks/evidence/data_files/main.py damages thousands
        file = files[int(generator.integers(len(files)))]
        kept = file.read_bytes()
        file.write_bytes(changed(kept, generator))
        tracemalloc.reset_peak()
        try:
            data = opened(kind, str(root), limits=few)
            for number in range(len(data)):
                data[number]
            outcomes.append("")
        except (DataError, UnsupportedError, ArgumentError) as error:
            outcomes.append(str(error))
        finally:
            file.write_bytes(kept)
        assert tracemalloc.get_traced_memory()[1] < 1 << 25
    tracemalloc.stop()
    assert all(str(root) in each for each in outcomes if each), outcomes
    assert len(set(outcomes)) > 5, outcomes


def changed(data: bytes, generator: np.random.Generator) -> bytes:
    place = int(generator.integers(len(data)))
    if generator.integers(3):  # mostly in the first 600 bytes, which hold the structure
        place = min(place, int(generator.integers(600)))
    what = int(generator.integers(4))
    if what == 0:
        return data[:place]
    if what == 1:
        return data[:place] + bytes([data[place] ^ 1 << int(generator.integers(8))]) + data[place + 1 :]
    if what == 2:
        return data[:place] + bytes([255] * 8) + data[place + 8 :]
    return data[:place] + generator.bytes(4) + data[place:]


def _tar_with(place: Path, name: str, content: bytes, kind: bytes = tarfile.REGTYPE) -> str:
    place.mkdir()
    with tarfile.open(place / "a.tar", "w") as file:
        head = tarfile.TarInfo(name)
        head.size, head.type, head.linkname = len(content), kind, "/etc/passwd"
        file.addfile(head, io.BytesIO(content))
    return str(place)


def _array_of_objects() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([{}], object), allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "kind", "text"),
    [
        ("../a.jpg", b"x", tarfile.REGTYPE, "leads out of it"),
        ("/a.jpg", b"x", tarfile.REGTYPE, "leads out of it"),
        ("a.jpg", b"", tarfile.SYMTYPE, "link"),
        ("a.jpg", b"", tarfile.LNKTYPE, "link"),
        ("a.jpg", b"", tarfile.CHRTYPE, "device"),
        ("a.pkl", b"x", tarfile.REGTYPE, "pickle"),
        ("a.npy", _array_of_objects(), tarfile.REGTYPE, "pickle"),
        ("a.cls", b"1;2", tarfile.REGTYPE, "damaged"),
        ("a.json", b"[" * 100_000, tarfile.REGTYPE, "damaged"),
        ("a.jpg", b"\xff\xd8\xff\xe0", tarfile.REGTYPE, r"a\), jpg cannot be decoded"),
        ("a.png", b"\x89PNG\r\n", tarfile.REGTYPE, "cannot be decoded"),
    ],
)
def test_what_a_tar_may_not_hold(name: str, content: bytes, kind: bytes, text: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=text):
        Dataset(_tar_with(tmp_path / "t", name, content, kind))[0]


@pytest.mark.parametrize("lost", [1, 600, 1024, 1025, 3000])
def test_a_tar_that_was_cut_short_is_told(lost: int, tmp_path: Path) -> None:
    file = Path(tar(tmp_path / "t")) / "1.tar"
    end = len(file.read_bytes().rstrip(b"\0")) // 512 * 512 + 512 + 1024
    file.write_bytes(file.read_bytes()[: end - lost])
    with pytest.raises(DataError, match=r"1\.tar.*(cut short|damaged)"):
        Dataset(str(tmp_path / "t"))


def test_images_that_unpack_to_too_much_are_refused_before_they_do(tmp_path: Path) -> None:
    few = Limits(pixels=50)
    for ending in ("png", "jpg"):
        with pytest.raises(DataError, match="claims 7 x 9 pixels"):
            decoded("it", picture(1, ending), few)
    root = Path(MAKERS["mds-zstd"](tmp_path / "d"))
    with pytest.raises(DataError, match="limit for data that is unpacked"):
        opened("mds-zstd", str(root), limits=Limits(group_bytes=100))
    shard = root / "shard.00000.mds.zstd"
    bomb = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 26))
    shard.write_bytes(bomb)
    index = json.loads((root / "index.json").read_text())
    index["shards"][0]["zip_data"]["bytes"] = len(bomb)
    (root / "index.json").write_text(json.dumps(index))
    tracemalloc.start()
    with pytest.raises(DataError, match="unpacks to"):
        opened("mds-zstd", str(root))[0]
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()


def test_pickles_in_mds_and_npy_are_refused(tmp_path: Path) -> None:
    root = Path(MAKERS["mds"](tmp_path / "d"))
    (root / "index.json").write_text((root / "index.json").read_text().replace('"int"', '"pkl"'))
    with pytest.raises(DataError, match="pickle"):
        Dataset(str(root))
    (tmp_path / "a.npy").write_bytes(_array_of_objects())
    with pytest.raises(DataError, match="pickle"):
        Dataset(str(tmp_path / "a.npy"))


@pytest.mark.parametrize("kind", ["link", "external", "group", "references"])
def test_hdf5_that_leads_elsewhere_is_refused(kind: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        if kind == "link":
            file["x"] = h5py.ExternalLink("/etc/passwd", "/x")
        elif kind == "external":
            file.create_dataset("x", (4,), "u1", external=[("/etc/passwd", 0, 4)])
        elif kind == "group":
            file.create_group("x")
        else:
            file.create_dataset("x", (4,), h5py.ref_dtype)
    with pytest.raises(DataError, match=r"want data sets|not a data set|want numbers"):
        Dataset(str(tmp_path / "a.h5"))


def test_arrays_that_claim_more_than_their_file_has(tmp_path: Path) -> None:
    file = tmp_path / "a.npy"
    np.save(file, np.zeros((2, 3), np.float32))
    good = file.read_bytes()
    for shape in (b"(9, 3)", b"(2, 9)", b"(2,-3)"):
        file.write_bytes(good.replace(b"(2, 3)", shape))
        with pytest.raises(DataError, match="invalid shape" if b"-" in shape else "claims"):
            Dataset(str(file))
    np.save(file, np.asfortranarray(np.zeros((2, 3))))
    with pytest.raises(DataError, match="Fortran"):
        Dataset(str(file))


def test_an_exact_order_that_reads_shards_for_samples_has_to_be_asked_for(tmp_path: Path) -> None:
    url = MAKERS["parquet"](tmp_path / "d")
    with pytest.raises(ArgumentError, match="Want shuffle='windowed'") as raised:
        Dataset(url)
    (enough,) = re.findall(r"Shuffle\(read_amplification=(\d+)\)", str(raised.value))
    assert len(Dataset(url, shuffle=Shuffle(read_amplification=int(enough)))) == COUNT


def test_how_samples_are_mixed(tmp_path: Path) -> None:
    url = MAKERS["npy"](tmp_path / "d")
    assert isinstance(Dataset(url, shuffle=Shuffle("none")).order, SequentialOrder)
    assert isinstance(Dataset(url).order, ExactOrder)
    for shuffle, window in ((Shuffle("windowed", window=2), 2), ("windowed", 16)):
        order = Dataset(url, shuffle=shuffle).order
        assert isinstance(order, WindowedOrder)
        assert order.window == window
    wrong: Any
    for wrong in ("sorted", True, None, ["exact"]):
        with pytest.raises(ArgumentError, match=re.escape(f"shuffle={wrong!r}: want 'exact' or 'windowed' or 'none'")):
            Dataset(url, shuffle=wrong)
    with pytest.raises(ArgumentError, match=r"window=0: want 1 shard"):
        Shuffle("windowed", window=0)
    for few in (0.5, float("nan")):
        with pytest.raises(ArgumentError, match=r"read_amplification=(0.5|nan): want 1"):
            Shuffle(read_amplification=few)


def test_a_place_that_is_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no data set at"):
        Dataset(str(tmp_path / "none"))
    with pytest.raises(DataError, match="no files"):
        Dataset(str(tmp_path))
    (tmp_path / "a.tar").write_bytes(b"")
    (tmp_path / "b.h5").write_bytes(b"")
    with pytest.raises(DataError, match="hdf5 or tar"):
        Dataset(str(tmp_path))
    with pytest.raises(ArgumentError, match="format 'zip'"):
        Dataset(str(tmp_path), format="zip")
    with pytest.raises(ArgumentError, match="nosuch"):
        Dataset("nosuch://a/b")
    with pytest.raises(ArgumentError, match="is a path, but key apply to URLs only"):
        open_storage(str(tmp_path), key="a")


def test_a_transform_that_fails_is_told_with_its_sample(tmp_path: Path) -> None:
    def broken(*_: Any) -> dict[str, Any]:
        raise KeyError("colour")

    url = npy_files(tmp_path / "d")
    with pytest.raises(MultiringError, match=r"sample 3 \(003.npy\): the transform raised KeyError: 'colour'"):
        Dataset(url, format="npy-files", transform=broken)[3]


def test_secrets_in_a_url_are_in_no_error() -> None:
    with pytest.raises(MultiringError) as raised:
        Dataset("memory://user:hunter2@place/d?key=hunter2")
    assert "hunter2" not in str(raised.value)
