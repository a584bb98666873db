"""Read the body of a request within limits: the bytes, unpacked, and the files of a form."""

import asyncio
import time
import zlib
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import suppress

import anyio
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from multiring.vision.serving.limits import HeldBytes
from multiring.vision.serving.refusals import BAD_REQUEST, TIMED_OUT, TOO_LARGE, WRONG_TYPE, RequestError

_ENCODINGS = {"gzip": 31, "deflate": 15}  # zlib's names for the two formats
_DISCARDED_BYTES, _DISCARDED_S = 1 << 26, 5.0


async def read_body(request: Request, limit: int, held: HeldBytes, deadline: float, unpackers: Executor) -> bytes:
    """Return the body, unpacked if it has a Content-Encoding.

    Args:
        request: the request.
        limit: the most bytes, before and after unpacking.
        held: counts the bytes.
        deadline: by `time.monotonic`.
        unpackers: threads that unpack bodies. A small body can take a tenth of a second, and others must not wait.

    Raises:
        RequestError: the body is too large (413), slow (408), damaged (400) or packed otherwise (415), or all requests
            together hold too much (429).
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity" and encoding not in _ENCODINGS:
        raise RequestError(WRONG_TYPE, f"Content-Encoding {encoding[:50]!r}: want gzip, deflate or none")
    declared = request.headers.get("content-length", "0")
    if not declared.isdigit() or int(declared) > limit:
        raise RequestError(TOO_LARGE, f"a body of {declared[:20]} bytes: want at most {limit}")
    chunks: list[bytes] = []
    size = 0
    try:
        # A scope of anyio needs no task of its own, which asyncio.wait_for would make for each chunk.
        with anyio.fail_after(max(0.001, deadline - time.monotonic())):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise RequestError(TOO_LARGE, f"a body of more than {limit} bytes: want at most so many")
                held.add(len(chunk))
                chunks.append(chunk)
    except TimeoutError:
        raise RequestError(TIMED_OUT, f"the body did not come in time: {size} bytes came") from None
    except ClientDisconnect:
        raise RequestError(BAD_REQUEST, "the client closed the connection within the body") from None
    body = b"".join(chunks)
    if encoding == "identity":
        return body
    data = await asyncio.get_running_loop().run_in_executor(unpackers, _unpacked, body, encoding, limit)
    held.add(len(data))
    return data


async def discard_body(request: Request) -> None:
    """Read and drop the rest of a refused request's body: a client that still sends must see the answer."""
    size = 0
    with (
        suppress(ClientDisconnect, RuntimeError),
        anyio.move_on_after(_DISCARDED_S),
    ):  # RuntimeError: it was read before
        async for chunk in request.stream():
            size += len(chunk)
            if size >= _DISCARDED_BYTES:
                return


def _unpacked(body: bytes, encoding: str, limit: int) -> bytes:
    unpacker = zlib.decompressobj(_ENCODINGS[encoding])
    try:
        data = unpacker.decompress(body, limit + 1)
    except zlib.error as error:
        raise RequestError(BAD_REQUEST, f"the body is no {encoding}: {error}") from None
    if len(data) > limit:
        raise RequestError(TOO_LARGE, f"the body has more than {limit} bytes once it is unpacked: want at most so many")
    if not unpacker.eof:
        raise RequestError(BAD_REQUEST, f"the {encoding} of the body is truncated")
    return data


async def files_of(request: Request, body: bytes, most: int) -> list[tuple[str, bytes]]:
    """Return the names and the bytes of the pictures in a body.

    The body is a picture, or a form (multipart/form-data) whose files are pictures.

    Args:
        request: the request, for its Content-Type.
        body: the whole body.
        most: the most files.

    Raises:
        RequestError: the form is malformed, or has no file or too many.
    """
    if not request.headers.get("content-type", "").lower().startswith("multipart/"):
        return [("", body)]

    async def stream() -> AsyncIterator[bytes]:
        yield body

    parser = MultiPartParser(request.headers, stream(), max_files=most, max_fields=most)  # type: ignore[arg-type]
    parser.spool_max_size = len(body) + 1  # the body is in memory, and its parts stay there
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise RequestError(BAD_REQUEST, f"the form is malformed: {error.message[:200]}") from None
    except (ValueError, KeyError, IndexError, AssertionError) as error:
        raise RequestError(BAD_REQUEST, f"the form is malformed: {type(error).__name__}") from None
    found = []
    for _, part in form.multi_items():
        if isinstance(part, UploadFile):
            found.append((part.filename or "", await part.read()))
            await part.close()
    if not found:
        raise RequestError(BAD_REQUEST, "the form has no file: want one picture or more")
    return found
