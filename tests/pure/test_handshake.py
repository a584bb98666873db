"""Frames, proofs and seals, without sockets."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiring._runtime.bootstrap.handshake import FrameError, FrameReader, Seal, decode, encode, frame, is_proof, proof


@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=50), max_size=6), st.integers(1, 9))
def test_frames_survive_any_cutting(payloads: list[bytes], step: int) -> None:
    stream = b"".join(map(frame, payloads))
    reader = FrameReader(limit_bytes=50)
    found = []
    for start in range(0, len(stream), step):
        reader.feed(stream[start : start + step])
        while (payload := reader.next_frame()) is not None:
            found.append(payload)
    assert found == payloads


def test_a_long_frame_is_refused_before_it_is_here() -> None:
    reader = FrameReader(limit_bytes=10)
    reader.feed(frame(b"x" * 11)[:4])
    with pytest.raises(FrameError, match="a frame of 11 bytes; at most 10"):
        reader.next_frame()


@pytest.mark.parametrize("payload", [b"", b"\xff\xfe", b"{", b"[1]", b"[" * 100_000])
def test_what_is_no_message(payload: bytes) -> None:
    with pytest.raises(FrameError, match="not"):
        decode(payload)


def test_a_proof_depends_on_everything_in_it() -> None:
    words = [(b"s", "client", "a", "b", 1), (b"t", "client", "a", "b", 1), (b"s", "server", "a", "b", 1)]
    words += [(b"s", "client", "A", "b", 1), (b"s", "client", "a", "B", 1), (b"s", "client", "a", "b", 2)]
    proofs = [proof(*each) for each in words]
    assert len(set(proofs)) == len(proofs)
    assert is_proof(proofs[0], proofs[0])
    assert not is_proof(proofs[1], proofs[0])
    assert not is_proof(None, proofs[0])


def sealed_pair() -> tuple[Seal, Seal]:
    return Seal("key", "client"), Seal("key", "server")


def opened(seal: Seal, sent: bytes) -> dict[str, object]:
    return seal.open(sent[4:])


def test_sealed_messages_arrive_in_order_both_ways() -> None:
    client, server = sealed_pair()
    for number in range(3):
        assert opened(server, client.close(encode({"n": number}))) == {"n": number}
        assert opened(client, server.close(encode({"m": number}))) == {"m": number}


def test_a_changed_replayed_dropped_reflected_or_foreign_message_is_refused() -> None:
    client, server = sealed_pair()
    first, second = client.close(encode({"n": 1})), client.close(encode({"n": 2}))
    changed = first[:-2] + b"9}"
    mine = sealed_pair()[1].close(encode({"n": 1}))
    foreign = Seal("other key", "client").close(encode({"n": 1}))
    for wrong in (changed, second, mine, foreign, b"", first[:-1]):
        with pytest.raises(FrameError, match="seal"):
            opened(server, wrong)
    assert opened(server, first) == {"n": 1}
    with pytest.raises(FrameError, match="seal"):
        opened(server, first)
