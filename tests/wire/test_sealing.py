"""Encrypted connections (MULTIRING_SEAL): what ranks of different hosts send each other over sockets.

native/tests/sealing_test.cc attacks the connections of the native core.
"""

import contextlib
import dataclasses
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.support.free_ports import free_port
from tests.support.programs import run
from tests.support.ranks import Here, report_of, run_ranks

from multiring._cli.run_file import read_options
from multiring._native import Context, ContextConfig
from multiring._runtime.bootstrap.addresses import TcpAddress
from multiring._runtime.bootstrap.handshake import FrameError
from multiring._runtime.bootstrap.identity import Identity
from multiring._runtime.bootstrap.rendezvous import meet
from multiring._runtime.bootstrap.sealing import KeyOffer, SecretSeal
from multiring._runtime.engines.nccl import NcclEngine
from multiring.data.peers.block_client import BlockClient
from multiring.data.peers.block_server import BlockServer
from multiring.data.peers.words import BlockRequest
from multiring.errors import ArgumentError, MultiringError, RendezvousError, UnsupportedError

SECRET = "a secret that is long enough"  # noqa: S105 -- of jobs that live for a second
KNOWN = b"a text that an eavesdropper would know" * 4
DEADLINE_S = 240.0


def sums(here: Here) -> tuple[bool, bool]:
    """Return whether collectives and a message have the right values."""
    group = here.join()
    total = np.arange(200_000, dtype=np.float64) + group.rank
    group.all_reduce(total)
    want = here.size * np.arange(200_000.0) + sum(range(here.size))
    gathered = group.all_gather(np.array([group.rank]))
    return bool((total == want).all()), gathered.tolist() == list(range(here.size))


@pytest.mark.parametrize("rails", ["127.0.0.1", "127.0.0.1,127.0.0.2"])
def test_sealed_collectives_have_the_right_values(rails: str) -> None:
    found = run_ranks(sums, 3, engine="tcp", seal=1, secret=SECRET, rails=rails)
    assert found == [(True, True)] * 3


def run_programs(here: Here, seeds: list[int]) -> int:
    group = here.join()
    for seed in seeds:
        run(group, seed, turns=3)
    return len(seeds)


@pytest.mark.parametrize(("engine", "ranks"), [("tcp", 3), ("shm+tcp", 4)])
def test_sealed_random_programs(engine: str, ranks: int) -> None:
    found = run_ranks(run_programs, ranks, [5], engine=engine, seal=1, secret=SECRET, deadline_s=240.0)
    assert found == [1] * ranks


@pytest.mark.parametrize("without", [0, 1, 2])
def test_a_rank_that_does_not_seal_is_named_on_all_ranks(without: int) -> None:
    by_rank = [{"seal": int(rank != without)} for rank in range(3)]
    report = report_of(sums, 3, engine="tcp", by_rank=by_rank, secret=SECRET, init_timeout_s=30)
    for outcome in report.outcomes:
        assert "MULTIRING_SEAL=1" in str(outcome.error), outcome
    named = {0: "rank 0", 1: "rank 1", 2: "rank 2"}[without]
    assert any(f"{named} does not" in str(outcome.error) for outcome in report.outcomes)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_the_library_is_named_on_all_ranks(rank: int) -> None:
    by_rank = [{"seal_library": "/nowhere/libcrypto.so"} if each == rank else {} for each in range(3)]
    report = report_of(sums, 3, engine="tcp", by_rank=by_rank, seal=1, secret=SECRET, init_timeout_s=30)
    for outcome in report.outcomes:
        assert "cannot load libcrypto" in str(outcome.error), outcome
        assert "/nowhere/libcrypto.so" in str(outcome.error), outcome
    others = [str(outcome.error) for each, outcome in enumerate(report.outcomes) if each != rank]
    assert all(f"rank {rank}: " in text for text in others)


def error_with_library(here: Here) -> str:
    try:
        here.join()
    except MultiringError as error:
        return str(error)
    return ""


def test_another_library_and_one_that_is_too_old_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "old.c"
    source.write_text("unsigned long OpenSSL_version_num(void) { return 0x1000214fUL; }\n")
    old = tmp_path / "libold.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(old), str(source)], check=True)  # noqa: S607
    for library, text in ((str(old), "is too old"), ("libm.so.6", "has no function OpenSSL_version_num")):
        settings = {"seal": 1, "seal_library": library, "secret": SECRET, "init_timeout_s": 30}
        for error in run_ranks(error_with_library, 2, engine="tcp", **settings):
            assert text in error
            assert "MULTIRING_SEAL_LIBRARY" in error


def test_a_short_secret_is_refused_on_all_ranks() -> None:
    settings = {"seal": 1, "secret": "short", "init_timeout_s": 30}
    for error in run_ranks(error_with_library, 3, engine="tcp", **settings):
        assert "a secret of 5 bytes: want at least 16" in error


def test_the_mpi_engine_is_refused() -> None:
    names = dict.fromkeys(("stall_warn_s", "stall_timeout_s", "rail_timeout_s", "wire_timeout_s"), 1.0)
    config = ContextConfig(
        rank=0, size=1, job=b"job", secret=SECRET.encode(), segment_bytes=1 << 24, log_moves=False, lower=True,
        read_peers=True, by_mpi=True, seal=True, **names
    )  # fmt: skip
    with pytest.raises(ArgumentError, match="MULTIRING_SEAL=1 with the mpi engine"):
        Context(config)


def test_nccl_between_hosts_is_refused() -> None:
    calls = SimpleNamespace(services=SimpleNamespace(seals=True))
    group: Any = SimpleNamespace(calls=calls, topology=SimpleNamespace(hosts=((0,), (1,))))
    with pytest.raises(UnsupportedError, match="NCCL does not encrypt"):
        NcclEngine.open(group, 0)


def test_the_option_of_run_sets_the_variable(tmp_path: Path) -> None:
    program = "import os; print(os.environ['MULTIRING_SEAL'])"
    command = [sys.executable, "-m", "multiring", "run", "-n", "1", "--here", "--seal", "--", sys.executable]
    done = subprocess.run([*command, "-c", program], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.split()[-1] == "1"
    options = tmp_path / "run.toml"
    options.write_text("seal = true\n")
    assert read_options(options) == {"seal": True}


# ---- the seal of Python's connections


def sealed_pair() -> tuple[SecretSeal, SecretSeal]:
    client, server = KeyOffer(), KeyOffer()
    words = (SECRET.encode(), "server nonce", "client nonce")
    return client.seal(server.text, *words, "client"), server.seal(client.text, *words, "server")


def test_sealed_messages_arrive_in_order_both_ways_and_are_never_the_same() -> None:
    client, server = sealed_pair()
    seen = set()
    for _ in range(200):
        for one, other in ((client, server), (server, client)):
            sent = one.close(KNOWN)
            assert KNOWN[:8] not in sent
            seen.add(sent)
            assert other.verified(sent[4:]) == KNOWN
    assert len(seen) == 400


def test_a_changed_replayed_dropped_reflected_or_foreign_message_is_refused() -> None:
    kinds: list[Callable[[SecretSeal, SecretSeal], bytes]] = [
        lambda client, _server: (client.close(KNOWN), client.close(KNOWN))[1],
        lambda _client, server: server.close(KNOWN),
        lambda _client, _server: sealed_pair()[0].close(KNOWN),
        lambda client, _server: client.close(KNOWN)[:-1],
        lambda _client, _server: b"",
    ]
    for kind in kinds:
        client, server = sealed_pair()
        with pytest.raises(FrameError, match="not authentic"):
            server.verified(kind(client, server)[4:])
        with pytest.raises(FrameError, match="not authentic"):
            server.verified(client.close(KNOWN)[4:])
    client, server = sealed_pair()
    first = client.close(KNOWN)
    assert server.verified(first[4:]) == KNOWN
    with pytest.raises(FrameError, match="not authentic"):
        server.verified(first[4:])
    for bit in range(0, 8 * len(first[4:]), 7):
        client, server = sealed_pair()
        changed = bytearray(client.close(KNOWN)[4:])
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError, match="not authentic"):
            server.verified(bytes(changed))


@pytest.mark.parametrize("theirs", ["", "no hexadecimal text", "41", "41" + "00" * 32, "58" + "09" * 32])
def test_an_invalid_offer_is_refused(theirs: str) -> None:
    with pytest.raises(FrameError, match="its key offer is invalid"):
        KeyOffer().seal(theirs, SECRET.encode(), "a", "b", "client")


# ---- a proxy on the way


class Proxy:
    """Copies connections to `target`, keeps all bytes, and flips a bit of byte `flips` of one direction.

    Direction 0 is that from the caller.
    """

    def __init__(self, target: TcpAddress, direction: int = 0, flips: int | None = None) -> None:
        self._target, self._direction, self._flips = target, direction, flips
        self.seen = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = TcpAddress("127.0.0.1", self._listener.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                try:
                    there = socket.create_connection((self._target.host, self._target.port), timeout=DEADLINE_S)
                except OSError:
                    here.close()
                    continue
                for direction, (one, other) in enumerate(((here, there), (there, here))):
                    threading.Thread(target=self._copy, args=(one, other, direction), daemon=True).start()

    def _copy(self, one: socket.socket, other: socket.socket, direction: int) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := bytearray(one.recv(1 << 16)):
                self.seen += data
                at = -1 if self._flips is None or direction != self._direction else self._flips - passed
                if 0 <= at < len(data):
                    data[at] ^= 1
                passed += len(data)
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


def identity(rank: int, size: int, place: str, **changes: Any) -> Identity:
    plain = Identity(
        rank=rank, size=size, local_rank=None, local_size=None, rendezvous=place, secret=SECRET.encode(), job="job",
        source="test", seals=True,
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


def rendezvous_over(proxy: Callable[[TcpAddress], Proxy]) -> tuple[list[Any], Proxy]:
    """Return what two ranks get from a rendezvous over a proxy: the peer infos, or the error."""
    place = TcpAddress("127.0.0.1", free_port())
    on_the_way = proxy(place)

    def join(rank: int) -> Any:
        own = identity(rank, 2, str(on_the_way.address if rank else place))
        try:
            return meet(own, {"known": KNOWN.decode(), "rank": rank}, timeout_s=100)
        except RendezvousError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(join, range(2)))
    on_the_way.close()
    return found, on_the_way


def test_nothing_of_the_rendezvous_is_readable() -> None:
    found, proxy = rendezvous_over(Proxy)
    assert found == [[{"known": KNOWN.decode(), "rank": rank} for rank in range(2)]] * 2
    assert len(proxy.seen) > 2 * len(KNOWN)
    assert KNOWN[:16] not in proxy.seen


@pytest.mark.parametrize(("direction", "at"), [(0, 500), (1, 310)])
def test_a_changed_message_of_the_rendezvous_ends_it_on_both_ranks(direction: int, at: int) -> None:
    found, _ = rendezvous_over(lambda place: Proxy(place, direction, at))
    assert all(isinstance(each, RendezvousError) for each in found), found


@pytest.fixture
def served() -> Iterator[tuple[BlockServer, bytes, list[str]]]:
    data = KNOWN * 4000
    told: list[str] = []
    server = BlockServer(SECRET.encode(), "127.0.0.1", lambda _request: data, told.append, seals=True)
    yield server, data, told
    server.close()


REQUEST = BlockRequest(pack="0" * 32, shard=0, block=0)


def test_a_block_travels_sealed(served: tuple[BlockServer, bytes, list[str]]) -> None:
    server, data, _told = served
    proxy = Proxy(server.address)
    client = BlockClient(proxy.address, SECRET.encode(), pytest.fail, seals=True)
    for _ in range(2):
        assert client.block(REQUEST) == data
    client.close()
    proxy.close()
    assert len(proxy.seen) > 2 * len(data)
    assert KNOWN[:16] not in proxy.seen


@pytest.mark.parametrize("flips", [700, 100_000, 300_000])
def test_a_changed_block_is_refused_and_names_the_peer(
    served: tuple[BlockServer, bytes, list[str]], flips: int
) -> None:
    server, _data, _told = served
    proxy = Proxy(server.address, 1, flips)
    told: list[str] = []
    client = BlockClient(proxy.address, SECRET.encode(), told.append, seals=True)
    assert client.block(REQUEST) is None
    proxy.close()
    assert len(told) == 1
    assert str(proxy.address) in told[0]
    assert "not authentic" in told[0]


def test_data_peers_that_seal_and_others_refuse_each_other(served: tuple[BlockServer, bytes, list[str]]) -> None:
    server, _data, _told = served
    told: list[str] = []
    client = BlockClient(server.address, SECRET.encode(), told.append)
    assert client.block(REQUEST) is None
    assert len(told) == 1
