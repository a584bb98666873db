"""The page of a running job and its metrics, served by a process of its own, which reads the job's record.

Usage: `python -m multiring._launch.live_page`, by `multiring run --page` only. The process ends with the launcher.
"""

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from importlib import resources
from pathlib import Path
from typing import IO, cast

from multiring._launch.live_state import LiveState
from multiring._launch.own_modules import module_command
from multiring._launch.rank_starts import dying_with
from multiring._settings import inherited_environment
from multiring._web.guard import AddressOptions, Guard, Message, Receive, Send, listening_socket
from multiring._web.openmetrics import CONTENT_TYPE
from multiring._web.small_server import SmallServer
from multiring._web.token_files import read_tokens
from multiring.errors import ArgumentError

_OPTIONS = AddressOptions(host="--page", port="--page HOST:PORT", token_file="--page-token-file")  # noqa: S106 -- names
_COOKIE = "multiring_run"
_LOOK_S = 0.25  # between two looks at the record
_READ_BYTES = 1 << 22
_MOST_BODY_BYTES = 4096
_END_S = 3.0
_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class PageAddress:
    """Where the page is served: a host, a port (0: a free one), and the file of its token, or None.

    Raises:
        ArgumentError: `text` is not [HOST:]PORT.
    """

    host: str
    port: int
    token_file: Path | None = None

    @classmethod
    def parse(cls, text: str, token_file: Path | None) -> "PageAddress":
        """Return the address in [HOST:]PORT. Without a host, it is this machine's loopback."""
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
        if not (port.isascii() and port.isdigit()) or int(port[:9]) > 65535 or len(port) > 5:
            raise ArgumentError(f"--page {text[:100]!r}: want [HOST:]PORT, with a port from 0 to 65535")
        return cls(host, int(port), token_file)


class LivePage:
    """The page's process, as its launcher sees it.

    Args:
        address: where to serve.
        record: the descriptor of the job's record.

    Raises:
        ArgumentError: the port is in use, other machines can reach the address and there is no token, or the file of
            the token is unusable.
    """

    def __init__(self, address: PageAddress, record: int) -> None:
        token = None if address.token_file is None else read_tokens(address.token_file)[0]
        _OPTIONS.require_token(address.host, token)
        # The descriptor has a place of its own in the file, and no lock.
        reading = os.open(f"/proc/self/fd/{record}", os.O_RDONLY)
        try:
            with listening_socket(address.host, address.port, _OPTIONS) as listening:
                host, port = listening.getsockname()[:2]
                self.url = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
                told = {"record": reading, "socket": listening.fileno(), "host": address.host, "token": token}
                self._process = subprocess.Popen(  # noqa: S603 -- multiring's own module
                    module_command("multiring._launch.live_page"),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    env=inherited_environment(),
                    pass_fds=(reading, listening.fileno()),
                    start_new_session=True,  # Ctrl-C at the terminal is for the launcher
                    preexec_fn=dying_with(os.getpid()),  # noqa: PLW1509 -- the launcher has one thread
                )
        finally:
            os.close(reading)
        with contextlib.suppress(BrokenPipeError), cast("IO[bytes]", self._process.stdin) as pipe:
            pipe.write(json.dumps(told).encode() + b"\n")  # the token: never on the command line

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class PageApplication:
    """The requests of the page, of one job.

    Args:
        state: what the record says.
    """

    def __init__(self, state: LiveState) -> None:
        self._state = state
        self._html, self._policy = _html()
        self._cache: dict[str, tuple[int, bytes]] = {}
        self.reads = 0  # how often the record has had something new
        self.access: Guard | None = None  # before this application

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request."""
        path, method = scope["path"], scope["method"]
        if path == "/api/session" and method == "POST":
            status, kind, content, more = self._session((await receive())["body"])
        elif path == "/api/session":
            is_let_in = self.access is not None and self.access.lets_in(scope)
            status, kind, content, more = 200, _JSON, json.dumps({"is_let_in": is_let_in}).encode(), {}
        elif method not in ("GET", "HEAD"):
            status, kind, content, more = 405, _JSON, b'{"error":"want GET"}', {"allow": "GET, HEAD"}
        elif path == "/":
            more = {"content-security-policy": self._policy}
            status, kind, content = 200, "text/html; charset=utf-8", self._html
        elif path == "/api/job":
            # The time of the answer is a part of it, so it is made for each second, and not for each client.
            status, kind, content, more = 200, _JSON, self._cached("job", self._job), {}
        elif path == "/metrics":
            status, kind, content, more = 200, CONTENT_TYPE, self._cached("metrics", self._metrics), {}
        else:
            status, kind, content, more = 404, _JSON, b'{"error":"want /, /api/job or /metrics"}', {}
        headers = {"content-type": kind, **more}
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": content})

    def _cached(self, name: str, make: Callable[[], bytes]) -> bytes:
        """Return an answer that is made once for each look at the record, and not for each client."""
        if name not in self._cache or self._cache[name][0] != self.reads:
            self._cache[name] = self.reads, make()
        return self._cache[name][1]

    def _job(self) -> bytes:
        return json.dumps(self._state.snapshot(), allow_nan=False, separators=(",", ":")).encode()

    def _metrics(self) -> bytes:
        return self._state.metrics().encode("utf-8", "replace")

    def _session(self, body: bytes) -> tuple[int, str, bytes, Mapping[str, str]]:
        try:
            told = json.loads(body)
            session = None if self.access is None else self.access.session_of(str(told["token"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            session = None
        if session is None:
            return HTTPStatus.UNAUTHORIZED, _JSON, b'{"error":"this is not the token"}', {}
        cookie = f"{_COOKIE}={session}; HttpOnly; SameSite=strict; Max-Age=2592000; Path=/"
        return HTTPStatus.OK, _JSON, b"{}", {"set-cookie": cookie}


class RecordReader:
    """Reads the lines that a record gets, and gives whole ones to a state."""

    def __init__(self, descriptor: int, state: LiveState) -> None:
        self._descriptor, self._state = descriptor, state
        self._torn = b""
        self._at = 0

    def read(self) -> bool:
        """Read what is new, but at most a few MiB; return whether there was anything."""
        data = os.pread(self._descriptor, _READ_BYTES, self._at)
        self._at += len(data)
        *whole, self._torn = (self._torn + data).split(b"\n")
        for line in whole:
            self._state.take(line)
        return bool(data)


async def serve(told: Mapping[str, object], listening: socket.socket) -> None:
    """Serve the page until the task is cancelled; `told` is what the launcher says."""
    state = LiveState()
    page = PageApplication(state)
    token = None if told["token"] is None else str(told["token"])
    access = Guard(page, str(told["host"]), token, _COOKIE, _MOST_BODY_BYTES)
    page.access = access
    reader = RecordReader(int(str(told["record"])), state)

    async def follow() -> None:
        looks = 0
        while True:
            # Each second is news, too: the page shows ages.
            if reader.read():
                page.reads += 1
                await asyncio.sleep(0)
            else:
                looks += 1
                page.reads += looks % 4 == 0
                await asyncio.sleep(_LOOK_S)

    await asyncio.gather(follow(), SmallServer(access, listening).serve())


def _html() -> tuple[bytes, str]:
    """Return the page, and its policy, which allows its own script and style by their digests alone."""
    text = resources.files("multiring._launch").joinpath("page").joinpath("live.html").read_text(encoding="utf-8")

    def digests(tag: str) -> str:
        parts = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", text, re.DOTALL)
        return " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'" for each in parts
        )

    policy = (
        f"default-src 'none'; script-src {digests('script')}; style-src {digests('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


def main() -> None:
    """Serve the page of the launcher that started this process."""
    told = json.loads(sys.stdin.readline())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with socket.socket(fileno=told["socket"]) as listening:
        listening.setblocking(False)
        asyncio.run(serve(told, listening))


if __name__ == "__main__":
    main()
