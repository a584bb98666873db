"""Ports that a program of a test may take later."""

import contextlib
import random
import socket

# Kernels give out 32768 and more to whoever asks for any port, so that concurrent tests could get a port between its
# choice and its use. A client could even connect to itself there.
_FIRST, _LAST = 10_000, 19_999
_dice = random.SystemRandom()


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of this host on which nobody listens, and which the kernel does not give out."""
    for _ in range(1000):
        port = _dice.randint(_FIRST, _LAST)
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return port
    raise AssertionError(f"1000 ports between {_FIRST} and {_LAST} are in use")
