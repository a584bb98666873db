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
    return free_ports(1, host)


def free_ports(count: int, host: str = "127.0.0.1") -> int:
    """Return the first of so many ports that follow each other, like `free_port`."""
    for _ in range(1000):
        first = _dice.randint(_FIRST, _LAST - count + 1)
        with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
            for port in range(first, first + count):
                opened.enter_context(socket.create_server((host, port)))
            return first
    raise AssertionError(f"found no {count} free ports that follow each other between {_FIRST} and {_LAST}")
