"""The protocol of a rendezvous connection: frames, proofs and seals.

This module uses no sockets. A frame is a 4-byte big-endian length and that many bytes. First both ends prove that they
know the job's secret. A proof is an HMAC-SHA256 over both nonces, with a different label in each direction, so that a
proof cannot be reflected. From then on each frame carries a seal: an HMAC with a key of this connection over the
frame's direction, number and payload. So an attacker on the path cannot insert, drop or replay a frame without
detection.
"""

import hashlib
import hmac
import json
import re
import secrets
import struct
from typing import Any

PROTOCOL = "multiring rendezvous 2"
UNPROVEN_FRAME_BYTES = 4096
PEER_INFO_FRAME_BYTES = 1 << 20
SECRET_BYTES = 32  # the size of a secret that multiring draws
MOST_RANKS = 1 << 31  # a rank in a proof must be below this number

_SHOWN = 300  # the largest number of characters that `shown` returns
_LENGTH = struct.Struct(">I")
_NONCE = re.compile("[0-9a-f]{64}", re.ASCII)
_SEAL_BYTES = hashlib.sha256().digest_size

Message = dict[str, Any]


class FrameError(Exception):
    """The other end has violated the protocol; the connection is unusable."""


def new_nonce() -> str:
    """Return 32 random bytes as hexadecimal text."""
    return secrets.token_hex(32)


def is_nonce(claimed: str) -> bool:
    """Return whether `claimed` has the form of `new_nonce`."""
    return _NONCE.fullmatch(claimed) is not None


def proof(secret: bytes, who: str, server_nonce: str, client_nonce: str, rank: int) -> str:
    """Return the proof that an end knows `secret`.

    `who` is "client", "server" or "session".
    """
    words = "\n".join((PROTOCOL, who, server_nonce, client_nonce, str(rank)))
    return hmac.new(secret, words.encode(), hashlib.sha256).hexdigest()


def is_proof(claimed: object, expected: str) -> bool:
    """Compare a proof in constant time; a value that is not ASCII text is no proof."""
    return isinstance(claimed, str) and claimed.isascii() and hmac.compare_digest(claimed, expected)


def encode(message: Message) -> bytes:
    """Return the payload of a frame with `message`, without the length."""
    return json.dumps(message, separators=(",", ":")).encode()


def decode(payload: bytes) -> Message:
    """Return the JSON object in `payload`, which must be UTF-8.

    Its contents are not checked.

    Raises:
        FrameError: `payload` is not one JSON object.
    """
    try:
        message = json.loads(payload.decode())
    except (ValueError, RecursionError):
        raise FrameError("not JSON") from None
    if not isinstance(message, dict):
        raise FrameError("not a JSON object")
    return message


def shown(text: object) -> str:
    """Return a peer's unauthenticated text in a form for error messages.

    The text is shortened, and converted to printable ASCII.
    """
    words = repr(text)[1:-1] if isinstance(text, str) else repr(text)
    words = words.encode("ascii", "backslashreplace").decode()
    return words if len(words) <= _SHOWN else f"{words[:_SHOWN]}..."


def frame(payload: bytes) -> bytes:
    """Return the frame of `payload`: its length and its bytes."""
    return _LENGTH.pack(len(payload)) + payload


def digest_of(payload: bytes) -> bytes:
    """Return the digest of `payload`, over which a seal is computed."""
    return hashlib.sha256(payload).digest()


class FrameReader:
    """Splits a byte stream into frames.

    It buffers at most one frame and the data received with it.

    Args:
        limit_bytes: the maximum length of a frame. A longer frame is an error as soon as its length is read. The limit
            may be raised later.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._held = bytearray()

    def feed(self, data: bytes) -> None:
        """Append the next bytes of the stream."""
        self._held += data

    def next_frame(self) -> bytes | None:
        """Return the payload of the next frame, or None if the frame is not complete yet.

        Raises:
            FrameError: the frame is longer than the limit.
        """
        if len(self._held) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._held)
        if length > self.limit_bytes:
            raise FrameError(f"a frame of {length} bytes; at most {self.limit_bytes} are allowed")
        end = _LENGTH.size + length
        if len(self._held) < end:
            return None
        payload = bytes(self._held[_LENGTH.size : end])
        del self._held[:end]
        return payload


class Seal:
    """One end of an authenticated connection.

    It seals outgoing messages and verifies incoming ones.

    Args:
        key: the key of this connection, known to both ends only.
        me: this end, "client" or "server".
    """

    def __init__(self, key: str, me: str) -> None:
        self._key = key.encode()
        self._me = me
        self._you = "client" if me == "server" else "server"
        self._sent = 0
        self._received = 0

    def close(self, payload: bytes) -> bytes:
        """Return the frame that carries `payload` to the other end."""
        return self.head(digest_of(payload), len(payload)) + payload

    def head(self, digest: bytes, size: int) -> bytes:
        """Return the length and seal that precede a payload.

        This way, several connections can send the same payload without copying its bytes.

        Args:
            digest: the payload's digest, from `digest_of`.
            size: the payload's size in bytes.
        """
        mark = self._mark(self._me, self._sent, digest)
        self._sent += 1
        return _LENGTH.pack(len(mark) + size) + mark

    def frames(self, payload: bytes, digest: bytes) -> tuple[bytes, ...]:
        """Return the parts of the frame of `payload`, whose digest is `digest`.

        Connections share the bytes of `payload`.
        """
        return (self.head(digest, len(payload)), payload)

    def open(self, sealed: bytes) -> Message:
        """Verify the seal of a frame's payload and return the message.

        Raises:
            FrameError: the payload is not the other end's next frame, or it was modified.
        """
        return decode(self.verified(sealed))

    def verified(self, sealed: bytes) -> bytes:
        """Verify the seal of a frame's payload and return the bytes that it carries.

        Raises:
            FrameError: the payload is not the other end's next frame, or it was modified.
        """
        mark, payload = sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:]
        if not hmac.compare_digest(mark, self._mark(self._you, self._received, digest_of(payload))):
            raise FrameError("a frame's seal is wrong")
        self._received += 1
        return payload

    def _mark(self, sender: str, number: int, digest: bytes) -> bytes:
        return hmac.digest(self._key, f"{sender} {number}\n".encode() + digest, "sha256")
