"""The rendezvous rejects all messages without the secret: rank 0 rejects clients, ranks reject an impostor.

The input is structured: messages of the protocol with wrong fields, truncated frames, and noise. The long form is
benchmarks/evidence/jobs/strangers.py. The readers between hosts are native; see native/tests/handshakes_test.cc.
"""

import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiring._runtime.bootstrap.addresses import parse_address
from multiring._runtime.bootstrap.handshake import PROTOCOL, FrameError, FrameReader, Seal, decode, encode, frame, proof
from multiring._runtime.bootstrap.identity import Identity
from multiring._runtime.bootstrap.rendezvous_client import Client, _AttemptError
from multiring._runtime.bootstrap.rendezvous_link import TimeLimit
from multiring._runtime.bootstrap.rendezvous_server import Server
from multiring._version import VERSION
from multiring.errors import RendezvousError

NONCE = "0a" * 32
FEW = settings(derandomize=True, max_examples=60, deadline=None)

texts = st.text(st.characters(exclude_categories=()), max_size=8) | st.sampled_from(
    [NONCE, NONCE[1:], "0" * 64, PROTOCOL]
)
numbers = st.integers() | st.sampled_from([2**31, -(2**63), 10**400]) | st.floats()
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
FIELDS = ("nonce", "rank", "proof", "hello", "refused", "error", "welcome", "peer_info", "peer_infos", "secret")
changes = st.dictionaries(st.sampled_from(FIELDS) | texts, values, max_size=4)
encodings = st.sampled_from(
    [("utf-8", "replace"), ("utf-8", "surrogatepass"), ("utf-16", "surrogatepass"), ("latin-1", "replace")]
)


@st.composite
def payloads(draw: st.DrawFn, right: tuple[dict[str, Any], ...]) -> bytes:
    """Return a frame's payload: a valid message with changed or missing fields, in some encoding, or noise."""
    if draw(st.integers(0, 5)) == 0:
        return draw(st.binary(max_size=300))
    message = {**draw(st.sampled_from(right)), **draw(changes)}
    for name in draw(st.lists(st.sampled_from(FIELDS), max_size=1)):
        message.pop(name, None)
    text = json.dumps(message, ensure_ascii=draw(st.booleans()))
    return text.encode(*draw(encodings))


@st.composite
def words(draw: st.DrawFn, right: tuple[dict[str, Any], ...]) -> bytes:
    """Return some frames; the last one may be truncated or longer than its header says."""
    said = b"".join(frame(each) for each in draw(st.lists(payloads(right), max_size=4)))
    end = draw(st.sampled_from([b"", b"\0", struct.pack(">I", 2**32 - 1), struct.pack(">I", 4096) + b"x" * 4096]))
    return (said + end)[: draw(st.integers(0, 6000))]


TO_RANK_0: tuple[dict[str, Any], ...] = (
    {"nonce": NONCE, "rank": 1, "proof": "0" * 64},
    {"rank": 1, "size": 2, "version": VERSION, "job": "job"},
)
TO_A_RANK: tuple[dict[str, Any], ...] = (
    {"hello": PROTOCOL, "nonce": NONCE},
    {"proof": "0" * 64},
    {"refused": "no"},
    {"welcome": {}, "peer_infos": []},
)


def identity(rank: int, place: str) -> Identity:
    return Identity(
        rank=rank, size=2, local_rank=None, local_size=None, rendezvous=place, secret=b"s", job="job", source="test"
    )


class Door:
    """Rank 0, served by the thread that plays the unauthenticated clients."""

    def __init__(self) -> None:
        self.place = f"@multiring-words-{os.getpid()}-{time.monotonic_ns()}"
        self.server = Server(identity(0, self.place), parse_address(self.place), VERSION, TimeLimit(3600))

    def hear(self, said: bytes) -> None:
        """Send bytes to rank 0 from a client that then hangs up; fail unless rank 0 rejects or drops the client."""
        with socket.socket(socket.AF_UNIX) as line:
            line.connect("\0" + self.place[1:])
            self.server._serve(time.monotonic())
            with suppress(BrokenPipeError, ConnectionResetError):
                line.sendall(said)
                line.shutdown(socket.SHUT_WR)
            for _ in range(10):
                if not self.server._pending_handshakes:
                    break
                self.server._serve(time.monotonic())
            answer = b""
            with suppress(ConnectionResetError):
                while more := line.recv(1 << 16):
                    answer += more
        assert not self.server._pending_handshakes
        assert not self.server._guests
        assert not self.server._members
        assert self.server._trouble is None
        reader = FrameReader(4096)
        reader.feed(answer)
        told = [decode(payload) for payload in iter(reader.next_frame, None)]
        assert [set(each) for each in told] in ([{"hello", "nonce"}], [{"hello", "nonce"}, {"refused"}]), told
        self.server._refusals.clear()


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    made = Door()
    yield made
    made.server.close()


@FEW
@given(st.lists(words(TO_RANK_0), min_size=1, max_size=10))
def test_rank_0_refuses_strangers(door: Door, said: list[bytes]) -> None:
    for each in said:
        door.hear(each)


def hear_an_impostor(said: bytes) -> None:
    """Let a rank look for rank 0 and get the answer `said`; fail unless the rank rejects it."""
    mine, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_WR)
        client = Client(identity(1, "@nowhere"), parse_address("@nowhere"), VERSION, TimeLimit(5))
        try:
            client._introduce(mine)
        except (RendezvousError, _AttemptError, OSError) as error:
            str(error).encode()
        else:
            raise AssertionError(f"taken for rank 0: {said!r}")
        finally:
            mine.close()


@FEW
@given(st.lists(words(TO_A_RANK), min_size=1, max_size=10))
def test_a_rank_refuses_impostors(said: list[bytes]) -> None:
    for each in said:
        hear_an_impostor(each)


@FEW
@given(st.lists(st.binary(max_size=80) | payloads(TO_A_RANK), max_size=10), st.integers(0, 3))
def test_what_is_not_sealed_is_refused(said: list[bytes], right: int) -> None:
    key = proof(b"s", "session", NONCE, NONCE, 1)
    mine, theirs = Seal(key, "client"), Seal(key, "server")
    for _ in range(right):
        assert mine.open(theirs.close(encode({"n": 1}))[4:]) == {"n": 1}
    whole = theirs.close(encode({"n": 2}))[4:]
    for each in said:
        with pytest.raises(FrameError):
            mine.open(each)
        with pytest.raises(FrameError):
            mine.open(whole[: len(each) % len(whole)] + b"~" + whole[len(each) % len(whole) + 1 :])
    assert mine.open(whole) == {"n": 2}


__all__ = ["TO_A_RANK", "TO_RANK_0", "Door", "hear_an_impostor", "words"]
