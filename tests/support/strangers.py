"""Messages that a client without the secret may send to the tcp port, and a check that they are rejected."""

import contextlib
import random
import socket
import struct
from collections.abc import Iterator

MAGIC = b"MULTIRNG"
PROTOCOL = 3
NONCE_AND_PROOF = 16 + 32  # bytes that a client gets before it has authenticated


def visit(port: int, count: int, seed: int) -> int:
    """Send `count` random and truncated frames, each on its own connection; return the number of accepted ones."""
    return sum(gets_through(port, words) for words in frames(random.Random(seed), count))  # noqa: S311 -- noise


def gets_through(port: int, words: bytes) -> bool:
    """Return whether the port answers more than an unauthenticated client may get."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line, contextlib.suppress(OSError):
        line.sendall(words)
        if len(words) % 3 == 0:
            line.shutdown(socket.SHUT_WR)
            while more := line.recv(4096):
                answer += more
    return len(answer) > NONCE_AND_PROOF


def frames(noise: random.Random, count: int) -> Iterator[bytes]:
    """Yield noise, truncated hellos, correct hellos with wrong proofs, and hellos of another protocol."""
    for number in range(count):
        hello = (
            MAGIC
            + struct.pack("<IIII", PROTOCOL, noise.randrange(4), noise.randrange(4), noise.randrange(2))
            + noise.randbytes(16)
        )
        kinds = (
            noise.randbytes(noise.randrange(200)),
            hello[: noise.randrange(len(hello))],
            hello + noise.randbytes(noise.randrange(100)),
            MAGIC + noise.randbytes(noise.randrange(64)),
            noise.randbytes(64) * 20,
            hello.replace(b"\x01", b"\x02"),
        )
        yield kinds[number % len(kinds)]


def listening_port() -> int:
    """Return the port on which this process listens."""
    for number in range(3, 1000):
        try:
            found = socket.socket(fileno=number)
        except OSError:
            continue
        try:
            if found.family == socket.AF_INET and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return int(found.getsockname()[1])
        finally:
            found.detach()
    raise AssertionError("no socket of this process listens")
