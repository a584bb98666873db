"""Hosts pass blocks to each other: each block is read once from the source, and a failed host costs only time."""

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import Here, run_ranks
from tests.support.rejoining import rejoin

import multiring
from multiring._runtime.bootstrap.addresses import TcpAddress
from multiring._runtime.bootstrap.handshake import FrameError, frame, new_nonce, proof
from multiring.data import Dataset, Loader
from multiring.data.caching.blocks import BlockCache
from multiring.data.caching.storage import CachedStorage
from multiring.data.packing.writing import PackOptions, pack
from multiring.data.peers.block_client import BlockClient
from multiring.data.peers.block_server import BlockServer
from multiring.data.peers.exchange import Exchange, Gate
from multiring.data.peers.owners import Owners
from multiring.data.peers.sharing import exchange_of
from multiring.data.peers.words import BlockRequest, request_of
from multiring.data.peers.yielding import Yielding
from multiring.data.readers.manifest import BLOCK_BYTES
from multiring.data.readers.storage import LocalStorage
from multiring.errors import ArgumentError, DataError

SECRET = b"data peers"
QUOTA = 1 << 30


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a pack of 13 blocks in 4 shards."""
    root = tmp_path_factory.mktemp("peers")
    (root / "d").mkdir()
    for number in range(24):
        np.save(
            root / "d" / f"{number:03}.npy", np.random.default_rng(number).integers(0, 255, 1 << 19, dtype=np.uint8)
        )
    source = Dataset(str(root / "d"), format="npy-files").source
    pack(source, 24, root / "pack", PackOptions(shard_bytes=3 << 20), lambda *_: None)
    return str(root / "pack")


class Counted(LocalStorage):
    """A source that counts the bytes read from shards."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.read_bytes = 0
        self.lock = threading.Lock()

    def read_into(self, name: str, begin: int, out: memoryview) -> None:
        super().read_into(name, begin, out)
        if name.endswith(".tar"):
            with self.lock:
                self.read_bytes += len(out)


Hosts = tuple[list[Exchange], list[BlockServer], Counted]


@contextlib.contextmanager
def hosts(url: str, folder: Path, count: int, told: list[str]) -> Iterator[Hosts]:
    """Yield the exchanges of `count` hosts, each with its own cache, their servers and their common source."""
    source = Counted(url)
    exchanges: list[Exchange] = []
    storages = [CachedStorage(source, BlockCache(folder / str(n), QUOTA, told.append)) for n in range(count)]

    def giver(number: int) -> Any:
        return lambda request: exchanges[number].give(request)  # noqa: PLW0108 -- there is none yet

    servers = [BlockServer(SECRET, "127.0.0.1", giver(number), told.append) for number in range(count)]
    for here, storage in enumerate(storages):
        peers = [
            None if n == here else BlockClient(server.address, SECRET, told.append) for n, server in enumerate(servers)
        ]
        exchanges.append(Exchange(storage, Owners([1.0] * count), here, peers, told.append))
        storage.fetch_by(exchanges[-1].fetch)
    try:
        yield exchanges, servers, source
    finally:
        for exchange, server in zip(exchanges, servers, strict=True):
            for peer in exchange._peers:
                if peer is not None:
                    peer.close()
            server.close()


def staged(exchanges: list[Exchange], **options: Any) -> None:
    threads = [threading.Thread(target=each.stage, args=(lambda *_: None,), kwargs=options) for each in exchanges]
    for each in threads:
        each.start()
    for each in threads:
        each.join(240)
        assert not each.is_alive()


def whole(exchange: Exchange, url: str) -> bool:
    """Return whether the cache of a host holds all blocks unchanged, without asking other hosts."""
    storage = exchange.storage
    shards = [Path(url, each.name).read_bytes() for each in storage.manifest.shards]
    return all(
        storage.cache.read(storage.key, storage.number(shard, block))
        == shards[shard][block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        for shard, block in storage.each_block()
    )


@pytest.mark.parametrize("count", [1, 2, 4])
def test_each_block_leaves_the_source_once(url: str, count: int, tmp_path: Path) -> None:
    told: list[str] = []
    with hosts(url, tmp_path, count, told) as (exchanges, _, source):
        staged(exchanges)
        size = exchanges[0].storage.manifest.size_bytes
        assert source.read_bytes == size
        assert sum(each.traffic.source for each in exchanges) == size
        assert sum(each.traffic.peers for each in exchanges) == size * (count - 1)
        assert all(whole(each, url) for each in exchanges)
    assert not told


def test_spread_over_hosts_the_caches_hold_it_together(url: str, tmp_path: Path) -> None:
    with hosts(url, tmp_path, 4, []) as (exchanges, _, source):
        staged(exchanges, own_only=True)
        size = exchanges[0].storage.manifest.size_bytes
        assert source.read_bytes == size
        data = [Dataset(each.storage, shuffle="exact") for each in exchanges]
        for number in range(24):
            assert len({each[number]["array"].tobytes() for each in data}) == 1
        assert source.read_bytes == size, "a second pass read from the source"


def test_a_host_that_dies_costs_a_second_fetch(url: str, tmp_path: Path) -> None:
    told: list[str] = []
    with hosts(url, tmp_path, 3, told) as (exchanges, servers, _):
        servers[1].close()
        staged([exchanges[0], exchanges[2]])
        assert whole(exchanges[0], url)
        assert whole(exchanges[2], url)
    assert any(f"data peer {servers[1].address}" in each and "blocks are read from the source" in each for each in told)


def test_a_host_that_gives_other_bytes_is_not_believed(url: str, tmp_path: Path) -> None:
    told: list[str] = []
    with hosts(url, tmp_path, 2, told) as (exchanges, _, _):
        right = exchanges[1].give
        exchanges[1].give = lambda request: b"x" + right(request)[1:]  # type: ignore[method-assign]
        staged(exchanges[:1])
        assert whole(exchanges[0], url)
    assert sum("damaged; it is read from the source" in each for each in told) > 3, told


@pytest.fixture
def server(url: str, tmp_path: Path) -> Iterator[tuple[TcpAddress, list[str]]]:
    told: list[str] = []
    with hosts(url, tmp_path, 1, told) as (_, servers, _):
        yield servers[0].address, told


def connected(address: TcpAddress) -> tuple[socket.socket, str]:
    sock = socket.create_connection((address.host, address.port), timeout=240)
    (length,) = struct.unpack(">I", sock.recv(4))
    return sock, json.loads(sock.recv(length))["nonce"]


def said(nonce: str, secret: bytes = SECRET, **changes: Any) -> bytes:
    own = new_nonce()
    return json.dumps({"nonce": own, "proof": proof(secret, "client", nonce, own, 0), **changes}).encode()


def test_strangers_get_nothing(server: tuple[TcpAddress, list[str]]) -> None:
    address, told = server
    generator = np.random.default_rng(0)
    probes: list[bytes] = [b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 8, b"", frame(b"{"), frame(b"[]"), frame(b"{}")]
    probes += [generator.bytes(int(generator.integers(1, 200))) for _ in range(30)]
    for probe in probes:
        sock, _ = connected(address)
        with sock:
            sock.sendall(probe)
            with contextlib.suppress(OSError):  # the server may have closed the connection already
                sock.shutdown(socket.SHUT_WR)
            assert not received(sock)
    for wrong in (b"other", SECRET + b" "):
        sock, nonce = connected(address)
        with sock:
            sock.sendall(frame(said(nonce, wrong)))
            assert not received(sock)
    assert any("does not have the secret" in each for each in told)
    assert any("at most 4096 are allowed" in each for each in told)


def received(sock: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(1 << 16):
            found += data
    return found


def test_who_knows_the_secret_may_ask_for_blocks_only(url: str, server: tuple[TcpAddress, list[str]]) -> None:
    address, _ = server
    told: list[str] = []
    key = Dataset(url).source.manifest.digest
    for request, text in (
        (BlockRequest("0" * 32, 0, 0), f"this host stages pack {key}"),
        (BlockRequest(key, 9, 0), "does not exist in this pack"),
        (BlockRequest(key, 0, 1 << 30), "does not exist in this pack"),
        (BlockRequest("../x", 0, 0), "closed"),
    ):
        peer = BlockClient(address, SECRET, told.append)
        assert peer.block(request) is None
        assert text in told[-1]
    assert BlockClient(address, b"wrong", told.append).block(BlockRequest(key, 0, 0)) is None
    peer = BlockClient(address, SECRET, told.append)
    found = peer.block(BlockRequest(key, 0, 0))
    assert found == Path(url, "shard-00000.tar").read_bytes()[:BLOCK_BYTES]
    peer.close()


@pytest.mark.parametrize(
    "message",
    [{}, {"pack": 1}, {"pack": "0" * 32, "shard": True, "block": 0}, {"pack": "0" * 32, "shard": 0, "block": -1},
     {"pack": "0" * 32, "shard": 0, "block": 0, "path": "/etc/passwd"}, {"pack": "0" * 32, "shard": 0, "block": 1e3},
     {"pack": "0" * 32, "shard": 0, "block": 0, "ready": 2},
     {"pack": "0" * 32, "shard": 0, "block": 0, "ready": 1, "begin": 0, "end": 1}],
)  # fmt: skip
def test_a_request_is_numbers_and_nothing_else(message: dict[str, Any]) -> None:
    with pytest.raises(FrameError):
        request_of(message)


@pytest.mark.parametrize("options", [{}, {"piece": (3, 9)}, {"waits_only": True}])
def test_a_request_comes_as_it_went(options: dict[str, Any]) -> None:
    request = BlockRequest("0" * 32, 1, 2, **options)
    assert request_of(request.message()) == request


def test_a_block_may_be_waited_for_without_its_bytes(url: str, tmp_path: Path) -> None:
    told: list[str] = []
    with hosts(url, tmp_path, 2, told) as (exchanges, servers, source):
        storage = exchanges[0].storage
        shard, block = next(each for each in storage.each_block() if exchanges[0].owns(*each))
        peer = BlockClient(servers[0].address, SECRET, told.append)
        assert peer.block(BlockRequest(storage.key, shard, block, waits_only=True)) == b""
        assert storage.is_here(shard, block)
        assert source.read_bytes == storage.end_of(shard, block) - storage.begin_of(block)
        peer.close()
    assert not told


@pytest.mark.parametrize(("count", "asked"), [(2, 32), (8, 32), (16, 16), (1000, 8)])
def test_a_host_has_room_for_all_that_may_wait_for_one_block(url: str, tmp_path: Path, count: int, asked: int) -> None:
    storage = CachedStorage(LocalStorage(url), BlockCache(tmp_path, QUOTA, print))
    assert Exchange(storage, Owners([1.0] * count), 0, [None] * count, print)._asking() == asked


def test_there_is_no_server_without_a_secret() -> None:
    with pytest.raises(ArgumentError, match="MULTIRING_SECRET_FILE"):
        BlockServer(b"", "127.0.0.1", lambda _: b"", print)


def test_blocks_are_dealt_by_weight_wherever_one_looks() -> None:
    owners = Owners([4.0, 4.0, 1.0])
    for begin in (0, 1000, 12345):
        counts = np.bincount([owners.owner(number) for number in range(begin, begin + 900)], minlength=3)
        assert np.abs(counts - [400, 400, 100]).max() <= 4
    with pytest.raises(ArgumentError, match="want a weight > 0"):
        Owners([1.0, 0.0])


def stages(here: Here, url: str, folder: str) -> tuple[int, int, bool]:
    group = multiring.init()
    told: list[str] = []
    storage = CachedStorage(LocalStorage(url), BlockCache(Path(folder) / str(here.rank), QUOTA, told.append))
    with exchange_of(group, storage, told.append) as exchange:
        assert exchange is not None
        exchange.stage(lambda *_: None)
        found = exchange.traffic.source, exchange.traffic.peers, whole(exchange, url)
    multiring.shutdown()
    assert not told, told
    return found


def test_the_ranks_of_a_job_stage_together(url: str, tmp_path: Path) -> None:
    found = run_ranks(stages, 3, url, str(tmp_path), engine="tcp")
    size = Dataset(url).source.manifest.size_bytes
    assert sum(each[0] for each in found) == size
    assert sum(each[1] for each in found) == 2 * size
    assert all(each[2] for each in found)


def test_a_source_that_fails_ends_staging(url: str, tmp_path: Path) -> None:
    class Failing(Counted):
        def read_into(self, name: str, begin: int, out: memoryview) -> None:
            if name == "shard-00002.tar":
                raise DataError(f"{name}: gone")
            super().read_into(name, begin, out)

    storage = CachedStorage(Failing(url), BlockCache(tmp_path, QUOTA, print))
    with pytest.raises(DataError, match=r"shard-00002\.tar: gone"):
        Exchange(storage, Owners([1.0]), 0, [None], print).stage(lambda *_: None)


def trains(here: Here, url: str, folder: str) -> list[int]:
    """Train three epochs with a cache of a third of the pack and one block; return the source's bytes of each epoch."""
    group = multiring.init()
    source = Counted(url)
    size = Dataset(url).source.manifest.size_bytes
    own = Path(folder) / str(here.rank)
    cache = BlockCache(own, size // group.size + BLOCK_BYTES, print, share=group)
    data = Dataset(source, cache=cache)
    loader = Loader(data, 6, rank=group.rank, ranks=group.size)
    sent = []
    for _ in range(3):
        before = source.read_bytes
        for batch in loader:
            for row, name in enumerate(batch["name"]):
                number = int(name.partition(".")[0])
                want = np.random.default_rng(number).integers(0, 255, 1 << 19, dtype=np.uint8)
                assert np.array_equal(batch["array"][row], want)
        group.barrier()
        sent.append(source.read_bytes - before)
    assert loader.spent["network"] > 0, "blocks from other hosts were not counted"
    loader.close()
    data.close()
    multiring.shutdown()
    return sent


def test_hosts_share_blocks_while_they_train(url: str, tmp_path: Path) -> None:
    found = run_ranks(trains, 3, url, str(tmp_path), engine="tcp")
    size = Dataset(url).source.manifest.size_bytes
    assert sum(each[0] for each in found) == size, "some bytes were not read exactly once from the source"
    assert [sum(each[epoch] for each in found) for epoch in (1, 2)] == [0, 0]


def moves(here: Here, url: str, folder: str) -> list[int]:
    """Train in a job of 3 hosts, then on its first 2 hosts with the same data set; return as `trains` does."""
    group = multiring.init()
    source = Counted(url)
    size = Dataset(url).source.manifest.size_bytes
    data = Dataset(source, cache=BlockCache(Path(folder) / str(here.rank), 2 * size, print))
    twin = data.weighted([1.0] * len(data))
    loader = Loader(data, 6, rank=group.rank, ranks=group.size, workers=1)
    list(loader)
    group.barrier()
    if not rejoin(multiring, here, 2):
        return []
    group = multiring.world()
    loader.place(group.rank, group.size)
    sent = []
    for _ in range(3):
        before = source.read_bytes
        for batch in loader:
            for row, name in enumerate(batch["name"]):
                want = np.random.default_rng(int(name.partition(".")[0])).integers(0, 255, 1 << 19, dtype=np.uint8)
                assert np.array_equal(batch["array"][row], want)
        group.barrier()
        sent.append(source.read_bytes - before)
    assert twin.follow_job() == data.follow_job() == 1
    loader.close()
    data.close()
    return sent


def test_the_hosts_that_share_are_those_of_the_job_that_there_is(url: str, tmp_path: Path) -> None:
    found = run_ranks(moves, 3, url, str(tmp_path), engine="tcp", data_share=True)
    assert sum(each[2] for each in found[:2]) == 0, "the two caches together do not hold the pack"


def test_blocks_wait_while_gradients_move_and_not_for_ever() -> None:
    now, moved, slept = [0.0], [0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds
        moved[0] += 1

    yielding = Yielding(lambda: moved[0], lambda: now[0], sleep)
    yielding.wait()
    assert not slept, "it waited although nothing moved"
    now[0], moved[0] = 1.0, 5
    yielding.wait()
    assert 0.01 < sum(slept) < 0.03, "it did not wait for about 20 ms of movement"
    now[0] += 1.0
    yielding.is_busy()
    now[0] += 1.0
    slept.clear()
    yielding.wait()
    assert not slept, "it waited after the movement had ended"


def test_a_source_that_others_crowd_is_asked_less() -> None:
    gate = Gate()
    for _ in range(400):
        gate.took(0.1)
    assert gate.width == 16
    for _ in range(600):
        gate.took(0.5)
    assert gate.width == 2
