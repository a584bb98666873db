"""What two ends of a rendezvous connection say to each other: frames, proofs, seals. No sockets here.

A frame is a 4-byte big-endian length and that many bytes. Both ends prove that they know the job's secret
(HMAC-SHA256 over both nonces, another label each way, so that neither proof can be reflected) before
anything else is read. From then on each frame carries a seal under a key of that connection, over its
direction and number, so that nothing can be put in, dropped or replayed by someone on the path.
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
SECRET_BYTES = 32  # of one that multiring draws
MOST_RANKS = 1 << 31  # what a rank may claim to be is below

_SHOWN = 300  # characters
_LENGTH = struct.Struct(">I")
_NONCE = re.compile("[0-9a-f]{64}", re.ASCII)
_SEAL_BYTES = hashlib.sha256().digest_size

Message = dict[str, Any]


class FrameError(Exception):
    """The other end does not keep to the protocol; its connection is of no more use."""


def new_nonce() -> str:
    """Return 32 random bytes, as text."""
    return secrets.token_hex(32)


def is_nonce(claimed: str) -> bool:
    """Return whether it is what `new_nonce` returns: all else could not be signed, or is nobody's who keeps to this."""
    return _NONCE.fullmatch(claimed) is not None


def proof(secret: bytes, who: str, server_nonce: str, client_nonce: str, rank: int) -> str:
    """Return what only an end that knows `secret` can say; `who` is "client", "server" or "session"."""
    words = "\n".join((PROTOCOL, who, server_nonce, client_nonce, str(rank)))
    return hmac.new(secret, words.encode(), hashlib.sha256).hexdigest()


def is_proof(claimed: object, expected: str) -> bool:
    """Compare in constant time; anything that is no ASCII text is no proof."""
    return isinstance(claimed, str) and claimed.isascii() and hmac.compare_digest(claimed, expected)


def encode(message: Message) -> bytes:
    """Return the bytes of a frame, without its length."""
    return json.dumps(message, separators=(",", ":")).encode()


def decode(payload: bytes) -> Message:
    """Raise FrameError unless `payload` is one JSON object in UTF-8. Its texts may hold anything that JSON can say."""
    try:
        message = json.loads(payload.decode())
    except (ValueError, RecursionError):
        raise FrameError("not JSON") from None
    if not isinstance(message, dict):
        raise FrameError("not a JSON object")
    return message


def shown(text: object) -> str:
    """Return what somebody unproven says, fit for an error's text: short, and printable everywhere."""
    words = repr(text)[1:-1] if isinstance(text, str) else repr(text)
    words = words.encode("ascii", "backslashreplace").decode()
    return words if len(words) <= _SHOWN else f"{words[:_SHOWN]}..."


def frame(payload: bytes) -> bytes:
    """Return `payload` behind its length."""
    return _LENGTH.pack(len(payload)) + payload


def digest_of(payload: bytes) -> bytes:
    """Return what a seal signs in place of `payload`."""
    return hashlib.sha256(payload).digest()


class FrameReader:
    """Cuts a byte stream into frames; holds at most one frame and what came with it.

    Args:
        limit_bytes: a longer frame is an error as soon as its length is read; may be raised later.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._held = bytearray()

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream, any number of them."""
        self._held += data

    def next_frame(self) -> bytes | None:
        """Return the next whole frame, or None while it is not all here.

        Raises:
            FrameError: it is longer than the limit.
        """
        if len(self._held) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._held)
        if length > self.limit_bytes:
            raise FrameError(f"a frame of {length} bytes, at most {self.limit_bytes} are allowed")
        end = _LENGTH.size + length
        if len(self._held) < end:
            return None
        payload = bytes(self._held[_LENGTH.size : end])
        del self._held[:end]
        return payload


class Seal:
    """One end's view of a proven connection: it signs what goes out and checks what comes in.

    Args:
        key: of this connection alone, known to both ends.
        me: "client" or "server".
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
        """Return what goes before a payload of `size` bytes, so that one payload serves many connections.

        Args:
            digest: of the payload, by `digest_of`.
            size: of the payload.
        """
        mark = self._mark(self._me, self._sent, digest)
        self._sent += 1
        return _LENGTH.pack(len(mark) + size) + mark

    def open(self, sealed: bytes) -> Message:
        """Return the message in `sealed`, a frame's bytes.

        Raises:
            FrameError: it is not the other end's next frame as it was sent.
        """
        mark, payload = sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:]
        if not hmac.compare_digest(mark, self._mark(self._you, self._received, digest_of(payload))):
            raise FrameError("a frame's seal is wrong")
        self._received += 1
        return decode(payload)

    def _mark(self, sender: str, number: int, digest: bytes) -> bytes:
        return hmac.digest(self._key, f"{sender} {number}\n".encode() + digest, "sha256")
