"""Pass connections on to rank 0, for hosts that cannot reach rank 0 themselves.

So a firewall between a host and rank 0's host does not hide that host's readings. The bytes are not changed: both ends
prove to each other that they know the secret, as they do without a relay.
"""

import contextlib
import selectors
import socket
import threading
from typing import cast

from multiring._runtime.bootstrap.addresses import TcpAddress, listen, own_address
from multiring.errors import LaunchError

_CONNECT_S = 3.0
_PIECE_BYTES = 1 << 16
_MOST = 64  # connections at a time


class Relay:
    """Listens on this host at the port of rank 0, in a thread of its own.

    If this is rank 0's host, whose port is rank 0's, if the port is taken, or if this host has no address, there is no
    relay.
    """

    def __init__(self, target: TcpAddress) -> None:
        self._target = target
        self._stop = threading.Event()
        self._listener: socket.socket | None = None
        if _is_here(target.host):
            return
        with contextlib.suppress(OSError, LaunchError):
            self._listener = listen(TcpAddress(own_address(None), target.port))
            threading.Thread(target=self._run, name="multiring doctor relay", daemon=True).start()

    def close(self) -> None:
        """Drop all connections."""
        self._stop.set()

    def _run(self) -> None:
        listener = self._listener
        if listener is None:
            return
        ends: dict[socket.socket, socket.socket] = {}
        with selectors.DefaultSelector() as poll, listener:
            poll.register(listener, selectors.EVENT_READ)
            while not self._stop.is_set():
                for key, _ in poll.select(0.1):
                    sock = cast("socket.socket", key.fileobj)
                    if sock is listener:
                        self._accept(listener, poll, ends)
                    elif sock in ends and not _passed(sock, ends[sock]):
                        for end in (sock, ends[sock]):
                            poll.unregister(end)
                            ends.pop(end)
                            end.close()
            for end in ends:
                end.close()

    def _accept(
        self, listener: socket.socket, poll: selectors.BaseSelector, ends: dict[socket.socket, socket.socket]
    ) -> None:
        with contextlib.suppress(OSError):
            guest, _ = listener.accept()
            if len(ends) >= 2 * _MOST:
                guest.close()
                return
            try:
                onward = socket.create_connection((self._target.host, self._target.port), _CONNECT_S)
            except OSError:
                guest.close()
                return
            for one, other in ((guest, onward), (onward, guest)):
                one.settimeout(_CONNECT_S)
                ends[one] = other
                poll.register(one, selectors.EVENT_READ)


def _is_here(host: str) -> bool:
    """Return whether a host's name or address is of this host."""
    with contextlib.suppress(OSError):
        for family, _, _, _, place in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
                probe.bind(place)
                return True
    return False


def _passed(source: socket.socket, target: socket.socket) -> bool:
    """Pass on what has come; return whether the connection goes on."""
    try:
        data = source.recv(_PIECE_BYTES)
        if data:
            target.sendall(data)
    except OSError:
        return False
    return bool(data)
