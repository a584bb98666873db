"""Connections between two hosts for a check: whether they can be made, and how fast bytes travel.

A host listens on each of its rails, and discards what arrives. The rate is what the kernel of the sending host knows:
the segments that have arrived at the other one, and the time in which there were bytes to send. So a program that waits
for a busy core does not make the link look slow, as long as the kernel has bytes to send.
"""

import contextlib
import hmac
import selectors
import socket
import statistics
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, cast

from multiring._launch.rank_starts import free_port
from multiring._runtime.bootstrap.addresses import TcpAddress, listen
from multiring.errors import LaunchError

_TOKEN_BYTES = 32  # the length of the word that lets a connection in, in characters
_ANSWER = struct.Struct(">I")  # the number of the host that answers
_CHUNK = bytes(1 << 18)
_CONNECT_S = 3.0
_MOST_AT_ONCE = 32
_NOT_STARTED_S = 2.0
_LINGER = struct.pack("ii", 1, 0)  # close resets the connection, so that nothing of it is on the way any more
# <linux/tcp.h>, struct tcp_info: offsets of tcpi_snd_mss and tcpi_delivered, of 32 bits, and of tcpi_busy_time, of 64.
# tcpi_bytes_acked stands still while a lost segment is sent again, and then jumps: tcpi_delivered does not.
# tcpi_rwnd_limited is not subtracted: the link is busy then, too, if a queue before it holds the bytes.
_INFO_BYTES = 200
_SEGMENT_BYTES, _DELIVERED, _BUSY_US = 16, 192, 168
_SAMPLES = 12  # of the bytes and the time; an acknowledgement that comes late on busy cores disturbs a few of them


class RailEnd(NamedTuple):
    """The address of a host on a rail, where it listens."""

    address: str
    port: int


class Receiver:
    """Listens on the rails of this host, and discards what arrives, in a thread of its own.

    Args:
        addresses: this host's address on each rail.
        ports: the ports at which it may listen, or None for any.
        token: the word with which a connection must begin; others are closed.
    """

    def __init__(self, addresses: Sequence[str], ports: tuple[int, int] | None, token: str) -> None:
        self._token = token.encode()
        self.number = 0  # this host's number among the hosts, once it is known
        self._listeners = [_listener(address, ports) for address in addresses]
        self.ends = [RailEnd(*listener.getsockname()[:2]) for listener in self._listeners]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="multiring doctor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and drop all connections."""
        self._stop.set()
        self._thread.join()
        for listener in self._listeners:
            listener.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as poll:
            for listener in self._listeners:
                poll.register(listener, selectors.EVENT_READ, None)
            while not self._stop.is_set():
                for key, _ in poll.select(0.1):
                    sock = cast("socket.socket", key.fileobj)
                    if key.data is None:
                        with contextlib.suppress(OSError):
                            accepted, _ = sock.accept()
                            accepted.setblocking(False)
                            poll.register(accepted, selectors.EVENT_READ, bytearray())
                    elif not self._hear(sock, key.data):
                        poll.unregister(sock)
                        sock.close()
            for key in list(poll.get_map().values()):
                if key.data is not None:
                    cast("socket.socket", key.fileobj).close()

    def _hear(self, sock: socket.socket, begun: bytearray) -> bool:
        """Read from a connection; return whether it stays open. `begun` is what it has said of the token so far."""
        try:
            data = sock.recv(1 << 20 if len(begun) == _TOKEN_BYTES else _TOKEN_BYTES - len(begun))
            if not data:
                return False
            if len(begun) < _TOKEN_BYTES:
                begun += data
                if len(begun) == _TOKEN_BYTES:
                    if not hmac.compare_digest(bytes(begun), self._token):
                        return False
                    sock.send(_ANSWER.pack(self.number))  # it fits into the empty buffer of a new connection
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True


def _listener(address: str, ports: tuple[int, int] | None) -> socket.socket:
    refusal: OSError | None = None
    for _ in range(8):  # another process may take the port before this one listens
        try:
            return listen(TcpAddress(address, free_port(address, ports)))
        except OSError as error:
            refusal = error
    raise LaunchError(f"no port can be listened at on {address}: {refusal}")


def reach(ends: Sequence[tuple[int, int, RailEnd]], token: str, sources: Sequence[str]) -> list[str]:
    """Connect to other hosts, many at a time; return why each connection failed, "" for each that was made.

    Args:
        ends: the number of each host, the rail, and where it listens.
        token: the word of the receivers.
        sources: this host's address on each rail.
    """
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        return list(pool.map(lambda each: _refusal(each[0], each[2], token, sources[each[1]]), ends))


def _refusal(host: int, end: RailEnd, token: str, source: str) -> str:
    try:
        connected(host, end, token, source).close()
    except OSError as error:
        return f"{end.address}:{end.port}: {error.strerror or error}"
    return ""


def connected(host: int, end: RailEnd, token: str, source: str) -> socket.socket:
    """Return a connection to the receiver of `host`.

    Raises:
        OSError: there is none within 3 s, or another host answers at the address.
    """
    sock = socket.create_connection(end, _CONNECT_S, (source, 0))
    try:
        sock.sendall(token.encode())
        answer = sock.recv(_ANSWER.size, socket.MSG_WAITALL)
    except BaseException:
        sock.close()
        raise
    if answer == _ANSWER.pack(host):
        return sock
    sock.close()
    if len(answer) < _ANSWER.size:
        raise ConnectionError("another program answers there")
    raise ConnectionError("another host of the job answers there: two hosts have this address")


def rate_to(host: int, end: RailEnd, token: str, source: str, seconds: tuple[float, float]) -> float | None:
    """Return the bytes per second from this host to another one; None if it cannot be measured.

    Args:
        host: the number of the other host.
        end: where it listens.
        token: the word of the receivers.
        source: this host's address on the rail.
        seconds: how long to send before the measurement, because a shaped link passes bursts faster; and how long to
            measure.
    """
    try:
        sock = connected(host, end, token, source)
    except OSError:
        return None
    with sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
        sock.setblocking(False)
        try:
            _send_for(sock, seconds[0])
            samples = [_info(sock)]
            for _ in range(_SAMPLES):
                _send_for(sock, seconds[1] / _SAMPLES)
                samples.append(_info(sock))
        except OSError:
            return None
    return slope_of(samples)


def slope_of(samples: Sequence[tuple[float, int]]) -> float | None:
    """Return the bytes per second of samples of seconds and bytes: the median of the slopes over half of the samples.

    The result is None if nothing arrived.
    """
    half = len(samples) // 2
    slopes = [
        (later[1] - sooner[1]) / (later[0] - sooner[0])
        for sooner, later in zip(samples, samples[half:], strict=False)
        if later[0] > sooner[0]
    ]
    return statistics.median(slopes) if slopes and statistics.median(slopes) > 0 else None


def _send_for(sock: socket.socket, seconds: float) -> None:
    until = time.monotonic() + seconds
    with selectors.DefaultSelector() as poll:
        poll.register(sock, selectors.EVENT_WRITE)
        while (left_s := until - time.monotonic()) > 0:
            if poll.select(left_s):
                with contextlib.suppress(BlockingIOError):
                    sock.send(_CHUNK)


def _info(sock: socket.socket) -> tuple[float, int]:
    """Return the seconds with bytes to send or under way, and the bytes that have arrived, in whole segments."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    segment_bytes, delivered = (struct.unpack_from("=I", info, at)[0] for at in (_SEGMENT_BYTES, _DELIVERED))
    return struct.unpack_from("=Q", info, _BUSY_US)[0] * 1e-6, segment_bytes * delivered
