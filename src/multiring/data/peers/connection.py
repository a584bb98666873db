"""Sockets of data peers: both ends prove that they know the secret before any other byte."""

import contextlib
import hashlib
import hmac
import socket
import struct
import time
from collections.abc import Callable

from multiring.data.peers.words import REQUEST_BYTES, Request, answer, length_of, request_of
from multiring.runtime.bootstrap.handshake import (
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

_LENGTH = struct.Struct(">I")  # of a frame, as in the handshake
_PIECE_BYTES = 1 << 16  # of a block, between which gradients go first
_PEER = 0  # what takes a rank's place in proofs: data peers have none


class Line:
    """A connected socket: frames, and bytes between them, each within a time.

    Args:
        sock: which it closes.
        timeout_s: for each frame or block as a whole, however slowly its bytes come.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock = sock
        self._idle_s = self._timeout_s = timeout_s
        self._seal: Seal | None = None

    def greet(self, secret: bytes) -> None:
        """Prove to a server that we know the secret, and have it prove the same.

        Raises:
            FrameError: it does not.
            OSError: it is gone, or silent.
        """
        theirs = decode(self._frame()).get("nonce")
        if not isinstance(theirs, str) or not is_nonce(theirs):
            raise FrameError("it says no nonce")
        nonce = new_nonce()
        told = {"nonce": nonce, "proof": proof(secret, "client", theirs, nonce, _PEER)}
        self._send(frame(encode(told)))
        if not is_proof(decode(self._frame()).get("proof"), proof(secret, "server", theirs, nonce, _PEER)):
            raise FrameError("it does not know the secret")
        self._seal = Seal(proof(secret, "session", theirs, nonce, _PEER), "client")

    def welcome(self, secret: bytes) -> None:
        """Let a client prove that it knows the secret.

        Raises:
            FrameError: it does not.
            OSError: it is gone, or silent.
        """
        nonce = new_nonce()
        self._send(frame(encode({"nonce": nonce})))
        told = decode(self._frame())
        theirs = told.get("nonce")
        if not isinstance(theirs, str) or not is_nonce(theirs):
            raise FrameError("it says no nonce")
        if not is_proof(told.get("proof"), proof(secret, "client", nonce, theirs, _PEER)):
            raise FrameError("it does not know the secret")
        self._send(frame(encode({"proof": proof(secret, "server", nonce, theirs, _PEER)})))
        self._seal = Seal(proof(secret, "session", nonce, theirs, _PEER), "server")

    def ask(self, request: Request) -> bytes:
        """Return a block.

        Raises:
            FrameError: it is not given.
            OSError: the other end is gone, or silent.
        """
        self._say(request.message())
        size, digest = length_of(self._hear())
        data = self._bytes(size, time.monotonic() + self._timeout_s)
        if not hmac.compare_digest(hashlib.sha256(data).hexdigest(), digest):
            raise FrameError("the block's bytes are not those that were sent")
        return data

    def request(self) -> Request | None:
        """Return what the other end asks for; None where it has closed the connection."""
        found = self._frame_or_end()
        return None if found is None else request_of(self._sealed().open(found))

    def give(self, data: bytes, wait: Callable[[], None] | None = None) -> None:
        """Answer with a block; `wait` is called before each piece of it, and returns when that may go."""
        self._send(self._sealed().close(encode(answer(data))))
        if wait is None:
            self._send(data)
            return
        view = memoryview(data)
        for begin in range(0, len(data), _PIECE_BYTES):
            wait()
            self._send(view[begin : begin + _PIECE_BYTES])

    def refuse(self, text: str) -> None:
        """Answer with an error."""
        self._say({"error": text[:300]})

    def patience(self, idle_s: float, timeout_s: float) -> None:
        """Wait for so long for a request to begin, and for the rest of anything."""
        self._idle_s, self._timeout_s = idle_s, timeout_s

    def end(self) -> None:
        """End the connection while another thread waits in it."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def _sealed(self) -> Seal:
        if self._seal is None:
            raise FrameError("nobody has proven anything yet")
        return self._seal

    def _say(self, message: Message) -> None:
        self._send(self._sealed().close(encode(message)))

    def _hear(self) -> Message:
        return self._sealed().open(self._frame())

    def keep_little(self) -> None:
        """Have the kernel take no more ahead of the wire than some pieces: what it has cannot be kept back."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * _PIECE_BYTES)

    def _send(self, data: bytes | memoryview) -> None:
        self._sock.settimeout(self._timeout_s)  # of the whole, as sendall reckons it
        self._sock.sendall(data)

    def _frame(self) -> bytes:
        until = time.monotonic() + self._timeout_s
        return self._framed(self._bytes(_LENGTH.size, until), until)

    def _frame_or_end(self) -> bytes | None:
        """Return a frame; None where the other end closed the connection in place of one."""
        self._sock.settimeout(self._idle_s)
        first = self._sock.recv(1)
        until = time.monotonic() + self._timeout_s
        return self._framed(first + self._bytes(_LENGTH.size - 1, until), until) if first else None

    def _framed(self, head: bytes, until: float) -> bytes:
        (length,) = _LENGTH.unpack(head)
        if length > REQUEST_BYTES:
            raise FrameError(f"a frame of {length} bytes, at most {REQUEST_BYTES} are allowed")
        return self._bytes(length, until)

    def _bytes(self, size: int, until: float) -> bytes:
        """Return exactly so many bytes: what follows them stays in the socket."""
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
