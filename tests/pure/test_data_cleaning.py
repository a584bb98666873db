"""Cleaning, listing and serving caches neither harms foreign files nor blocks readers."""

import errno
import os
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from multiring._cli import main
from multiring.data.caching.blocks import BlockCache, clean
from multiring.data.caching.keeping import Keeping
from multiring.data.eviction import Uses
from multiring.data.peers.block_client import BlockClient
from multiring.data.peers.block_server import BlockServer
from multiring.data.peers.words import BlockRequest
from multiring.errors import ArgumentError
from multiring.planner.staging import RackOfHosts, Site, each_for_itself, read_once

SECRET = b"s" * 32


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("options", [{"everything": True}, {"keep_bytes": 0}, {}])
def test_a_folder_that_is_no_cache_is_refused(tmp_path: Path, options: dict[str, bool]) -> None:
    for name in ("thesis/chapter.tex", "quarantine/notes", "readers/list", ".new-draft", "k/000000/17"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("years of work")
        os.utime(path, (0, 0))
    before = snapshot(tmp_path)
    with pytest.raises(ArgumentError, match="is not a cache of multiring: none of its 5 files is a block"):
        clean(tmp_path, **options)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("seed", range(5))
def test_what_a_cache_wrote_goes_and_what_others_wrote_stays(tmp_path: Path, seed: int) -> None:
    """Foreign files lie under the cache's names and in its folders, with content that is not the cache's."""
    random = np.random.default_rng(seed)
    cache = BlockCache(tmp_path)
    key = "0" * 32
    for number in random.choice(5000, 20, replace=False).tolist():
        cache.put(key, number, random.bytes(100))
    damaged = next(iter(cache.numbers(key)))
    place = cache._place(key, damaged)
    place.write_bytes(place.read_bytes()[:-1] + b"x" * 2)
    cache.read(key, damaged)  # moves the block into quarantine
    unfinished = place.parent / ".new-0123456789abcdef"
    unfinished.write_bytes(b"MRB1 and")
    ours = snapshot(tmp_path)
    foreign = {}
    for _ in range(20):
        folder = str(random.choice(["", "a", "quarantine", "readers", key, f"{key}/000000", "a/000003"]))
        name = str(random.choice(["3017", "17", ".new-", ".new-0123456789abcdee", "x.npy", f"{key}-1", "MANIFEST"]))
        path = tmp_path / folder / name
        if str(path.relative_to(tmp_path)) in ours or path.is_dir():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        content = [b"", b"plain", b"MRB", random.bytes(50), b"MRU1" + random.bytes(40)][int(random.integers(1, 5))]
        path.write_bytes(content if content != b"MRB" else b"other")
        os.utime(path, (0, 0))
        foreign[str(path.relative_to(tmp_path))] = path.read_bytes()
    clean(tmp_path)
    assert foreign.items() <= snapshot(tmp_path).items()
    done = clean(tmp_path, everything=True)
    assert snapshot(tmp_path) == foreign
    assert done.foreign == len(foreign)


def test_readers_do_not_wait_for_a_look_at_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers do not wait even if the disk is slow."""
    cache = BlockCache(tmp_path)
    keeping = Keeping(cache, "k", [10] * 8, 100)
    order = np.arange(8)
    keeping.expect(Uses(lambda begin, end: (order[np.arange(begin, end) % 8], np.arange(begin, end)), 8, 0, 64))
    looks, goes_on = threading.Event(), threading.Event()

    def slow(key: str) -> list[int]:
        del key
        looks.set()
        assert goes_on.wait(240)
        return []

    monkeypatch.setattr(cache, "numbers", slow)
    keeping._look_at = 0.0
    looker = threading.Thread(target=keeping.advance, args=(1,))
    looker.start()
    assert looks.wait(240)
    done = threading.Event()

    def read() -> None:
        keeping.advance(2)
        keeping.takes(3, 0)
        keeping.keep(3, b"x" * 10, on_disk=False)
        assert keeping.in_memory(3) == b"x" * 10
        done.set()

    threading.Thread(target=read, daemon=True).start()
    try:
        assert done.wait(240), "a reader waits for the listing of the folder"
    finally:
        goes_on.set()
        looker.join()
    assert cache.holds("k", 3)
    assert keeping._disk.held[3], "a block kept during the listing of the folder is not counted"


def test_a_look_takes_no_search_for_each_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 60_000
    cache = BlockCache(tmp_path, quota_bytes=1 << 40)
    keeping = Keeping(cache, "k", [10] * count, 0)
    keeping._disk.held[:] = True
    monkeypatch.setattr(cache, "numbers", lambda _: list(range(count)))
    began = time.process_time()
    keeping._look()
    assert time.process_time() - began < 5


def test_a_full_table_of_descriptors_does_not_end_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    server = BlockServer(SECRET, "127.0.0.1", lambda _: b"block", print)
    accept, failures = server._listener.accept, [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, errno.ENOBUFS]

    class Failing:
        def accept(self) -> tuple[socket.socket, tuple[str, int]]:
            if failures:
                raise OSError(failures.pop(), "as the kernel says")
            return accept()

        def __getattr__(self, name: str) -> object:
            return getattr(listener, name)

    listener = server._listener
    monkeypatch.setattr(server, "_listener", Failing())
    for _ in range(3):
        peer = BlockClient(server.address, SECRET, print)
        assert peer.block(BlockRequest("0" * 32, 0, 0)) == b"block"
        peer.close()
    assert not failures
    server.close()


def test_small_answers_go_at_once() -> None:
    server = BlockServer(SECRET, "127.0.0.1", lambda _: b"x" * 10_000, print)
    peer = BlockClient(server.address, SECRET, print)
    peer.block(BlockRequest("0" * 32, 0, 0))
    # With Nagle's algorithm and delayed acknowledgements, an answer takes 44 ms.
    ends = [*server._lines, *peer._idle]
    assert [bool(each._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)) for each in ends] == [True, True]
    peer.close()
    server.close()


@pytest.mark.parametrize("seed", range(20))
def test_no_plan_is_faster_than_uplinks_allow(seed: int) -> None:
    """The oracle tries every split of the reads between two racks."""
    random = np.random.default_rng(seed)
    hosts, rates = random.integers(1, 9, 2), random.uniform(1, 10, 2)
    racks = tuple(RackOfHosts(hosts=int(count), rate=float(rate)) for count, rate in zip(hosts, rates, strict=True))
    site = Site(hosts=int(hosts.sum()), source=1e9, down=1e9, up=1e9, racks=racks)
    held = float(random.uniform(1, 100))
    distinct = float(random.uniform(held, held * site.hosts))
    needed = np.minimum(distinct, held * hosts)
    own = np.linspace(0, 1, 20001)[:, None] * distinct
    reads = np.concatenate([own, distinct - own], 1)
    best = (np.maximum(0, needed - reads) / rates).max(1).min()
    assert read_once(site, distinct, held).seconds == pytest.approx(best, rel=1e-2, abs=1e-5)
    assert each_for_itself(site, distinct, held).seconds == pytest.approx((held * hosts / rates).max(), abs=1e-5)


def test_options_that_would_have_no_effect_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "a.npy", np.ones((10, 8), np.float32))
    for option in ("--topology=x", "--samples=1", "--sample-bytes=1", "--data-samples=1", "--source-rate=nan"):
        assert main(["data", "plan", str(tmp_path / "a.npy"), option]) == 2
        assert option.partition("=")[0] in capsys.readouterr().err
    assert main(["data", "plan", "--cache=1GB"]) == 2
    assert "--cache without a data set" in capsys.readouterr().err
