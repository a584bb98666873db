"""Run the server on a port until SIGTERM or SIGINT, and end without losing a request."""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from multiring.errors import ArgumentError
from multiring.vision.serving.application import InferenceServer
from multiring.vision.serving.limits import ServerLimits

_DRAIN_S = 1.0  # clients of idle connections hear within this time that they are closed
_LONGEST_HEADER = 1 << 15
_LOGS_OF_REQUESTS = ("asyncio", "python_multipart", "uvicorn.error")
_JOINED = 1 << 16  # bytes; larger bodies are not copied


class DrainingServer(uvicorn.Server):
    """Ends in this order: no new connections; each answer asks its client to close; requests in work are answered."""

    def __init__(self, config: uvicorn.Config, inference: InferenceServer) -> None:
        super().__init__(config)
        self._inference = inference

    def handle_exit(self, sig: int, frame: object) -> None:  # noqa: ARG002 -- a signal handler
        """End the server; a second signal ends it at once. uvicorn would raise the signal again in the end."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the server."""
        self._inference.is_draining = True
        # Connections that the kernel has taken, and this process not yet, are taken in the next rounds of the loop.
        for _ in range(3):
            await asyncio.sleep(0)
        for server in self.servers:
            server.close()
        # A client that sends its next request on an open connection gets its answer and "Connection: close". uvicorn
        # would close the idle connections now, also while such a request is on its way.
        end = asyncio.get_running_loop().time() + _DRAIN_S
        while self.server_state.connections and asyncio.get_running_loop().time() < end:  # noqa: ASYNC110 -- uvicorn has no event for it
            await asyncio.sleep(0.01)
        await super().shutdown(sockets)


class JoinedWrites:
    """A transport that sends what is written in one round of the event loop together.

    uvicorn writes the header and the body of an answer one after the other. Each write is a system call and wakes the
    client, which is a good part of the cost of a small answer.

    Args:
        transport: of the connection.
        loop: the event loop.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._kept: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send bytes, in the next round of the event loop at the latest."""
        if not data:
            return
        if not self._kept:
            self._loop.call_soon(self._flush)
        self._kept.append(data)

    def close(self) -> None:
        """Send what was written, and close the connection."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        kept, self._kept = self._kept, []
        if sum(map(len, kept)) <= _JOINED:
            kept = [b"".join(kept)]
        for each in kept:
            self._transport.write(each)


class BoundedProtocol(H11Protocol):
    """HTTP whose header must come in time, on a bounded number of connections."""

    limits = ServerLimits()
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        """Take a connection, or close it if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            transport.abort()
            return
        self.transport = cast("asyncio.Transport", JoinedWrites(transport, self.loop))
        self._timer = self.loop.call_later(self.limits.header_s, self._close_if_idle, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _close_if_idle(self, last: object) -> None:
        """Close the connection if no request has begun since the last call."""
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE and self.cycle is last:
            self.transport.abort()
            return
        self._timer = self.loop.call_later(self.limits.header_s, self._close_if_idle, self.cycle)


def serve(inference: InferenceServer, limits: ServerLimits, host: str, port: int, told: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        inference: the endpoints.
        limits: the limits, those of `inference`.
        host: the address to listen on.
        port: the port; 0: a free one.
        told: is called with the address once the server listens, and with the counts at the end.

    Raises:
        ArgumentError: the address or the port cannot be used.
    """
    # These libraries write a line for each malformed request. Clients could fill a disk with them, and a pipe that
    # nobody reads would hold up the event loop. The metrics count such requests.
    for name in _LOGS_OF_REQUESTS:
        logging.getLogger(name).setLevel(logging.ERROR)
    listener = _listener(host, port)
    protocol: Any = type("_Protocol", (BoundedProtocol,), {"limits": limits})
    config = uvicorn.Config(
        inference.app,
        http=protocol,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        backlog=2048,
        timeout_keep_alive=int(limits.header_s) + 1,
        timeout_graceful_shutdown=int(limits.time_s) + 5,
        h11_max_incomplete_event_size=_LONGEST_HEADER,
    )
    shown = f"[{host}]" if ":" in host else host
    told(f"http://{shown}:{listener.getsockname()[1]}")
    server = DrainingServer(config, inference)
    try:
        asyncio.run(server.serve(sockets=[listener]))
    finally:
        listener.close()
        told(f"{inference.begun} requests, {inference.answered} answered")


def _listener(host: str, port: int) -> socket.socket:
    try:
        [first, *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        listener = socket.socket(first[0], socket.SOCK_STREAM)
    except (OSError, OverflowError) as error:
        raise ArgumentError(f"address {host!r}, port {port}: {error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(first[4])
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ArgumentError(f"port {port} of {host!r} cannot be used: {error.strerror}; give another --port") from None
    return listener
