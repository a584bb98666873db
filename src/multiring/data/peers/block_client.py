"""The client of another host's server of blocks."""

import socket
import time
from collections import deque
from collections.abc import Callable

from multiring._forks import begun_in_forks
from multiring._runtime.bootstrap.addresses import TcpAddress
from multiring._runtime.bootstrap.handshake import FrameError
from multiring.data.peers.connection import Connection
from multiring.data.peers.words import BlockRequest

Tell = Callable[[str], None]

_BLOCK_S = 60.0  # time-out for a block
_PAUSE_S = 30.0  # seconds for which a failed peer gets no requests


class BlockClient:
    """A client of another host's server. It opens connections as they are needed.

    Args:
        address: the server's address.
        secret: the exchange's secret.
        tell: called with a warning when the server fails.
        timeout_s: the most seconds for a block.
        seals: encrypt the connections; the same as the server.
    """

    def __init__(
        self, address: TcpAddress, secret: bytes, tell: Tell, timeout_s: float = _BLOCK_S, *, seals: bool = False
    ) -> None:
        self.address = address
        self._secret, self._tell, self._timeout_s = secret, tell, timeout_s
        self._seals = seals
        self._idle: deque[Connection] = deque()
        self._paused_until = 0.0
        begun_in_forks(self)

    def begin_in_fork(self) -> None:
        """Leave the connections to the parent: two processes must not use one connection."""
        self.close()

    def __getstate__(self) -> tuple[TcpAddress, bytes, Tell, float, bool]:
        return (self.address, self._secret, self._tell, self._timeout_s, self._seals)

    def __setstate__(self, state: tuple[TcpAddress, bytes, Tell, float, bool]) -> None:
        address, secret, tell, timeout_s, seals = state
        BlockClient.__init__(self, address, secret, tell, timeout_s, seals=seals)

    def block(self, request: BlockRequest) -> bytes | None:
        """Return the bytes for a request; None if the peer fails, which is reported.

        A peer that has failed gets no requests for 30 s; the result is then None, too.
        """
        if time.monotonic() < self._paused_until:
            return None
        try:
            line = self._idle.pop() if self._idle else self._connected()
            try:
                data = line.ask(request)
            except BaseException:
                line.close()
                raise
        except (OSError, FrameError) as error:
            self._paused_until = time.monotonic() + _PAUSE_S
            self._idle.clear()
            why = str(error) or type(error).__name__
            self._tell(f"data peer {self.address}: {why}; its blocks are read from the source for {_PAUSE_S:g} s")
            return None
        self._idle.append(line)
        return data

    def _connected(self) -> Connection:
        sock = socket.create_connection((self.address.host, self.address.port), timeout=self._timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line = Connection(sock, self._timeout_s)
        try:
            line.greet(self._secret, seals=self._seals)
        except BaseException:
            line.close()
            raise
        return line

    def close(self) -> None:
        """Close the connections that are not in use."""
        while self._idle:
            self._idle.pop().close()
