"""Caches of blocks verify their content, respect their quota, and never return wrong bytes after a failure."""

import errno
import multiprocessing
import os
import pickle
import secrets
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.data_sets import COUNT, npy_files, packed

from multiring._cli import main
from multiring.data import Dataset, Loader, Shuffle, cached
from multiring.data.caching.blocks import BlockCache, clean
from multiring.data.caching.filesystem import CachingFileSystem
from multiring.data.caching.storage import CachedStorage
from multiring.data.packing.writing import PackOptions, pack
from multiring.data.readers.manifest import BLOCK_BYTES
from multiring.data.readers.storage import LocalStorage, open_storage
from multiring.errors import ArgumentError, DataError, SourceTimeoutError

QUOTA = 1 << 30


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a pack of 64 samples of 128 KiB: 9 blocks in 3 shards."""
    root = tmp_path_factory.mktemp("large")
    (root / "d").mkdir()
    for number in range(64):
        array = np.random.default_rng(number).integers(0, 255, (1 << 17,), dtype=np.uint8)
        np.save(root / "d" / f"{number:03}.npy", array)
    source = Dataset(str(root / "d"), format="npy-files").source
    pack(source, 64, root / "pack", PackOptions(shard_bytes=3 << 20), lambda *_: None)
    return str(root / "pack")


class Counted(LocalStorage):
    """Storage that counts the bytes it reads."""

    read_bytes = 0

    def read_into(self, name: str, begin: int, out: memoryview) -> None:
        super().read_into(name, begin, out)
        if name.endswith(".tar"):
            self.read_bytes += len(out)


@pytest.mark.parametrize("shuffle", ["exact", "windowed"])
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_what_is_kept_is_not_read_again(large: str, share: float, shuffle: str, tmp_path: Path) -> None:
    source = Counted(large)
    whole = sum((Path(large) / each).stat().st_size for each in source.names() if each.endswith(".tar"))
    quota = int(share * whole) + (share == 1) * 100_000
    storage = CachedStorage(source, BlockCache(tmp_path, quota, print))
    loader = Loader(Dataset(storage, shuffle=Shuffle(shuffle, window=2)), 8)
    for epoch in range(3):
        before = source.read_bytes
        names = [name for batch in loader for name in batch["name"]]
        assert len(set(names)) == 64
        read = source.read_bytes - before
        # Unused: less than half a block, and the header of each kept block.
        kept = 1.0 if share == 1 else (quota - BLOCK_BYTES) / whole
        if epoch:
            assert read <= (1 - kept) * whole
    loader.close()
    assert sum(each.stat().st_size for each in tmp_path.rglob("*") if each.is_file()) <= quota


def test_flipped_bits_are_found_wherever_they_are(large: str, tmp_path: Path) -> None:
    told: list[str] = []
    cache = BlockCache(tmp_path, QUOTA, told.append)
    data = Dataset(CachedStorage(LocalStorage(large), cache, memory_bytes=0))
    right = [data[number]["array"].tobytes() for number in range(64)]
    files = [each for each in tmp_path.rglob("*") if each.is_file()]
    generator = np.random.default_rng(0)
    for number, file in enumerate(files):
        content = bytearray(file.read_bytes())
        if number % 3 == 2:
            content = content[: int(generator.integers(len(content)))]
        else:
            content[int(generator.integers(len(content) if number % 3 else 24))] ^= 1 << int(generator.integers(8))
        file.write_bytes(content)
    # A flipped bit in an unread part of the header does no harm.
    assert [data[number]["array"].tobytes() for number in range(64)] == right
    assert cache.counts.damaged >= len(files) - 3
    assert len(list((tmp_path / "quarantine").iterdir())) == cache.counts.damaged
    assert all("damaged" in each for each in told)
    clean(tmp_path)
    assert not list((tmp_path / "quarantine").iterdir())


def test_a_source_that_gives_other_bytes_is_an_error(large: str, tmp_path: Path) -> None:
    class Flipping(LocalStorage):
        times = 0

        def read_into(self, name: str, begin: int, out: memoryview) -> None:
            super().read_into(name, begin, out)
            if name.endswith(".tar") and self.times:
                self.times -= 1
                out[100] ^= 1

    source, told = Flipping(large), list[str]()
    storage = CachedStorage(source, BlockCache(tmp_path, QUOTA, told.append))
    source.times = 1
    right = storage.block(0, 0)
    assert right == Path(large, "shard-00000.tar").read_bytes()[:BLOCK_BYTES]
    assert told == [f"block 0 of {storage.key} came damaged from its source; it is fetched again"]
    source.times = 2
    with pytest.raises(DataError, match=r"block 1 of .* is damaged at its source"):
        storage.block(0, 1)
    assert not storage.cache.holds(storage.key, 1)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("what", ["write", "rename"])
def test_a_disk_that_fails_is_told_and_training_goes_on(
    large: str, code: int, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    data = Dataset(LocalStorage(large), cache=BlockCache(tmp_path, QUOTA, told.append))

    def failing(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    if what == "write":
        monkeypatch.setattr(secrets, "token_hex", lambda _: "x")
        kept = Path.open

        def opening(path: Path, *rest: Any, **named: Any) -> Any:
            return failing() if path.name == ".new-x" else kept(path, *rest, **named)

        monkeypatch.setattr(Path, "open", opening)
    else:
        monkeypatch.setattr(Path, "rename", failing)
    assert len([data[number]["name"] for number in range(64)]) == 64
    assert len(told) == 1
    assert "nothing more is cached" in told[0]
    assert not list(tmp_path.rglob(".new-*"))


KILLED = """
import sys
from pathlib import Path
from multiring.data.caching.blocks import BlockCache
from multiring.data.caching.storage import CachedStorage
from multiring.data.readers.storage import LocalStorage
storage = CachedStorage(LocalStorage(sys.argv[1]), BlockCache(Path(sys.argv[2]), 1 << 30, print))
print("go", flush=True)
while True:
    for place in storage.each_block():
        storage.block(*place)
    for path in Path(sys.argv[2]).rglob("[0-9]"):
        path.unlink()
"""


def test_killed_at_any_moment_it_leaves_whole_blocks_and_no_lock(large: str, tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    shards = [Path(large, f"shard-0000{number}.tar").read_bytes() for number in range(3)]
    process = None
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", KILLED, large, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(float(generator.random()) * 0.05)
        process.kill()
        process.wait()
        process.stdout.close()
        told: list[str] = []
        storage = CachedStorage(LocalStorage(large), BlockCache(tmp_path, QUOTA, told.append))
        for shard, block in storage.each_block():
            assert storage.block(shard, block) == shards[shard][block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        assert not told, "a block in the cache is damaged"


def test_threads_that_want_the_same_fetch_it_once(large: str, tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, QUOTA, print)
    fetched: list[int] = []

    def fetch() -> bytes:
        time.sleep(0.05)
        fetched.append(1)
        return b"abc"

    threads = [threading.Thread(target=lambda: cache.get("key", 1, fetch)) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(fetched) == 1
    del large


def test_a_fork_does_not_wait_for_a_thread_that_it_has_not(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, QUOTA, print)
    begun, goes_on = threading.Event(), threading.Event()

    def fetch() -> bytes:
        begun.set()
        goes_on.wait()
        return b"abc"

    thread = threading.Thread(target=lambda: cache.get("key", 1, fetch))
    thread.start()
    begun.wait()
    child = multiprocessing.get_context("fork").Process(target=lambda: cache.get("key", 1, lambda: b"abc"))
    child.start()
    child.join(240)
    code = child.exitcode
    child.kill()
    goes_on.set()
    thread.join()
    assert code == 0


def test_whose_cache_it_is(large: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "c"
    BlockCache(folder, QUOTA, print).put("key", 0, b"abc")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(ArgumentError, match="chmod 700"):
        BlockCache(folder, QUOTA, print)
    folder.chmod(0o755)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ArgumentError, match="belongs to user"):
        BlockCache(folder, QUOTA, print)
    foreign = BlockCache(folder, QUOTA, print, foreign=True)
    assert foreign.read("key", 0) == b"abc"
    assert not foreign.put("key", 1, b"abc")
    with pytest.raises(ArgumentError, match="too small: want room for 2 blocks"):
        CachedStorage(LocalStorage(large), BlockCache(tmp_path / "small", 1000, print, foreign=True))


def test_clean_keeps_the_newest(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, QUOTA, print)
    for number in range(4):
        cache.put("key", number, bytes(1000))
        os.utime(tmp_path / "key" / "000000" / str(number), (number, number))
    done = clean(tmp_path, keep_bytes=2100)
    assert (done.removed, done.left_bytes) == (2, 2048)
    assert cache.holds("key", 3)
    assert not cache.holds("key", 0)


class Pairs:
    """A map-style data set that counts its reads."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> Any:
        self.reads += 1
        return (
            torch.full((2, 3), number, dtype=torch.float16),
            {"label": number, "text": f"n{number}", "none": None, "list": [b"x", 1.5]},
            np.arange(number),
            Image.new("RGB", (3, 2), (number, 0, 0)),
            np.float32(number),
        )


def test_cached_gives_what_the_data_set_gives_and_reads_it_once(tmp_path: Path) -> None:
    inner = Pairs()
    outer = cached(inner, tmp_path, key="pairs")
    for _ in range(2):
        for number in range(5):
            tensor, told, array, image, scalar = outer[number]
            assert torch.equal(tensor, torch.full((2, 3), number, dtype=torch.float16))
            assert told == {"label": number, "text": f"n{number}", "none": None, "list": [b"x", 1.5]}
            assert np.array_equal(array, np.arange(number))
            assert image.size == (3, 2)
            assert image.getpixel((0, 0)) == (number, 0, 0)
            assert isinstance(scalar, np.float32)
    assert inner.reads == 6 + 5, "want 6 reads to identify the data sets, and 5 of samples"
    assert torch.equal(pickle.loads(pickle.dumps(outer))[4][0], outer[4][0])  # noqa: S301 -- its own
    again = Pairs()
    assert cached(again, tmp_path, key="pairs")[1][1]["label"] == 1
    assert again.reads == 6
    with pytest.raises(IndexError):
        outer[5]


def test_cached_refuses_what_differs_each_time_and_what_only_a_pickle_holds(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    with pytest.raises(ArgumentError, match="random augmentation"):
        cached(type("Random", (Pairs,), {"__getitem__": lambda *_: generator.random()})(), tmp_path)
    with pytest.raises(DataError, match="without a pickle"):
        cached([object()], tmp_path)
    with pytest.raises(ArgumentError, match="without samples"):
        cached([], tmp_path)


def test_fsspec_reads_through_the_cache(large: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIRING_DATA_CACHE", str(tmp_path / "c"))
    monkeypatch.setattr("multiring.data.caching.filesystem._FRESH_S", 0)  # allow caching of files that were just made
    fsspec.register_implementation("multiring", CachingFileSystem, clobber=True)
    content = Path(large, "shard-00000.tar").read_bytes()
    url = f"multiring::file://{large}/shard-00000.tar"
    with fsspec.open(url, "rb") as file:
        assert file.read() == content
    system, path = fsspec.core.url_to_fs(url)
    monkeypatch.setattr(
        system.fs, "cat_file", lambda *_, **__: pytest.fail("the file is read although it is in the cache")
    )
    assert system.cat_file(path, 5, 100) == content[5:100]
    assert system.cat_file(path, -10) == content[-10:]
    with pytest.raises(ArgumentError, match="only reads"):
        system.open(path, "wb")
    with pytest.raises(ArgumentError, match="needs another URL behind it"):
        CachingFileSystem()


def test_a_source_that_stalls_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage("memory://stalled", timeout_s=0.1)
    ended = threading.Event()
    monkeypatch.setattr(storage._system, "find", lambda *_: ended.wait(240))  # type: ignore[attr-defined]
    with pytest.raises(SourceTimeoutError, match=r"memory://stalled: the source has not sent .* within 0\.1 s"):
        storage.names()
    ended.set()


def test_the_command_packs_verifies_stages_and_cleans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MULTIRING_DATA_CACHE", str(tmp_path / "cache"))
    url, made = npy_files(tmp_path / "d"), str(tmp_path / "p")
    assert main(["data", "pack", url, made, "--format", "npy-files", "--to", "float16", "--shuffle", "1"]) == 0
    # The error of the conversion, computed independently.
    arrays = np.stack([np.load(each) for each in sorted(Path(url).iterdir())]).astype(np.float64)
    over = (0, *range(2, arrays.ndim))
    exact = (arrays - arrays.mean(axis=over, keepdims=True)) / arrays.std(axis=over, keepdims=True)
    lost = np.abs(exact.astype(np.float16) - exact)
    worst, rms = lost.max(), np.sqrt((lost**2).mean(axis=over)).max()
    line = f"array: 3 channels as float16, at most {worst:.2g} std lost, {rms:.2g} in root mean square\n"
    assert line in capsys.readouterr().out
    assert main(["data", "pack", url, made]) == 2
    assert "exists already; name a new folder" in capsys.readouterr().err
    assert main(["data", "verify", made]) == 0
    assert main(["data", "plan", made, "--cache", "1kB"]) == 0
    assert main(["data", "bench", made, "--seconds", "0.1", "--workers", "1"]) == 0
    capsys.readouterr()
    assert main(["data", "stage", made]) == 0
    assert main(["data", "stage", made]) == 0
    assert "0 from the source" in capsys.readouterr().out.splitlines()[1]
    assert main(["data", "clean", "--all"]) == 0
    assert "; 0 bytes are left" in capsys.readouterr().out
    shard = Path(made) / "shard-00000.tar"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert main(["data", "verify", made]) == 1
    assert "shard-00000.tar, bytes 0 to" in capsys.readouterr().out
    assert main(["data", "plan"]) == 2
    assert "--topology, --samples" in capsys.readouterr().err


def test_a_pack_is_there_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Dataset(packed(tmp_path / "a"), shuffle="none").source
    count = 0

    def failing(descriptor: int) -> None:
        nonlocal count
        count += 1
        if count == wanted:
            raise OSError(errno.EIO, f"fsync of {descriptor}")

    monkeypatch.setattr(os, "fsync", failing)
    for wanted in range(1, 20):
        count = 0
        target = tmp_path / f"b{wanted}"
        try:
            pack(source, COUNT, target, PackOptions(shard_bytes=3000), lambda *_: None)
        except OSError:
            # The folder may fail after the pack was moved into it; the pack is then complete.
            assert not target.exists() or len(Dataset(str(target))) == COUNT
        else:
            break
    assert wanted > 5
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]
