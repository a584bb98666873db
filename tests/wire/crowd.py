"""Many ranks at a rendezvous that are sockets of one process: they prove themselves and join, and parse no table."""

import os
import selectors
import socket
import struct
import time
from collections.abc import Iterable
from typing import Any

from multiring.runtime.bootstrap.addresses import LocalAddress, parse_address
from multiring.runtime.bootstrap.handshake import FrameReader, Seal, decode, encode, frame, new_nonce, proof
from multiring.version import VERSION

_LENGTH = struct.Struct(">I")
_SMALL_FRAME_BYTES = 4096
_RECEIVE_BYTES = 1 << 20
_PAUSE_S = 0.002


class _Light:
    """One of them."""

    def __init__(self, rank: int, place: str) -> None:
        self.rank = rank
        self.reader = FrameReader(_SMALL_FRAME_BYTES)
        self.seal: Seal | None = None
        self.sock = _dial(place)


class Crowd:
    """Ranks `ranks` of `size` at rank 0's address `place`; each is connected from construction on."""

    def __init__(self, place: str, ranks: Iterable[int], size: int, *, secret: bytes, job: str) -> None:
        self._size, self._secret, self._job = size, secret, job
        self._lights = [_Light(rank, place) for rank in ranks]

    def join(self, timeout_s: float) -> None:
        """Prove all of them and have them join, whatever order rank 0 hears them in."""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for light in self._lights:
                selector.register(light.sock, selectors.EVENT_READ, (light, self._talk(light)))
            while selector.get_map():
                assert time.monotonic() < deadline, f"{len(selector.get_map())} have not joined"
                for key, _ in selector.select(1.0):
                    light, talk = key.data
                    data = light.sock.recv(_SMALL_FRAME_BYTES)
                    assert data, f"rank {light.rank} was turned away"
                    light.reader.feed(data)
                    while (payload := light.reader.next_frame()) is not None:
                        if talk(payload):
                            selector.unregister(light.sock)

    def say(self, message: dict[str, Any]) -> None:
        """Send a message of each."""
        payload = encode(message)
        for light in self._lights:
            assert light.seal is not None
            light.sock.sendall(light.seal.close(payload))

    def take_tables(self, timeout_s: float) -> int:
        """Read everyone's next frame to its end, all at the same time; return how long one is, equal for all."""
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
                assert time.monotonic() < deadline, f"{len(selector.get_map())} have no table"
                for key, _ in selector.select(1.0):
                    key.data[1] -= key.fileobj.recv_into(buffer, min(_RECEIVE_BYTES, key.data[1]))  # type: ignore[union-attr]
                    if key.data[1] == 0:
                        selector.unregister(key.fileobj)
        (size,) = set(sizes.values())
        return size

    def close(self) -> None:
        """Hang up."""
        for light in self._lights:
            light.sock.close()

    def _talk(self, light: _Light) -> Any:
        """Return what answers frames of rank 0 until this one has joined, and then returns True."""
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
