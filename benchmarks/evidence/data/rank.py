"""Run one host of main.py's lab.

The last host serves a pack by HTTP, and the other hosts stage it.
"""

import json
import re
import shutil
import socket
import socketserver
import sys
import threading
import time
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

import multiring
from multiring._runtime import Group
from multiring._runtime.bootstrap.addresses import own_address
from multiring.data.caching.blocks import BlockCache
from multiring.data.caching.storage import CachedStorage
from multiring.data.peers.exchange import Exchange
from multiring.data.peers.owners import Owners
from multiring.data.peers.sharing import exchange_of, told_once
from multiring.data.readers.opening import tell
from multiring.data.readers.storage import open_storage

CACHE = Path("/dev/shm/multiring-evidence")  # noqa: S108 -- a lab host's own
INTERFACE = Path("/sys/class/net/rail0/statistics/tx_bytes")
SETTLED_S = 1.0  # The lab slows its links down a moment after the ranks have started.
MEASURED_S, DRAIN_S = 2.0, 1.0


class Source(BaseHTTPRequestHandler):
    """A file server with ranges. It counts the requests and the bytes sent."""

    protocol_version = "HTTP/1.1"
    root = Path()
    sent = 0
    requests = 0
    lock = threading.Lock()

    def do_HEAD(self) -> None:
        """Send the headers of a file."""
        self._answer(with_body=False)

    def do_GET(self) -> None:
        """Send a file, or a range of it."""
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.root / Path(self.path).name
        if not path.is_file():
            self.send_error(404)
            return
        size = path.stat().st_size
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        begin, end = (int(found[1]), min(size, int(found[2]) + 1)) if found else (0, size)
        self.send_response(206 if found else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - begin))
        if found:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        self.end_headers()
        if not with_body:
            return
        with path.open("rb") as file:
            file.seek(begin)
            data = file.read(end - begin)
        self.wfile.write(data)
        with self.lock:
            Source.sent += len(data)
            Source.requests += 1

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 -- http.server's signature
        """Drop the log message."""


def main(folder: str, mode: str) -> None:
    """Serve or stage the pack.

    The source prints the bytes that it sent and the time that the other hosts took.
    """
    group = multiring.init()
    is_source = group.rank == group.size - 1
    time.sleep(SETTLED_S)
    rates = goodputs(group)
    Source.root = Path(folder)
    server = ThreadingHTTPServer(("0.0.0.0", 0), Source) if is_source else None  # noqa: S104 -- of a lab
    where = np.zeros((1, 64), np.uint8)
    if server is not None:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        text = f"http://{own_address(None)}:{server.server_address[1]}".encode()
        where[0, : len(text)] = np.frombuffer(text, np.uint8)
    url = bytes(np.asarray(group.all_gather(where))[-1]).rstrip(b"\0").decode()
    remote = open_storage(url)  # This call loads the HTTP reader but sends no request.
    before = int(INTERFACE.read_text())
    group.barrier()
    began = time.monotonic()
    known = told_once(group, remote) if mode == "once" else remote
    storage = None if is_source else CachedStorage(known, BlockCache(CACHE, 1 << 40, tell))
    once = exchange_of(group, storage, tell, rates[1:]) if mode == "once" else nullcontext(alone(storage))
    with once as exchange:
        if exchange is not None:
            exchange.stage(lambda *_: None)
        group.barrier()
    if server is not None:
        passed = time.monotonic() - began
        told = {"sent": Source.sent, "requests": Source.requests, "seconds": passed, "rates": rates}
        print("RESULT " + json.dumps({**told, "interface": int(INTERFACE.read_text()) - before}), flush=True)
        server.shutdown()
    shutil.rmtree(CACHE, ignore_errors=True)
    multiring.shutdown()


def alone(storage: CachedStorage | None) -> Exchange | None:
    """Return an exchange that reads all blocks from the source, or None on the source."""
    return None if storage is None else Exchange(storage, Owners([1.0]), 0, [None], tell)


def goodputs(group: Group) -> list[float]:
    """Measure the rate of a plain socket, from the source and then from each host.

    Returns:
        Bytes per second, the source's rate first. Only one sender is active at a time.
    """
    rates = np.zeros((1, 1))
    last = group.size - 1
    for sender in (last, *range(last)):
        receiver = 0 if sender else 1
        port = np.zeros((1, 64), np.uint8)
        listener = socket.create_server(("0.0.0.0", 0)) if group.rank == receiver else None  # noqa: S104 -- of a lab
        if listener is not None:
            text = f"{own_address(None)}:{listener.getsockname()[1]}".encode()
            port[0, : len(text)] = np.frombuffer(text, np.uint8)
        told = bytes(np.asarray(group.all_gather(port))[receiver]).rstrip(b"\0").decode()
        if group.rank == sender:
            rates[0, 0] = sending(told)
        if listener is not None:
            drained(listener)
        group.barrier()
    found = np.asarray(group.all_gather(rates)).ravel().tolist()
    return [found[last], *found[:last]]


def sending(address: str) -> float:
    """Send for some seconds; return bytes per second without the link's initial burst."""
    host, _, port = address.rpartition(":")
    data = bytes(1 << 16)
    with socket.create_connection((host, int(port))) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 17)
        sent, began, counted = 0, time.monotonic(), 0.0
        while (now := time.monotonic()) - began < DRAIN_S + MEASURED_S:
            if now - began >= DRAIN_S and not counted:
                sent, counted = 0, now
            sock.sendall(data)
            sent += len(data)
        return sent / (time.monotonic() - counted)


def drained(listener: socket.socket) -> None:
    """Receive until the sender closes the connection."""
    with listener, listener.accept()[0] as sock:
        while sock.recv(1 << 18):
            pass


if __name__ == "__main__":
    socketserver.TCPServer.allow_reuse_address = True
    main(*sys.argv[1:])
