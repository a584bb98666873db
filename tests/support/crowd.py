"""Many ranks of a rendezvous, played by sockets of one process. They authenticate and join, but do not parse tables."""

import os
import selectors
import socket
import struct
import time
from collections.abc import Iterable
from typing import Any

from multiring._runtime.bootstrap.addresses import LocalAddress, parse_address
from multiring._runtime.bootstrap.handshake import FrameReader, Seal, decode, encode, frame, new_nonce, proof
from multiring._version import VERSION

_LENGTH = struct.Struct(">I")
_SMALL_FRAME_BYTES = 4096
_RECEIVE_BYTES = 1 << 20
_PAUSE_S = 0.002


class _Light:
    """One simulated rank."""

    def __init__(self, rank: int, place: str) -> None:
        self.rank = rank
        self.reader = FrameReader(_SMALL_FRAME_BYTES)
        self.seal: Seal | None = None
        self.sock = _dial(place)


class Crowd:
    """Simulated ranks `ranks` of `size`, which connect to rank 0 at `place` on construction."""

    def __init__(self, place: str, ranks: Iterable[int], size: int, *, secret: bytes, job: str) -> None:
        self._size, self._secret, self._job = size, secret, job
        self._lights = [_Light(rank, place) for rank in ranks]

    def join(self, timeout_s: float) -> None:
        """Authenticate all ranks and let them join, in the order in which rank 0 answers."""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for light in self._lights:
                selector.register(light.sock, selectors.EVENT_READ, (light, self._talk(light)))
            while selector.get_map():
                assert time.monotonic() < deadline, f"{len(selector.get_map())} ranks have not joined"
                for key, _ in selector.select(1.0):
                    light, talk = key.data
                    data = light.sock.recv(_SMALL_FRAME_BYTES)
                    assert data, f"rank {light.rank} was rejected"
                    light.reader.feed(data)
                    while (payload := light.reader.next_frame()) is not None:
                        if talk(payload):
                            selector.unregister(light.sock)

    def say(self, message: dict[str, Any]) -> None:
        """Send a message from each rank."""
        payload = encode(message)
        for light in self._lights:
            assert light.seal is not None
            light.sock.sendall(light.seal.close(payload))

    def take_tables(self, timeout_s: float) -> int:
        """Read the next frame of all ranks concurrently. Return the frame's length, which must be equal for all."""
        deadline = time.monotonic() + timeout_s
        sizes: dict[int, int] = {}
        buffer = bytearray(_RECEIVE_BYTES)
        with selectors.DefaultSelector() as selector:
            for light in self._lights:
                light.sock.setblocking(True)
                head = light.sock.recv(_LENGTH.size, socket.MSG_WAITALL)
                sizes[light.rank] = _LENGTH.unpack(head)[0]
                selector.register(light.sock, selectors.EVENT_READ, [light.rank, sizes[light.rank]])
            while selector.get_map():
                assert time.monotonic() < deadline, f"{len(selector.get_map())} ranks have no table"
                for key, _ in selector.select(1.0):
                    key.data[1] -= key.fileobj.recv_into(buffer, min(_RECEIVE_BYTES, key.data[1]))  # type: ignore[union-attr]
                    if key.data[1] == 0:
                        selector.unregister(key.fileobj)
        (size,) = set(sizes.values())
        return size

    def close(self) -> None:
        """Close all connections."""
        for light in self._lights:
            light.sock.close()

    def _talk(self, light: _Light) -> Any:
        """Return a function that answers rank 0's frames for one rank, and returns True once the rank has joined."""
        nonce = new_nonce()
        server_nonce = ""

        def answer(payload: bytes) -> bool:
            nonlocal server_nonce
            if not server_nonce:
                server_nonce = decode(payload)["nonce"]
                mine = proof(self._secret, "client", server_nonce, nonce, light.rank)
                light.sock.sendall(frame(encode({"nonce": nonce, "rank": light.rank, "proof": mine})))
            elif light.seal is None:
                light.seal = Seal(proof(self._secret, "session", server_nonce, nonce, light.rank), "client")
                light.sock.sendall(light.seal.close(encode(self._peer_info_of(light.rank))))
            else:
                assert "welcome" in light.seal.open(payload)
                return True
            return False

        return answer

    def _peer_info_of(self, rank: int) -> dict[str, Any]:
        here = {"pid": os.getpid(), "host": socket.gethostname()}
        return {"rank": rank, "size": self._size, "version": VERSION, "job": self._job, **here}


def _dial(place: str) -> socket.socket:
    address = parse_address(place)
    while True:
        is_local = isinstance(address, LocalAddress)
        sock = socket.socket(socket.AF_UNIX if is_local else socket.AF_INET)
        try:
            sock.connect(f"\0{address.name}" if isinstance(address, LocalAddress) else (address.host, address.port))
        except (ConnectionRefusedError, BlockingIOError):
            sock.close()
            time.sleep(_PAUSE_S)
        else:
            return sock
