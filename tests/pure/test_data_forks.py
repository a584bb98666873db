"""Forks of a process, such as workers of torch's DataLoader, read data sets whatever its other threads do."""

import hashlib
import io
import os
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.evidence.data_files.server import serving
from PIL import Image
from tests.support.data_sets import COUNT, MAKERS, npy, opened, packed, parquet, picture
from tests.support.held_locks import CHILD_S, all_locks_taken_elsewhere, forked, outcomes_in_a_fork
from torch.utils.data import DataLoader

from multiring._forks import ForkSafeLock, begun_in_forks
from multiring.data import Dataset, Loader, cached, open_storage
from multiring.data.caching.blocks import READERS, BlockCache
from multiring.data.caching.storage import CachedStorage
from multiring.data.peers.block_client import BlockClient
from multiring.data.peers.block_server import BlockServer
from multiring.data.peers.exchange import Exchange
from multiring.data.peers.owners import Owners
from multiring.data.peers.words import BlockRequest
from multiring.data.permutation import Permutation
from multiring.data.readers.storage import LocalStorage
from multiring.data.stages import SOURCE, StageClock
from multiring.trace import spans
from multiring.vision.fitting.samples import PictureSamples, SampleOptions
from multiring.vision.fitting.targets import LabelledSample
from multiring.vision.pictures import decode_picture


def require_equal(found: Any, wanted: Any) -> None:
    """Compare samples, values of a field, or lists of them."""
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for name in wanted:
            require_equal(found[name], wanted[name])
    else:
        assert np.array_equal(found, wanted)


def reading(data: Any, wanted: list[Any]) -> Callable[[], None]:
    """Return a function that reads all samples of a data set, and compares them with those of another one."""

    def read() -> None:
        for number, sample in enumerate(wanted):
            require_equal(data[number], sample)

    return read


def require_good(outcomes: dict[str, str], names: list[str]) -> None:
    assert "".join(outcomes.values()) == ""
    assert list(outcomes) == names, "a call in the fork did not end"


@pytest.mark.parametrize("kind", MAKERS)
def test_a_fork_reads_every_format_whatever_lock_another_thread_has(kind: str, tmp_path: Path) -> None:
    url = MAKERS[kind](tmp_path / "d")
    used, new = opened(kind, url), opened(kind, url)
    wanted = [opened(kind, url)[number] for number in range(COUNT)]
    reading(used, wanted)()  # files are open, and what readers keep is kept
    order = used.order.samples(1, np.arange(COUNT)).tolist()

    def open_there() -> None:
        reading(opened(kind, url), wanted)()

    calls = {
        "used": reading(used, wanted),
        "new": reading(new, wanted),
        "opened there": open_there,
        "order": lambda: require_equal(new.order.samples(1, np.arange(COUNT)).tolist(), order),
    }
    require_good(outcomes_in_a_fork(calls), list(calls))
    reading(used, wanted)()


def test_workers_of_torch_read_whatever_lock_another_thread_has(tmp_path: Path) -> None:
    url = parquet(tmp_path / "d")
    used = opened("parquet", url)
    wanted = list(opened("parquet", url))
    reading(used, wanted)()
    loader: DataLoader[Any] = DataLoader(
        used,  # type: ignore[arg-type]  # torch takes any object with a length and samples by number
        batch_size=None,
        num_workers=1,
        collate_fn=lambda x: x,
        multiprocessing_context="fork",
        timeout=CHILD_S,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        with all_locks_taken_elsewhere():
            samples = iter(loader)
    for sample, each in zip(samples, wanted, strict=True):
        require_equal(sample, each)


def test_a_fork_reads_remote_and_cached_sources_whatever_lock_another_thread_has(tmp_path: Path) -> None:
    root = Path(packed(tmp_path / "pack"))
    wanted = list(Dataset(root, shuffle="none"))
    keeps = BlockCache(tmp_path / "blocks")
    with serving(root) as server:
        far = Dataset(open_storage(server.url, readers=2, timeout_s=60))
        kept = Dataset(open_storage(server.url, timeout_s=60), cache=keeps)
        for each in (far, kept):  # the parent has connections, and a thread of fsspec that the fork lacks
            require_equal(each[0], wanted[0])
        copied = cached(Dataset(root), tmp_path / "copies")
        expected = Dataset(root, cache=tmp_path / "expected")
        loader = Loader(expected, 4, workers=2)
        next(iter(loader))  # its use publishes which blocks it needs
        calls = {
            "remote": reading(far, wanted),
            "remote behind a cache": reading(kept, wanted),
            "cached": reading(copied, wanted),
            "expected": reading(expected, wanted),
            "other uses": lambda: list(Loader(expected, 4)),
            "end of its uses": expected.storage.keeping.close,  # type: ignore[attr-defined]
        }
        published = sorted((tmp_path / "expected" / READERS).iterdir())
        require_good(outcomes_in_a_fork(calls), list(calls))
        assert sorted((tmp_path / "expected" / READERS).iterdir()) == published != []
        reading(far, wanted)()  # the fork has not used the parent's connections
        reading(kept, wanted)()
    loader.close()


def test_a_fork_uses_a_loader_of_its_parent_whatever_lock_another_thread_has(tmp_path: Path) -> None:
    loader = Loader(Dataset(npy(tmp_path / "d")), 4, workers=2)
    batches = iter(loader)
    next(batches)
    rest = [batch["array"].copy() for batch in Loader(loader.samples, 4)][1:]

    def read() -> None:
        for batch, wanted in zip(batches, rest, strict=True):
            require_equal(batch["array"], wanted)

    calls = {"rest of the epoch": read, "close": loader.close}
    require_good(outcomes_in_a_fork(calls), list(calls))
    read()
    loader.close()


def test_a_fork_decodes_pictures_whatever_lock_another_thread_has(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("RGB", (4200, 4100), (200, 100, 50)).save(file, "JPEG")  # large: only one at a time is decoded
    large = decode_picture("large", file.getvalue()).pixels[0, 0]
    small = [picture(number, "jpg") for number in range(4)]
    pixels = [decode_picture("small", each).pixels for each in small]
    for number, each in enumerate(small):
        (tmp_path / f"{number}.jpg").write_bytes(each)
    labelled = [
        LabelledSample(
            path=f"{number}.jpg",
            digest=hashlib.sha256(each).hexdigest(),
            width=7,
            height=9,
            labels=(),
            class_name="",
            group="",
        )
        for number, each in enumerate(small)
    ]
    options = SampleOptions(size=8, fit="stretch", cache_bytes=8 * 8 * 3 * 2)
    fitted, other = (PictureSamples(tmp_path, labelled, lambda *_: {}, options) for _ in range(2))
    squares = [other.squares(number) for number in range(4)]
    fitted.squares(0)

    def decode() -> None:
        for each, wanted in zip(small, pixels, strict=True):
            require_equal(decode_picture("small", each).pixels, wanted)

    def fit() -> None:
        for number, wanted in enumerate(squares):
            require_equal(fitted.squares(number), wanted)

    calls: dict[str, Callable[[], None]] = {
        "small": decode,
        "large": lambda: require_equal(decode_picture("large", file.getvalue()).pixels[0, 0], large),
        "samples": fit,
    }
    require_good(outcomes_in_a_fork(calls), list(calls))


def test_a_fork_records_spans_whatever_lock_another_thread_has() -> None:
    def record() -> None:
        found = spans.start_spans()
        with spans.span("in the fork"):
            pass
        spans.stop_spans()
        assert [each.name for each in found.take()] == ["in the fork"]

    calls = {"spans": record, "permutation": lambda: Permutation(5, "key").places_of([0, 1])}
    require_good(outcomes_in_a_fork(calls), list(calls))


def test_a_fork_gets_blocks_of_a_peer_and_leaves_the_parents_port_and_connections_alone(tmp_path: Path) -> None:
    root = Path(packed(tmp_path / "pack"))
    storage = CachedStorage(LocalStorage(root), BlockCache(tmp_path / "cache"))
    shared: list[Exchange] = []
    told: list[str] = []

    def give(request: BlockRequest) -> bytes:
        return shared[0].give(request)

    server = BlockServer(b"secret", "127.0.0.1", give, told.append)
    own, other, later = (BlockClient(server.address, b"secret", told.append, timeout_s=10.0) for _ in range(3))
    shared.append(Exchange(storage, Owners([1.0]), 0, [None], told.append))
    shared[0].server = own
    storage.fetch_by(shared[0].fetch, shared[0].fetch_piece)
    request = BlockRequest(storage.key, 0, 0)
    block = other.block(request)  # this connection stays open
    assert block == storage.fetched(0, 0)

    def fetch() -> None:
        assert not storage.keeping.in_memory(0)
        assert shared[0].fetch(0, 0) == block
        assert (shared[0].traffic.source, shared[0].traffic.peers) == (0, len(block))
        assert other.block(request) == block
        assert told == []

    calls = {"fetch": fetch, "close": server.close}
    require_good(outcomes_in_a_fork(calls), list(calls))
    assert other.block(request) == block
    assert later.block(request) == block
    assert told == []
    for each in (own, other, later, server):
        each.close()


def test_forks_get_the_answers_to_their_own_requests() -> None:
    """Over the parent's connection, a fork took another one's answer for its own: another sample of equal size."""

    def content(number: int) -> bytes:
        return number.to_bytes(4, "little") * 500

    def request(number: int) -> BlockRequest:
        return BlockRequest("0" * 32, 0, number)

    server = BlockServer(b"secret", "127.0.0.1", lambda asked: content(asked.block), print)
    client = BlockClient(server.address, b"secret", print, timeout_s=30.0)
    assert client.block(request(0)) == content(0)  # this connection stays open
    begin, release = os.pipe()
    forks = []
    for fork in range(6):
        if not (child := os.fork()):
            os.close(release)
            os.read(begin, 1)  # it ends once all forks are there
            numbers = range(1000 * fork, 1000 * fork + 20)
            os._exit(sum(client.block(request(number)) != content(number) for number in numbers))
        forks.append(child)
    os.close(begin)
    os.close(release)
    assert [os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in forks] == [0] * 6
    assert client.block(request(7)) == content(7)
    client.close()
    server.close()


def test_a_fork_counts_its_own_requests_as_alone() -> None:
    clock = StageClock()

    def count() -> None:
        with clock.request(SOURCE):
            pass
        assert f"{SOURCE} alone requests" in clock.take()

    with clock.request(SOURCE):
        require_good(outcomes_in_a_fork({"count": count}), ["count"])


def in_a_fork_beside(lock: ForkSafeLock, call: Callable[[], bool]) -> bool:
    """Return what `call` returns in a fork that is made while another thread has the lock; False if it did not end."""
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            free.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child, *ends = forked()
    if child == 0:
        signal.alarm(CHILD_S)
        try:
            os._exit(0 if call() else 1)
        finally:
            os._exit(2)
    free.set()
    thread.join()
    for each in ends:
        os.close(each)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_lock_is_free_in_forks_and_their_forks(reentrant: bool) -> None:  # noqa: FBT001
    lock = ForkSafeLock(reentrant=reentrant)

    def is_right() -> bool:
        with lock:
            return lock.acquire(0.05) is reentrant

    assert in_a_fork_beside(lock, is_right)
    assert in_a_fork_beside(lock, lambda: in_a_fork_beside(lock, is_right))


def test_objects_begin_in_forks_as_long_as_they_exist() -> None:
    begun: list[str] = []

    class Known:
        def __init__(self, name: str) -> None:
            self.name = name

        def begin_in_fork(self) -> None:
            begun.append(self.name)

    kept, gone = Known("kept"), Known("gone")
    for each in (kept, kept, gone):
        begun_in_forks(each)
    del gone, each
    child, reading_end, writing_end = forked()
    if child == 0:
        signal.alarm(CHILD_S)
        os.write(writing_end, " ".join(begun).encode())
        os._exit(0)
    os.close(writing_end)
    with os.fdopen(reading_end) as pipe:
        assert pipe.read() == "kept"
    os.waitpid(child, 0)
    assert begun == []
    assert kept.name == "kept"
