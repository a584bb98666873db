"""Who may use a page: the address it listens on, tokens, the names it answers to, and sizes of requests."""

import asyncio
import hashlib
import hmac
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any

from multiring._web.loopback import is_loopback, name_in
from multiring.errors import ArgumentError

MOST_BYTES = 32 << 20  # of a request's body, by default: the masks of a large picture
_BODY_S = 30.0  # the time in which a body must arrive
# A page of another site cannot send this header without asking, and the answer is no. So it cannot change anything in
# the name of somebody whose browser is logged in.
WRITES = "x-multiring"
# What anybody may fetch: the page itself, which has no data, and the exchange of a token for a cookie.
_OPEN = ("/", "/page/", "/api/session")
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class AddressOptions:
    """The spelling of the user's options, for errors: the address, its port, and the file of the token."""

    host: str = "--host"
    port: str = "--port"
    token_file: str = "--token-file"  # noqa: S105 -- an option's name

    def require_token(self, host: str, token: str | None) -> None:
        """Raise ArgumentError if other machines can reach `host`, and there is no token."""
        if token is None and not is_loopback(host):
            raise ArgumentError(f"{self.host} {host}: other machines can reach it, so it needs a {self.token_file}")


OPTIONS = AddressOptions()


def listening_socket(host: str, port: int, options: AddressOptions = OPTIONS) -> socket.socket:
    """Return a socket that listens on an address. Port 0 takes a free one.

    Raises:
        ArgumentError: the port is in use, or the machine has no such address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ArgumentError(f"{options.host} {host!r}: want an address of this machine ({error})") from error
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise ArgumentError(
            f"cannot listen on {host} port {port}: {error.strerror}. Another program may use the port: choose one with "
            f"{options.port}, or 0 for a free one"
        ) from error
    return listening


class Guard:
    """An ASGI application that lets requests pass to another one if they may.

    It refuses names of other sites (DNS rebinding), writes without the header (requests of other sites), requests
    without the token if there is one, and bodies that are too large or too slow.

    Args:
        application: what answers the requests that may pass.
        host: the address that the server listens on.
        token: the token that requests need; None if they need none.
        cookie: the name of the cookie that a browser gets for the token.
        most_bytes: the largest body of a request.

    Raises:
        ArgumentError: other machines can reach `host`, and there is no token.
    """

    def __init__(
        self, application: Application, host: str, token: str | None, cookie: str, most_bytes: int = MOST_BYTES
    ) -> None:
        OPTIONS.require_token(host, token)
        self._application = application
        self.cookie, self._most_bytes = cookie, most_bytes
        self._is_local = is_loopback(host)
        self._names = {"localhost", host.lower()}
        if not self._is_local:
            self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        self._token = token

    def session_of(self, token: str) -> str | None:
        """Return the value of the cookie for a token, or None if the token is wrong."""
        if self._token is None or not hmac.compare_digest(token.encode(), self._token.encode()):
            return None
        return self._session(self._token)

    def lets_in(self, scope: Message) -> bool:
        """Return whether a request has the token, or needs none."""
        return self._token is None or self._may(_headers(scope))

    def _session(self, token: str) -> str:
        # The cookie is no copy of the token, and it stays valid when the program starts again.
        return hmac.new(token.encode(), self.cookie.encode(), hashlib.sha256).hexdigest()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request, or let it pass."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        refusal = self._refusal(_headers(scope), scope["method"], scope["path"])
        if refusal is None:
            try:
                body: bytes | None = await asyncio.wait_for(_body(receive, self._most_bytes), _BODY_S)
            except OverflowError:
                refusal = 413, f"a request has at most {self._most_bytes} bytes"
            except asyncio.TimeoutError:
                refusal = 408, f"a request must arrive within {_BODY_S:g} s"
        if refusal is not None:
            await _answer(send, *refusal)
            return
        if body is None:
            return
        await self._application(scope, _given(body, receive), _with_headers(send))

    def _refusal(self, headers: dict[str, str], method: str, path: str) -> tuple[int, str] | None:
        if not self._is_known(headers.get("host", "")):
            return 421, f"host {headers.get('host', '')[:100]!r}: want the address or the name of this machine"
        if method not in {"GET", "HEAD"} and WRITES not in headers:
            return 403, f"a request that writes needs the header {WRITES}"
        size = headers.get("content-length", "0")
        if not size.isdecimal() or len(size) > 18 or int(size) > self._most_bytes:
            return 413, f"a request has at most {self._most_bytes} bytes"
        is_open = path in _OPEN or path.startswith("/page/")
        if self._token is not None and not is_open and not self._may(headers):
            return 401, "want the token"
        return None

    def _is_known(self, host: str) -> bool:
        name = name_in(host)
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        # An attacker's name is no number. On loopback, only loopback's numbers can be meant.
        return address.is_loopback or not self._is_local

    def _may(self, headers: dict[str, str]) -> bool:
        assert self._token is not None  # noqa: S101 -- the caller has looked
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._token.encode()):
            return True
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return False
        return cookie is not None and hmac.compare_digest(cookie.value.encode(), self._session(self._token).encode())


def _headers(scope: Message) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


async def _body(receive: Receive, most: int) -> bytes | None:
    """Return the body of a request; None if the client has gone before its end. Raise OverflowError above `most`."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None  # nobody waits for an answer, and a part of a body must not be taken for the whole
        size += len(message.get("body", b""))
        if size > most:
            raise OverflowError
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _given(body: bytes, receive: Receive) -> Receive:
    """Return a function that gives a body that was read already, and then what follows it."""
    is_given = False

    async def received() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return received


def _with_headers(send: Send) -> Send:
    """Return a function that sends an answer with the headers that every answer has."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            present = {name.lower() for name, _ in message["headers"]}
            every = {**_HEADERS, "cache-control": "no-store"}
            added = [(name.encode(), text.encode()) for name, text in every.items() if name.encode() not in present]
            message = {**message, "headers": [*message["headers"], *added]}
        await send(message)

    return sending


async def _answer(send: Send, status: int, text: str) -> None:
    data = json.dumps({"error": text}).encode()
    headers = {**_HEADERS, "content-type": "application/json", "content-length": str(len(data)), "connection": "close"}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": data})
