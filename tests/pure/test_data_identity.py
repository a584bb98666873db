"""Keys and digests change with everything on which the content depends."""

import gc
import inspect
import io
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image as Pillow
from PIL import ImageOps

from multiring.data import Dataset, Loader, Mixture, Shuffle, cached
from multiring.data.caching import mapped
from multiring.data.caching.filesystem import CachingFileSystem, FileChangedError, is_told_apart
from multiring.data.caching.mapped import CachedSamples
from multiring.data.caching.samples import packed, unpacked
from multiring.data.readers.manifest import Field, Manifest, ShardEntry
from multiring.data.readers.source import Shard, digest_of
from multiring.errors import ArgumentError, DataError

# ---- cached ----


class Values:
    """A map-style data set of values."""

    def __init__(self, *values: Any) -> None:
        self.values = list(values)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, number: int) -> Any:
        return self.values[number]


class Others(Values):
    """The same data set under another class name."""


def key_of(data: Any, folder: Path, key: str | None = "k") -> str:
    return cached(data, folder, key=key)._key


def test_a_named_key_changes_with_the_name_the_type_the_length_and_three_samples(tmp_path: Path) -> None:
    base = (0, 1, 2, 3, 4)
    found = {
        key_of(Values(*base), tmp_path),
        key_of(Values(*base), tmp_path, "other"),
        key_of(Others(*base), tmp_path),
        key_of(Values(*base, 4), tmp_path),
        *(key_of(Values(*(9 if n == place else each for n, each in enumerate(base))), tmp_path) for place in (0, 2, 4)),
        key_of(Values(0.0, *base[1:]), tmp_path),
    }
    assert len(found) == 8
    assert key_of(Values(*base), tmp_path) == key_of(Values(*base), tmp_path)


@pytest.mark.parametrize("change", range(7))
def test_without_a_key_a_changed_sample_is_never_served_old(change: int, tmp_path: Path) -> None:
    labels = [0] * 7
    for _ in range(2):
        data = cached(Values(*labels), tmp_path)
        assert [data[number] for number in range(7)] == labels
        labels[change] += 1


def test_what_has_no_key_goes_with_its_object_but_not_with_a_copy(tmp_path: Path) -> None:
    data = cached(Values(*range(5)), tmp_path)
    assert [data[number] for number in range(5)] == list(range(5))
    copy = pickle.loads(pickle.dumps(data))  # noqa: S301 -- its own
    folder = tmp_path / data._key
    assert folder.exists()
    child = os.fork()
    if child == 0:
        del data
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    del copy
    gc.collect()
    assert folder.exists()
    del data
    gc.collect()
    assert not folder.exists()


ENDED = """
import os, sys
from multiring.data import cached
data = cached([1, 2, 3], sys.argv[1])
print([data[number] for number in range(3)], flush=True)
os._exit(0)
"""


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", ENDED, str(tmp_path)], check=True, capture_output=True)
    (left,) = [each for each in tmp_path.iterdir() if each.name.startswith("map-of-")]
    others = [tmp_path / f"map-of-{'0' * 16}-1-1-{'0' * 16}", tmp_path / "map-of-mine", tmp_path / "mine"]
    for each in others:
        each.mkdir()
    alive = cached([1], tmp_path)
    assert alive[0] == 1
    again = cached([1], tmp_path)
    assert not left.exists()
    assert all(each.exists() for each in [*others, tmp_path / alive._key])
    assert again[0] == 1


def test_the_docstring_says_what_the_key_covers() -> None:
    told = inspect.getdoc(cached) or ""
    assert "type, its length, and its first, middle and last sample" in " ".join(told.split())
    assert {*inspect.signature(CachedSamples).parameters} == {"dataset", "folder", "quota_bytes", "key"}
    assert mapped._OWN.fullmatch(f"map-of-{'a' * 16}-12-34-{'b' * 16}")


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1, 2**40 + 1]),
        torch.tensor([0.5], dtype=torch.bfloat16),
        torch.ones(2, 3).to(torch.float8_e4m3fn),
        torch.tensor(3, dtype=torch.uint16),
        torch.tensor([1 + 2j]).conj(),
        torch.zeros(0, 3, dtype=torch.bool),
        torch.ones(4, 4).t()[1:],
        torch.ones(2, requires_grad=True),
        *(np.float64(0.1), np.str_("a\0"), np.bytes_(b"a\0"), np.array([1], ">i2"), np.datetime64(5, "ns")),
        *(np.array([1 + 1j], "c8"), np.float16(1), {"a": (1, [None, True, float("inf")])}, "\ud800", b"\0"),
        *("\ud800\udc00", {"\ud800\udc00": 1, "\U00010000": 2}),
    ],
    ids=repr,
)
def test_a_cached_sample_has_its_type_and_its_bits(value: Any) -> None:
    found = unpacked(packed((value, torch.tensor(1.5))))[0]
    assert type(found) is type(value)
    if isinstance(value, torch.Tensor):
        assert (found.dtype, found.shape, found.requires_grad) == (value.dtype, value.shape, value.requires_grad)
        assert torch.equal(found.to(torch.complex128), value.to(torch.complex128))
    elif isinstance(value, np.ndarray):
        assert found.dtype == value.dtype
        assert np.array_equal(found, value)
    else:
        assert found == value
        assert len(found) == len(value) if isinstance(value, str | bytes) else True


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_a_cached_image_says_what_its_file_does(form: str) -> None:
    exif = Pillow.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    file = io.BytesIO()
    Pillow.fromarray(np.arange(18, dtype=np.uint8).reshape(2, 3, 3)).save(file, form, exif=exif)
    image = Pillow.open(file)
    found = unpacked(packed(image))
    assert ImageOps.exif_transpose(found).size == ImageOps.exif_transpose(image).size == (2, 3)
    assert found.info.items() <= image.info.items()


def test_a_cached_image_has_its_transparent_colour() -> None:
    file = io.BytesIO()
    Pillow.fromarray(np.array([[3, 4]], np.uint8)).save(file, "PNG", transparency=3)
    image = Pillow.open(file)
    assert list(unpacked(packed(image)).convert("RGBA").tobytes()) == list(image.convert("RGBA").tobytes())


@pytest.mark.parametrize(
    "value",
    [
        torch.nn.Parameter(torch.ones(1)),
        torch.ones(2).to_sparse(),
        torch.empty(2, device="meta"),
        np.ma.array([1, 2], mask=[False, True]),
        np.ones(2, dtype="O"),
        type("Named", (dict,), {})(),
        {1: "number for a key"},
        {"set"},
        object(),
        1j,
    ],
    ids=lambda each: type(each).__name__,
)
def test_what_would_come_back_as_something_else_is_refused_when_it_is_kept(value: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        cached([value], tmp_path)


# ---- multiring:: ----


class Told(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system that reports given properties of its files."""

    protocol = "told"
    cachable = False
    says: dict[str, Any]

    def info(self, path: str, **options: Any) -> Any:
        found = super().info(path, **options)
        return {"name": found["name"], "size": found["size"], "type": "file", **self.says}


class Elsewhere(Told):
    """A file system of another type."""


def key_in(system: Any, path: str, says: dict[str, Any], folder: Path) -> str | None:
    system.says = says
    outer = CachingFileSystem(fs=system, cache=str(folder))
    return outer._key(path, outer.info(path))


def test_a_files_key_changes_with_all_that_tells_it_from_others(tmp_path: Path) -> None:
    system = Told()
    system.pipe_file("/a", b"12345")
    system.pipe_file("/b", b"12345")
    system.pipe_file("/c", b"123456")
    says = {"ETag": '"1"', "LastModified": datetime(2020, 1, 1, tzinfo=timezone.utc), "other": 3}
    base = key_in(system, "/a", says, tmp_path)
    assert base == key_in(system, "/a", dict(says), tmp_path)
    assert base == key_in(system, "/a", says | {"url": "https://x/?signature=123", "atime": 5}, tmp_path)
    assert base == key_in(Told(secret=str(object()), session=object()), "/a", says, tmp_path), (
        "the key depends on credentials"
    )
    changed = [
        key_in(system, "/b", says, tmp_path),
        key_in(system, "/c", says, tmp_path),
        key_in(system, "/a", says | {"ETag": '"2"'}, tmp_path),
        key_in(system, "/a", says | {"LastModified": datetime(2020, 1, 2, tzinfo=timezone.utc)}, tmp_path),
        key_in(system, "/a", says | {"other": 4}, tmp_path),
        key_in(Told(endpoint="elsewhere"), "/a", says, tmp_path),
        key_in(Elsewhere(), "/a", says, tmp_path),
    ]
    assert len({base, *changed}) == 8
    assert None not in changed


@pytest.mark.parametrize(
    ("says", "is_told"),
    [
        ({}, False),
        ({"size": 5}, False),
        ({"uid": 1000, "mode": 33188}, False),
        ({"ETag": '"a"'}, True),
        ({"ETag": 'W/"a"'}, False),
        ({"ETag": ""}, False),
        ({"generation": "17"}, True),
        ({"mtime": 900.0}, True),
        ({"mtime": 998.5}, False),
        ({"mtime": 900.0, "created": 999.5}, False),
        ({"Last-Modified": "Thu, 01 Jan 1970 00:15:00 GMT"}, True),
        ({"Last-Modified": "Thu, 01 Jan 1970 00:16:39 GMT"}, False),
        ({"Last-Modified": "nonsense"}, False),
        ({"modified": datetime(1970, 1, 1, 0, 15, tzinfo=timezone.utc)}, True),
        ({"updated": "1970-01-01T00:15:00Z"}, True),
    ],
)
def test_files_are_kept_only_where_their_source_tells_their_changes(says: dict[str, Any], is_told: bool) -> None:  # noqa: FBT001
    assert is_told_apart(says, now=1000.0) is is_told


def test_a_file_that_changes_while_it_is_read_is_never_half_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiring.data.caching.filesystem._FRESH_S", 0)
    old, new = b"A" * (3 << 20), b"B" * (3 << 20)
    path = tmp_path / "f"
    path.write_bytes(old)
    fsspec.register_implementation("multiring", CachingFileSystem, clobber=True)
    opened = CachingFileSystem(fs=fsspec.filesystem("file"), cache=str(tmp_path / "c"))
    with opened.open(str(path), "rb", block_size=1000) as file:
        assert file.read(100) == old[:100]
        time.sleep(0.02)  # a tick of the file system's clock
        path.write_bytes(new)
        file.seek(2 << 20)
        with pytest.raises(FileChangedError, match="open it again"):
            file.read()
    with fsspec.open(f"multiring::file://{path}", "rb", multiring={"cache": str(tmp_path / "c")}) as file:
        assert file.read() == new
    # The file changes while a block is fetched.
    system = CachingFileSystem(fs=fsspec.filesystem("file"), cache=str(tmp_path / "d"))
    fetch = system.fs.cat_file

    def changing(*arguments: Any, **options: Any) -> bytes:
        found: bytes = fetch(*arguments, **options)
        if path.read_bytes() == new:
            path.write_bytes(old)
        return found

    monkeypatch.setattr(system.fs, "cat_file", changing)
    time.sleep(0.02)
    assert system.cat_file(str(path)) == old


# ---- data sets and packs ----


def test_a_data_sets_digest_changes_with_its_format_and_its_shards() -> None:
    shard = {"name": "a", "size_bytes": 5, "samples": 2}
    base = digest_of("tar", [Shard(**shard)])  # type: ignore[arg-type]
    others: list[dict[str, Any]] = [{"name": "b"}, {"size_bytes": 6}, {"samples": 3}]
    changed = [digest_of("tar", [Shard(**{**shard, **each})]) for each in others]
    changed += [digest_of("mds", [Shard(**shard)]), digest_of("tar", [Shard(**shard)] * 2)]  # type: ignore[arg-type]
    assert len({base, *changed}) == 6
    assert {*shard} == {*Shard.__dataclass_fields__}, "some fields were not tried"


def test_a_packs_digest_changes_with_each_thing_in_its_manifest() -> None:
    field = {"name": "x", "kind": "array", "dtype": "<f4", "shape": (2,), "header_bytes": 128, "statistics": {}}
    shard = {"name": "s", "size_bytes": 5, "samples": 1, "xxh3": 7}
    whole = {"index_xxh3": 1, "blocks_xxh3": 2, "note": ""}

    def digest(f: dict[str, Any], s: dict[str, Any], m: dict[str, Any]) -> str:
        return Manifest(
            fields=(Field(**{**field, **f}),), shards=(ShardEntry(**{**shard, **s}),), **{**whole, **m}
        ).digest

    fields: dict[str, Any] = {"name": "y", "kind": "text", "dtype": "<f8", "shape": (3,), "header_bytes": 64}
    fields |= {"statistics": {"mean": [1.0]}}
    shards = {"name": "t", "size_bytes": 6, "samples": 2, "xxh3": 8}
    found = [digest({name: value}, {}, {}) for name, value in fields.items()]
    found += [digest({}, {name: value}, {}) for name, value in shards.items()]
    found += [digest({}, {}, {name: value}) for name, value in {"index_xxh3": 3, "blocks_xxh3": 4, "note": "n"}.items()]
    assert len({digest({}, {}, {}), *found}) == 1 + len(found)
    assert ({*fields}, {*shards}) == ({*Field.__dataclass_fields__}, {*ShardEntry.__dataclass_fields__})


def order_of(folder: Path, seed: int = 1, shuffle: Any = "exact") -> Dataset:
    return Dataset(folder, format="npy", seed=seed, shuffle=shuffle)


@pytest.mark.parametrize(
    "other",
    [
        lambda d: order_of(d, shuffle="none"),
        lambda d: order_of(d, shuffle=Shuffle("windowed", window=2)),
        lambda d: order_of(d, shuffle=Shuffle("windowed", window=3)),
        lambda d: order_of(d, seed=2),
        lambda d: order_of(d).weighted([1] * 20),
        lambda d: order_of(d).weighted([2] + [1] * 19),
        lambda d: order_of(d).weighted([1] * 20, 30),
        lambda d: Mixture([order_of(d)], [1]),
        lambda d: Mixture([order_of(d)], [1], seed=1),
        lambda d: Mixture([order_of(d)] * 2, [1, 1], seed=1),
        lambda d: Mixture([order_of(d)] * 2, [1, 2], seed=1),
        lambda d: Mixture([order_of(d, 5), order_of(d)], [1, 2], seed=1),
    ],
)
def test_a_state_is_of_one_order_alone(other: Callable[[Path], Any], tmp_path: Path) -> None:
    for number in range(4):
        np.save(tmp_path / f"{number}.npy", np.arange(5) + 5 * number)
    first, second = Loader(order_of(tmp_path), 5), Loader(other(tmp_path), 5)
    for one, two in ((first, second), (second, first)):
        with pytest.raises(ArgumentError, match="the state has"):
            one.load_state_dict(two.state_dict())
        one.load_state_dict(one.state_dict())


def test_a_weighted_data_set_in_a_mixture_keeps_its_numbers(tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "0.npy", np.arange(30) + 100 * number)
    parts = [order_of(tmp_path / "a").weighted([0] * 29 + [1], 10), order_of(tmp_path / "b")]
    seen = np.concatenate([np.array(each["array"]) for each in Loader(Mixture(parts, [1, 3]), 10)])
    assert {int(each) for each in seen if each < 100} == {29}
    assert sorted(each - 100 for each in seen if each >= 100) == list(range(30))
