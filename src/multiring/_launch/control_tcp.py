"""Connect agents and the launcher over TCP.

Both ends prove that they know the job's secret before they exchange anything else.
"""

import errno
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from multiring._launch.control_link import ControlLink, control_key
from multiring._runtime.bootstrap.addresses import TcpAddress, listen, parse_address
from multiring._runtime.bootstrap.handshake import (
    MOST_RANKS,
    PROTOCOL,
    UNPROVEN_FRAME_BYTES,
    FrameError,
    FrameReader,
    Message,
    Seal,
    decode,
    encode,
    frame,
    is_nonce,
    is_proof,
    new_nonce,
    proof,
    shown,
)
from multiring.errors import ArgumentError, LaunchError

_HANDSHAKE_S = 10.0
_AGAIN_S = 0.2
_PAUSE_S = 0.1
_ATTEMPT_S = 5.0
_READ_BYTES = 4096
_MOST_PENDING = 256
_SHOWN_REFUSALS = 8


@dataclass(slots=True, eq=False)
class _Guest:
    """A connection whose other end has not proven that it knows the secret."""

    sock: socket.socket
    origin: str
    nonce: str = field(default_factory=new_nonce)
    reader: FrameReader = field(default_factory=lambda: FrameReader(UNPROVEN_FRAME_BYTES))
    until: float = field(default_factory=lambda: time.monotonic() + _HANDSHAKE_S)


class ControlListener:
    """The address at which a launcher waits for agents.

    Args:
        address: where to listen.
        secret: the job's secret.
        key: returns the key of the proofs. Ranks of srun and torchrun prove the secret itself to rank 0's address
            before they trust it, so a program that listens in place of rank 0 uses the secret as the key.

    Raises:
        LaunchError: the address is in use, or is not this host's.
    """

    def __init__(self, address: TcpAddress, secret: bytes, key: Callable[[bytes], bytes] = control_key) -> None:
        self._key = key(secret)
        self._guests: list[_Guest] = []
        self._met: list[tuple[int, ControlLink]] = []
        self.refusals: deque[str] = deque(maxlen=_SHOWN_REFUSALS)  # the last ones
        try:
            self._listener = listen(address)
        except OSError as error:
            remedy = "it must be an address of this host"
            if error.errno == errno.EADDRINUSE:
                remedy = "choose another port, or end the program that uses it, such as this command of another job"
            raise LaunchError(f"cannot listen at {address}: {error.strerror or error}; {remedy}") from None

    @property
    def port(self) -> int:
        """The port."""
        return int(self._listener.getsockname()[1])

    def watch(self, poll: selectors.BaseSelector) -> None:
        """Register the descriptors with `poll`, each with a callable as its data."""
        now = time.monotonic()
        for guest in [each for each in self._guests if each.until <= now]:
            self._refuse(guest, "it did not prove in time that it knows the secret")
        poll.register(self._listener, selectors.EVENT_READ, self._accept)
        for guest in self._guests:
            poll.register(guest.sock, selectors.EVENT_READ, _Hearing(self, guest))

    def take(self) -> list[tuple[int, ControlLink]]:
        """Return the nodes that have come since the last call, each with its connection."""
        met, self._met = self._met, []
        return met

    def close(self) -> None:
        """Stop listening. Connections that `take` returned stay open."""
        self._listener.close()
        for guest in self._guests:
            guest.sock.close()
        for _, link in self._met:
            link.close()

    def _accept(self) -> None:
        try:
            sock, place = self._listener.accept()
        except OSError:
            return
        if len(self._guests) >= _MOST_PENDING:
            self._refuse(self._guests[0], "too many connections wait to prove that they know the secret")
        sock.setblocking(False)
        guest = _Guest(sock, f"{place[0]}:{place[1]}")
        self._guests.append(guest)
        _send(sock, {"hello": PROTOCOL, "nonce": guest.nonce})

    def hear(self, guest: _Guest) -> None:
        """Read from a connection, and check the proof when it is complete."""
        if guest not in self._guests:
            return
        try:
            data = guest.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._refuse(guest, "it closed the connection")
            return
        try:
            guest.reader.feed(data)
            payload = guest.reader.next_frame()
            if payload is not None:
                self._prove(guest, decode(payload))
        except FrameError as error:
            self._refuse(guest, str(error))

    def _prove(self, guest: _Guest, message: Message) -> None:
        nonce, node = message.get("nonce"), message.get("rank")
        if not isinstance(nonce, str) or not is_nonce(nonce) or type(node) is not int or not 0 <= node < MOST_RANKS:
            raise FrameError("its proof lacks a valid nonce or node")
        if not is_proof(message.get("proof"), proof(self._key, "client", guest.nonce, nonce, node)):
            _send(guest.sock, {"refused": "wrong secret"})
            raise FrameError(f"wrong secret (it says it is node {node})")
        _send(guest.sock, {"proof": proof(self._key, "server", guest.nonce, nonce, node)})
        self._guests.remove(guest)
        seal = Seal(proof(self._key, "session", guest.nonce, nonce, node), "server")
        descriptor = guest.sock.detach()
        self._met.append((node, ControlLink(descriptor, descriptor, seal)))

    def _refuse(self, guest: _Guest, reason: str) -> None:
        self.refusals.append(f"{guest.origin}: {reason}")
        self._guests.remove(guest)
        guest.sock.close()


class _Hearing:
    def __init__(self, place: ControlListener, guest: _Guest) -> None:
        self._place, self._guest = place, guest

    def __call__(self) -> None:
        self._place.hear(self._guest)


def connect(
    address: str, secret: bytes, node: int, patience_s: float, key: Callable[[bytes], bytes] = control_key
) -> ControlLink:
    """Connect to the launcher at `address` and return the connection.

    The launcher may not listen yet.

    Args:
        address: host:port.
        secret: the job's secret.
        node: this host's number in the job.
        patience_s: how long to try.
        key: as for `ControlListener`.

    Raises:
        LaunchError: nobody listened there in time, or the launcher has another secret.
    """
    place = parse_address(address)
    if not isinstance(place, TcpAddress):
        raise ArgumentError(f"{address!r}: want HOST:PORT of the launcher")
    until = time.monotonic() + patience_s
    failure = "no answer"
    while (left_s := until - time.monotonic()) > 0:
        try:
            sock = socket.create_connection((place.host, place.port), min(_ATTEMPT_S, left_s))
        except OSError as error:
            failure = error.strerror or str(error)
            time.sleep(min(_AGAIN_S, max(0.0, until - time.monotonic())))
            continue
        try:
            return _proven(sock, key(secret), node, min(until, time.monotonic() + _HANDSHAKE_S))
        except (OSError, FrameError) as error:
            # A launcher that ends may have accepted the connection in its last moment; the next one may come.
            failure = str(error)
            sock.close()
            time.sleep(min(_AGAIN_S, max(0.0, until - time.monotonic())))
        except LaunchError:
            sock.close()
            raise
    raise LaunchError(
        f"this host cannot reach the launcher at {address} for {patience_s:g} s: {failure}; the port must be open "
        "between the hosts"
    )


def _proven(sock: socket.socket, key: bytes, node: int, until: float) -> ControlLink:
    reader = FrameReader(UNPROVEN_FRAME_BYTES)
    hello = _receive(sock, reader, until)
    server_nonce = hello.get("nonce")
    if hello.get("hello") != PROTOCOL or not isinstance(server_nonce, str) or not is_nonce(server_nonce):
        raise FrameError(f"another program listens there, or another version of multiring: {shown(hello)}")
    nonce = new_nonce()
    _send(sock, {"nonce": nonce, "rank": node, "proof": proof(key, "client", server_nonce, nonce, node)})
    answer = _receive(sock, reader, until)
    if "refused" in answer:
        raise LaunchError(
            f"the launcher refuses this host: {shown(answer['refused'])}; every host must have the same secret"
        )
    if not is_proof(answer.get("proof"), proof(key, "server", server_nonce, nonce, node)):
        raise LaunchError("the launcher does not know the job's secret; every host must have the same secret")
    seal = Seal(proof(key, "session", server_nonce, nonce, node), "client")
    descriptor = sock.detach()
    return ControlLink(descriptor, descriptor, seal)


def _receive(sock: socket.socket, reader: FrameReader, until: float) -> Message:
    """Return the next message, and read no byte behind it: sealed frames may follow.

    Raises:
        TimeoutError: the message is not complete at the monotonic time `until`.
    """
    while (payload := reader.next_frame()) is None:
        if until <= time.monotonic():
            raise TimeoutError("it did not prove in time that it knows the secret")
        sock.settimeout(_PAUSE_S)  # as a slow end sends a byte now and then, the whole time is looked at above
        try:
            data = sock.recv(1)
        except TimeoutError:
            continue
        if not data:
            raise FrameError("the launcher closed the connection")
        reader.feed(data)
    return decode(payload)


def _send(sock: socket.socket, message: Message) -> None:
    try:
        sock.sendall(frame(encode(message)))  # it fits into the empty buffer of a new connection
    except OSError:
        return  # reading reports the end of the connection
