"""A small HTTP server with ranges, selectable validators and failures."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Server(ThreadingHTTPServer):
    """Serves the files of a folder.

    Attributes:
        validators: The headers that identify a file's version: "etag", "time", "both" or "none".
        fails: The number of further GET requests that will fail.
        status: The status code of failing requests.
        has_ranges: Whether the server sends ranges of files. Without ranges, it ignores the Range header and sends
            whole files.
    """

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.validators = "both"
        self.fails = 0
        self.status = 503
        self.has_ranges = True
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: Any) -> None:
        """Drop the log message."""

    def do_HEAD(self) -> None:
        """Send the headers of a file."""
        self._answer(has_body=False)

    def do_GET(self) -> None:
        """Send a file, or one range of it."""
        if self.server.fails > 0:
            self.server.fails -= 1
            self.send_response(self.server.status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        path = self.server.root / self.path.partition("?")[0].lstrip("/")
        data = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if self.server.has_ranges else None
        begin, end = (int(asked[1]), int(asked[2] or len(data) - 1) + 1) if asked else (0, len(data))
        end = min(end, len(data))
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - begin))
        if self.server.validators in {"etag", "both"}:
            self.send_header("ETag", f'"{len(data)}-{path.stat().st_mtime_ns}"')
        if self.server.validators in {"time", "both"}:
            self.send_header("Last-Modified", formatdate(path.stat().st_mtime, usegmt=True))
        self.end_headers()
        if has_body:
            self.wfile.write(data[begin:end])


@contextmanager
def serving(root: Path) -> Iterator[Server]:
    """Serve a folder at a loopback address."""
    server = Server(root)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
