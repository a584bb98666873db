"""Clients in one thread that each send one request after the other, so that they take little of the server's time."""

import selectors
import socket
import statistics
import time
from dataclasses import dataclass, field

_END_OF_HEADER = b"\r\n\r\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How fast a server answered.

    Attributes:
        rate: answers a second.
        median_s: the median time of an answer.
        late_s: the 99th percentile of the times.
    """

    rate: float
    median_s: float
    late_s: float


@dataclass(kw_only=True, slots=True)
class _Client:
    connection: socket.socket
    begun: float = 0.0
    got: bytearray = field(default_factory=bytearray)


def pace(port: int, request: bytes, *, clients: int, seconds: float) -> Pace:
    """Ask for some seconds, after a fifth of them to warm up. Every answer must be 200.

    Args:
        port: the server's port on 127.0.0.1.
        request: the bytes of a request, from its first line to the end of its body.
        clients: the number of connections. Each has one request on its way at a time.
        seconds: that are measured.
    """
    start = time.monotonic() + seconds / 5
    times: list[float] = []
    with selectors.DefaultSelector() as selector:
        for _ in range(clients):
            client = _Client(connection=socket.create_connection(("127.0.0.1", port)))
            client.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            selector.register(client.connection, selectors.EVENT_READ, client)
            _ask(client, request)
        while time.monotonic() < start + seconds:
            for key, _ in selector.select(1):
                client = key.data
                data = client.connection.recv(1 << 16)
                assert data, "the server closed a connection"
                client.got += data
                if _is_whole(client.got):
                    now = time.monotonic()
                    if now > start:
                        times.append(now - client.begun)
                    _ask(client, request)
        for key in list(selector.get_map().values()):
            key.data.connection.close()
    late_s = statistics.quantiles(times, n=100)[98]
    return Pace(rate=len(times) / (time.monotonic() - start), median_s=statistics.median(times), late_s=late_s)


def _ask(client: _Client, request: bytes) -> None:
    client.got.clear()
    client.begun = time.monotonic()
    client.connection.sendall(request)


def _is_whole(got: bytearray) -> bool:
    head, found, body = got.partition(_END_OF_HEADER)
    if not found:
        return False
    assert head.startswith(b"HTTP/1.1 200 "), bytes(got)
    return len(body) >= int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
