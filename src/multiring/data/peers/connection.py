"""Connections between data peers. Both ends prove that they have the secret before they exchange any other byte."""

import contextlib
import hashlib
import hmac
import socket
import struct
import time
from collections.abc import Callable

from multiring._runtime.bootstrap.handshake import (
    FrameError,
    Message,
    Seal,
    decode,
    encode,
    frame,
    is_nonce,
    is_proof,
    new_nonce,
    proof,
)
from multiring._runtime.bootstrap.sealing import SEAL_BYTES, KeyOffer, SecretSeal, client_words, server_answer
from multiring._settings import Settings
from multiring.data.peers.words import REQUEST_BYTES, BlockRequest, answer, length_of, request_of

_LENGTH = struct.Struct(">I")  # the length of a frame, as in the handshake
_PIECE_BYTES = 1 << 16  # bytes of a block that are sent at once; between these pieces, gradients have priority
_PEER = 0  # stands for the rank in proofs, because data peers have no rank


def _offer() -> KeyOffer:
    # A worker process may not have loaded libcrypto yet.
    return KeyOffer(Settings.from_environment().seal_library or "")


class Connection:
    """A connected socket that transfers frames and blocks within a time-out.

    Args:
        sock: the socket; `close` closes it.
        timeout_s: the most seconds for each frame or block as a whole.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock = sock
        self._idle_s = self._timeout_s = timeout_s
        self._seal: Seal | SecretSeal | None = None

    def greet(self, secret: bytes, *, seals: bool = False) -> None:
        """Prove to a server that this end has the secret; verify the server's proof.

        With `seals`, the connection is encrypted from then on; the server must do the same.

        Raises:
            FrameError: the server's proof is wrong.
            OSError: the server is gone, or does not answer in time.
        """
        theirs = decode(self._frame()).get("nonce")
        if not isinstance(theirs, str) or not is_nonce(theirs):
            raise FrameError("it sent no valid nonce")
        nonce = new_nonce()
        offer = _offer() if seals else None
        words = "client" if offer is None else f"client {offer.text}"
        told = {"nonce": nonce, "proof": proof(secret, words, theirs, nonce, _PEER)}
        self._send(frame(encode(told if offer is None else {**told, "offer": offer.text})))
        answer = decode(self._frame())
        words = "server" if offer is None else f"server {offer.text} {answer.get('offer')}"
        if not is_proof(answer.get("proof"), proof(secret, words, theirs, nonce, _PEER)):
            raise FrameError("its proof is wrong: it does not have the secret")
        if offer is not None:
            self._seal = offer.seal(str(answer["offer"]), secret, theirs, nonce, "client")
            return
        self._seal = Seal(proof(secret, "session", theirs, nonce, _PEER), "client")

    def welcome(self, secret: bytes, *, seals: bool = False) -> None:
        """Verify a client's proof that it has the secret; prove the same to the client.

        With `seals`, the connection is encrypted from then on; the client must do the same.

        Raises:
            FrameError: the client's proof is wrong.
            OSError: the client is gone, or does not answer in time.
        """
        nonce = new_nonce()
        self._send(frame(encode({"nonce": nonce})))
        told = decode(self._frame())
        theirs = told.get("nonce")
        if not isinstance(theirs, str) or not is_nonce(theirs):
            raise FrameError("it sent no valid nonce")
        words = client_words(told)
        if not is_proof(told.get("proof"), proof(secret, words, nonce, theirs, _PEER)):
            raise FrameError("its proof is wrong: it does not have the secret")
        if seals != ("offer" in told):
            raise FrameError("MULTIRING_SEAL differs between the two ends")
        answer_told, self._seal = server_answer(_offer() if seals else None, secret, told, (nonce, theirs), _PEER)
        self._send(frame(encode(answer_told)))

    def ask(self, request: BlockRequest) -> bytes:
        """Send a request, and return the bytes of the answer.

        Raises:
            FrameError: the other end answers with an error, or the bytes do not match their SHA-256.
            OSError: the other end is gone, or does not answer in time.
        """
        self._say(request.message())
        size, digest = length_of(self._hear())
        data = self._block(size)
        if not hmac.compare_digest(hashlib.sha256(data).hexdigest(), digest):
            raise FrameError("the block's bytes do not match their SHA-256")
        return data

    def request(self) -> BlockRequest | None:
        """Return the next request; None if the other end has closed the connection."""
        found = self._frame_or_end()
        return None if found is None else request_of(self._sealed().open(found))

    def give(self, data: bytes, wait: Callable[[], None] | None = None) -> None:
        """Answer with a block.

        `wait` is called before each piece, and returns when the piece may be sent.
        """
        seal = self._sealed()
        self._send(seal.close(encode(answer(data))))
        if wait is None and not isinstance(seal, SecretSeal):
            self._send(data)
            return
        view = memoryview(data)
        for begin in range(0, len(data), _PIECE_BYTES):
            if wait is not None:
                wait()
            piece = view[begin : begin + _PIECE_BYTES]
            self._send(seal.close(bytes(piece)) if isinstance(seal, SecretSeal) else piece)

    def refuse(self, text: str) -> None:
        """Answer with an error."""
        self._say({"error": text[:300]})

    def patience(self, idle_s: float, timeout_s: float) -> None:
        """Set how long to wait for a request to begin, and for any other transfer."""
        self._idle_s, self._timeout_s = idle_s, timeout_s

    def end(self) -> None:
        """Shut the connection down, which wakes a thread that waits in it."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def _sealed(self) -> Seal | SecretSeal:
        if self._seal is None:
            raise FrameError("handshake incomplete: the peer has not authenticated")
        return self._seal

    def _block(self, size: int) -> bytes:
        """Return the `size` bytes of a block, which come in pieces if they are encrypted."""
        until = time.monotonic() + self._timeout_s
        seal = self._sealed()
        if not isinstance(seal, SecretSeal):
            return self._bytes(size, until)
        data = bytearray()
        while len(data) < size:
            piece = min(size - len(data), _PIECE_BYTES)
            (length,) = _LENGTH.unpack(self._bytes(_LENGTH.size, until))
            if length != piece + SEAL_BYTES:
                raise FrameError(f"it sent a piece of {length} bytes instead of {piece + SEAL_BYTES}")
            data += seal.verified(self._bytes(length, until))
        return bytes(data)

    def _say(self, message: Message) -> None:
        self._send(self._sealed().close(encode(message)))

    def _hear(self) -> Message:
        return self._sealed().open(self._frame())

    def keep_little(self) -> None:
        """Limit the kernel's send buffer to some pieces.

        A sender cannot delay bytes that are already in the buffer.
        """
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * _PIECE_BYTES)

    def _send(self, data: bytes | memoryview) -> None:
        self._sock.settimeout(self._timeout_s)  # sendall applies the time-out to the whole transfer
        self._sock.sendall(data)

    def _frame(self) -> bytes:
        until = time.monotonic() + self._timeout_s
        return self._framed(self._bytes(_LENGTH.size, until), until)

    def _frame_or_end(self) -> bytes | None:
        """Return a frame; None if the other end has closed the connection."""
        self._sock.settimeout(self._idle_s)
        first = self._sock.recv(1)
        until = time.monotonic() + self._timeout_s
        return self._framed(first + self._bytes(_LENGTH.size - 1, until), until) if first else None

    def _framed(self, head: bytes, until: float) -> bytes:
        (length,) = _LENGTH.unpack(head)
        if length > REQUEST_BYTES:
            raise FrameError(f"it sent a frame of {length} bytes; at most {REQUEST_BYTES} are allowed")
        return self._bytes(length, until)

    def _bytes(self, size: int, until: float) -> bytes:
        """Return exactly `size` bytes; later bytes stay in the socket."""
        out = bytearray(size)
        view = memoryview(out)
        done = 0
        while done < size:
            self._sock.settimeout(max(until - time.monotonic(), 1e-3))
            got = self._sock.recv_into(view[done:])
            if not got:
                raise ConnectionResetError("it closed the connection")
            done += got
        return bytes(out)
