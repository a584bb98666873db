"""A host's server of blocks."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from multiring._forks import begun_in_forks
from multiring._runtime.bootstrap.addresses import TcpAddress, listen
from multiring._runtime.bootstrap.handshake import FrameError
from multiring.data.peers.block_client import Tell
from multiring.data.peers.connection import Connection
from multiring.data.peers.words import BlockRequest
from multiring.errors import ArgumentError, MultiringError

Give = Callable[[BlockRequest], bytes]

CONNECTIONS = 256
_PROOF_S = 10.0  # time-out of the handshake
_PEER_S = 60.0  # time-out for receiving a request, and for sending a block
_IDLE_S = 3600.0  # seconds to wait for the next request to begin
_AGAIN_S = 0.05  # seconds before the server retries after a failed accept


class BlockServer:
    """Serves blocks to peers that have the secret.

    Args:
        secret: the exchange's secret, not empty.
        host: the address of the only interface on which the server listens.
        give: returns the bytes for a request. If it raises a MultiringError, the peer gets the error's text.
        tell: called with a warning about a connection that failed the handshake or the protocol.
        wait: called before each 64 KiB that are sent; it returns when they may be sent.
        seals: encrypt the connections; the same as the clients.

    Raises:
        ArgumentError: the secret is empty.
        OSError: the address does not belong to this host.
    """

    def __init__(
        self,
        secret: bytes,
        host: str,
        give: Give,
        tell: Tell,
        wait: Callable[[], None] | None = None,
        *,
        seals: bool = False,
    ) -> None:
        if not secret:
            raise ArgumentError(
                "a server of blocks without a secret would give them to anybody: set MULTIRING_SECRET_FILE"
            )
        self._secret, self._give, self._tell, self._wait = secret, give, tell, wait
        self._seals = seals
        self._listener = listen(TcpAddress(host, 0))
        self._listener.setblocking(True)
        name = self._listener.getsockname()
        self.address = TcpAddress(str(name[0]), int(name[1]))
        self._lines: set[Connection] = set()
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True, name="multiring-blocks").start()
        begun_in_forks(self)

    def begin_in_fork(self) -> None:
        """Leave the port and the connections to the parent, whose threads serve them.

        If the fork kept them open, other hosts would not notice the end of the parent. The fork must not shut them
        down, as `close` does, because that ends them in the parent, too.
        """
        self._lock = threading.Lock()
        self._closed = True
        lines, self._lines = self._lines, set()
        self._listener.close()
        for line in lines:
            line.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, (host, *_) = self._listener.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # send small answers without delay
            except OSError:
                # The process has no free descriptors, or the client is already gone. Only this connection is lost.
                if not self._closed:
                    time.sleep(_AGAIN_S)
                continue
            line = Connection(sock, _PROOF_S)
            with self._lock:
                is_full = len(self._lines) >= CONNECTIONS or self._closed
                if not is_full:
                    self._lines.add(line)
            if is_full:
                line.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(line, host), daemon=True, name="multiring-blocks").start()
            except RuntimeError:  # no thread can be started now
                with self._lock:
                    self._lines.discard(line)
                line.close()

    def _serve(self, line: Connection, host: str) -> None:
        try:
            line.welcome(self._secret, seals=self._seals)
            line.patience(_IDLE_S, _PEER_S)
            if self._wait is not None:
                line.keep_little()
            while (request := line.request()) is not None:
                try:
                    data = self._give(request)
                except MultiringError as error:
                    line.refuse(str(error))
                else:
                    line.give(data, self._wait)
        except FrameError as error:
            self._tell(f"a connection from {host} was closed: {error}")
        except OSError:
            pass  # the client is gone or timed out; it reads the block from the source
        finally:
            with self._lock:
                self._lines.discard(line)
            line.close()

    def close(self) -> None:
        """Close the port and all connections."""
        with self._lock:
            self._closed = True
            lines = list(self._lines)
        # The thread waits in accept, and only shutdown wakes it.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for line in lines:
            line.end()
