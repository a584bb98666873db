"""A small HTTP server for a page with few requests: it serves an ASGI application, one request a connection.

It needs nothing but Python, so a launcher can have a page wherever multiring runs.
"""

import asyncio
import contextlib
import re
import socket
from http import HTTPStatus
from typing import Any

from multiring._web.guard import Application, Message

_MOST_HEAD_BYTES = 1 << 14
_MOST_BODY_BYTES = 1 << 16
_MOST_CONNECTIONS = 256
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_READ_S, _WRITE_S = 10.0, 10.0


class SmallServer:
    """Serves an application at a listening socket.

    Every connection has a time and a size, and their number is bounded. So clients that send or read nothing use no
    more than that.
    """

    def __init__(self, application: Application, listening: socket.socket) -> None:
        self._application, self._listening = application, listening
        self._connections = 0

    async def serve(self) -> None:
        """Serve until the task is cancelled."""
        server = await asyncio.start_server(self._accept, sock=self._listening, limit=_MOST_HEAD_BYTES)
        async with server:
            await server.serve_forever()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._connections >= _MOST_CONNECTIONS:
            writer.transport.abort()
            return
        self._connections += 1
        try:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await self._answer(reader, writer)
        finally:
            self._connections -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            scope, body = await asyncio.wait_for(_request(reader), _READ_S)
            status, headers, content = await self._response(scope, body)
        except (ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            status, headers, content = 400, [(b"content-length", b"0")], b""
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode()]
        lines += [name + b": " + value for name, value in headers if name != b"connection"]
        writer.write(b"\r\n".join([*lines, b"connection: close", b"", b""]) + content)
        await asyncio.wait_for(writer.drain(), _WRITE_S)
        if writer.can_write_eof():
            writer.write_eof()
        # A reader that takes its time has this long for what the kernel holds.
        await asyncio.wait_for(reader.read(1), _WRITE_S)

    async def _response(self, scope: Message, body: bytes) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        await self._application(scope, receive, send)
        content = b"".join(each.get("body", b"") for each in sent if each["type"] == "http.response.body")
        headers = [*sent[0]["headers"], (b"content-length", str(len(content)).encode())]
        return sent[0]["status"], headers, b"" if scope["method"] == "HEAD" else content


async def _request(reader: asyncio.StreamReader) -> tuple[Message, bytes]:
    """Read a request.

    Raises:
        ValueError: it is malformed, or too large.
    """
    head = await reader.readuntil(b"\r\n\r\n")
    first, *rest = head[:-4].split(b"\r\n")
    words = first.decode("latin-1").split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise ValueError(first)
    headers: list[tuple[bytes, bytes]] = []
    for line in rest:
        name, colon, value = line.partition(b":")
        if not colon or not _NAME.fullmatch(name):
            raise ValueError(line)
        headers.append((name.lower(), value.strip()))
    scope: dict[str, Any] = {
        "type": "http",
        "method": words[0],
        "path": words[1].partition("?")[0],
        "headers": headers,
    }
    told = dict(headers).get(b"content-length", b"0")
    if not told.isdigit() or len(told) > 9 or int(told) > _MOST_BODY_BYTES or b"transfer-encoding" in dict(headers):
        raise ValueError(told)
    return scope, await reader.readexactly(int(told))
