"""The server's endpoints, as an ASGI application."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from multiring._version import VERSION
from multiring._web.bearer_tokens import BearerTokens
from multiring._web.loopback import is_loopback, name_in
from multiring._web.openmetrics import CONTENT_TYPE
from multiring.data.readers.limits import Limits
from multiring.errors import DataError
from multiring.vision.models.answers import predictions_of
from multiring.vision.models.description import ModelDescription
from multiring.vision.pictures import PictureTooLargeError, Pixels, decode_picture
from multiring.vision.predicting.predictors import MOST_SIDE, answer_values, require_sides
from multiring.vision.serving.batching import Arrays, BatchLimits, DynamicBatcher
from multiring.vision.serving.bodies import discard_body, files_of, read_body
from multiring.vision.serving.limits import Admission, HeldBytes, ServerLimits
from multiring.vision.serving.metrics import ServerMetrics
from multiring.vision.serving.openapi import openapi
from multiring.vision.serving.refusals import (
    BAD_REQUEST,
    FAILED,
    FORBIDDEN,
    TOO_LARGE,
    UNAUTHORIZED,
    UNAVAILABLE,
    RequestError,
)
from multiring.vision.serving.repository import ModelRepository, ServedModel, metadata
from multiring.vision.serving.tensors import TensorLimits, read_request, write_response

Handler = Callable[[Request], Awaitable[Response]]
_HEADER_LENGTH = "Inference-Header-Content-Length"
_SMALL = 1 << 16  # bytes of JSON that are parsed without a thread
_EXTENSIONS = ["binary_tensor_data"]  # "model_repository" would promise to load and unload models, too
_PAGE = {
    "": ("page.html", "text/html"),
    "page.js": ("page.js", "text/javascript"),
    "page.css": ("page.css", "text/css"),
}
_POLICY = "default-src 'self'; img-src 'self' blob:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"


class InferenceServer:
    """The endpoints over a repository of models.

    Attributes:
        app: the ASGI application.
        is_draining: True once the server ends: it is not ready, and asks clients to close their connections.
        begun: requests whose header was read.
        answered: requests that were answered.
    """

    def __init__(
        self,
        repository: ModelRepository,
        limits: ServerLimits,
        *,
        tokens: BearerTokens | None = None,
        only_local_names: bool = False,
    ) -> None:
        """Make a server.

        Args:
            repository: the models.
            limits: the limits.
            tokens: the tokens of which a client must have one; None: no client needs one.
            only_local_names: refuse requests whose Host is not this machine's loopback. A page of another site cannot
                then reach a server without tokens by a name that it lets point here.
        """
        self._repository = repository
        self._limits = limits
        self._tokens = tokens
        self._only_local_names = only_local_names
        self._admission = Admission(limits)
        self._metrics = ServerMetrics()
        self._decoders = ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1)), "decode")
        self._parser = ThreadPoolExecutor(1, "parse")
        self._runners = {each: ThreadPoolExecutor(1, f"model-{each.name}") for each in repository}
        self._batchers: dict[ServedModel, DynamicBatcher] = {}
        self.is_draining = False
        self.begun = self.answered = 0
        self._metrics.add_gauge("requests_on_their_way", "Requests on their way.", lambda: self._admission.requests)
        self._metrics.add_gauge("held_bytes", "Bytes of bodies and pictures.", lambda: self._admission.held_bytes)
        self._metrics.add_gauge("requests_waiting", "Requests that wait for a batch.", self._waiting)
        self._metrics.add_gauge("resident_bytes", "Memory of the server.", _resident_bytes)
        self.app = Starlette(
            routes=self._routes(),
            lifespan=self._lifespan,
            exception_handlers={HTTPException: self._no_route},
        )

    def _routes(self) -> list[Route]:
        routes = [
            Route("/v2/health/live", self._answering("live", self._live, is_open=True)),
            Route("/v2/health/ready", self._answering("ready", self._ready, is_open=True)),
            Route("/v2", self._answering("metadata", self._server_metadata)),
            Route("/v2/repository/index", self._answering("index", self._index), methods=["GET", "POST"]),
            Route("/metrics", self._answering("metrics", self._metrics_text)),
            Route("/openapi.json", self._answering("openapi", self._openapi, is_open=True)),
        ]
        for base in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            routes += [
                Route(base, self._answering("metadata", self._model_metadata)),
                Route(f"{base}/ready", self._answering("ready", self._model_ready)),
                Route(f"{base}/infer", self._answering("infer", self._infer), methods=["POST"]),
                Route(f"{base}/picture", self._answering("picture", self._picture), methods=["POST"]),
            ]
        for name in _PAGE:
            routes.append(Route(f"/{name}", self._answering("page", self._page, is_open=True)))
        return routes

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        for model, runner in self._runners.items():
            limits = BatchLimits(
                rows=self._limits.batch if model.has_dynamic_batch else 1,
                values=3 * self._limits.pixels,
                delay_s=self._limits.delay_s if model.has_dynamic_batch else 0.0,
            )
            name = model.name

            def told(rows: int, seconds: float, name: str = name) -> None:
                self._metrics.batch_rows.observe(rows, model=name)
                self._metrics.batch_seconds.observe(seconds, model=name)

            self._batchers[model] = DynamicBatcher(model.session.run, limits, runner, told)
        yield
        for batcher in self._batchers.values():
            await batcher.close()
        for executor in (self._decoders, self._parser, *self._runners.values()):
            executor.shutdown()

    # ---- what all endpoints share ----

    def _answering(self, endpoint: str, handler: Handler, *, is_open: bool = False) -> Handler:
        """Return a handler that answers errors, checks the token, measures and counts."""

        async def answer(request: Request) -> Response:
            start = time.monotonic()
            self.begun += 1
            model = request.path_params.get("model", "")
            try:
                self._require_host(request)
                if not is_open and self._tokens is not None:
                    self._require_token(request)
                with anyio.fail_after(self._limits.time_s):
                    response = await handler(request)
            except RequestError as error:
                response = await self._refusal(request, error)
            except TimeoutError:
                text = f"the answer took longer than {self._limits.time_s:g} s: try again later"
                late = RequestError(UNAVAILABLE, text, retry_after_s=self._retry_after())
                response = await self._refusal(request, late)
            except Exception as error:  # noqa: BLE001 -- the client gets an answer, and the server goes on
                text = f"internal error: {type(error).__name__}: {str(error)[:200]}"
                response = await self._refusal(request, RequestError(FAILED, text))
            if self.is_draining:
                response.headers["connection"] = "close"
            known = model if model in {each.name for each in self._batchers} else ""
            self._metrics.requests.add(endpoint=endpoint, model=known, status=str(response.status_code))
            self._metrics.seconds.observe(time.monotonic() - start, endpoint=endpoint, model=known)
            self.answered += 1
            return response

        return answer

    async def _refusal(self, request: Request, error: RequestError) -> Response:
        await discard_body(request)
        headers = {"retry-after": str(error.retry_after_s)} if error.retry_after_s else {}
        if error.status == UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        return _json({"error": str(error)}, status=error.status, headers=headers)

    async def _no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101 -- the table of handlers says so
        text = f"{request.method} {request.url.path[:200]}: {error.detail}; /openapi.json lists the endpoints"
        await discard_body(request)
        return _json({"error": text}, status=error.status_code, headers=dict(error.headers or {}))

    def _require_host(self, request: Request) -> None:
        told = request.headers.get("host")
        if told is None:  # HTTP/1.0: no browser, so no page of another site
            return
        name = name_in(told)
        if not name:
            raise RequestError(BAD_REQUEST, f"the header Host {told[:100]!r} is malformed: want NAME or NAME:PORT")
        if self._only_local_names and not is_loopback(name):
            raise RequestError(FORBIDDEN, f"Host {name[:100]!r}: want localhost; other names need --tokens")

    def _require_token(self, request: Request) -> None:
        if self._tokens is None or not self._tokens.accepts(request.headers.get("authorization", "")):
            raise RequestError(UNAUTHORIZED, "want the header 'Authorization: Bearer TOKEN', with one of the tokens")

    def _waiting(self) -> float:
        return sum(each.waiting for each in self._batchers.values())

    def _retry_after(self) -> int:
        return max((each.retry_after_s() for each in self._batchers.values()), default=1)

    def _model(self, request: Request) -> ServedModel:
        return self._repository.get(request.path_params["model"], request.path_params.get("version", ""))

    # ---- the endpoints ----

    async def _live(self, _: Request) -> Response:
        return _json({"live": True})

    async def _ready(self, _: Request) -> Response:
        if self.is_draining:
            raise RequestError(UNAVAILABLE, "the server ends", retry_after_s=1)
        return _json({"ready": True})

    async def _server_metadata(self, _: Request) -> Response:
        return _json({"name": "multiring", "version": VERSION, "extensions": _EXTENSIONS})

    async def _index(self, _: Request) -> Response:
        states = {"state": "READY", "reason": ""}
        return _json([{"name": each.name, "version": each.version, **states} for each in self._repository])

    async def _metrics_text(self, _: Request) -> Response:
        return Response(self._metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def _openapi(self, _: Request) -> Response:
        return _json(openapi(with_tokens=self._tokens is not None))

    async def _model_metadata(self, request: Request) -> Response:
        return _json(metadata(self._repository, self._model(request)))

    async def _model_ready(self, request: Request) -> Response:
        model = self._model(request)
        await self._ready(request)
        return _json({"name": model.name, "ready": True})

    async def _page(self, request: Request) -> Response:
        file, kind = _PAGE[request.url.path.lstrip("/")]
        text = resources.files("multiring.vision.serving").joinpath("page").joinpath(file).read_text(encoding="utf-8")
        headers = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff"}
        return Response(text, media_type=kind, headers=headers)

    async def _infer(self, request: Request) -> Response:
        model = self._model(request)
        with self._admission.enter(self._retry_after()) as held:
            body = await self._body(request, held)
            length = _header_length(request)
            json_bytes = len(body) if length is None else min(length, len(body))
            if json_bytes > self._limits.json_bytes:
                text = f"{json_bytes} bytes of JSON: want at most {self._limits.json_bytes}; send tensors as bytes"
                raise RequestError(TOO_LARGE, text)
            exported = model.session.model
            arguments = (body, length, exported.inputs, exported.outputs, self._tensor_limits(model))
            if json_bytes <= _SMALL:
                asked = read_request(*arguments)
            else:
                asked = await asyncio.get_running_loop().run_in_executor(self._parser, read_request, *arguments)
            held.add(sum(each.nbytes for each in asked.inputs.values()))
            arrays = await self._batchers[model].infer(asked.inputs)
            head = {"model_name": model.name, "model_version": model.version, **({"id": asked.id} if asked.id else {})}
            answer = (head, arrays, asked.outputs, self._limits.json_bytes // 8)
            if sum(each.size for each in arrays.values()) <= _SMALL:
                data, length = write_response(*answer)
            else:
                data, length = await asyncio.get_running_loop().run_in_executor(self._parser, write_response, *answer)
        if length is None:
            return Response(data, media_type="application/json")
        return Response(data, media_type="application/octet-stream", headers={_HEADER_LENGTH: str(length)})

    async def _picture(self, request: Request) -> Response:
        model = self._model(request)
        if not model.takes_pictures:
            clips = f"clips of {model.description.frames} frames" if model.description else "tensors"
            raise RequestError(BAD_REQUEST, f"model {model.name!r} takes {clips}, and not pictures: use infer")
        with self._admission.enter(self._retry_after()) as held:
            body = await self._body(request, held)
            files = await files_of(request, body, self._limits.batch)
            answers = await asyncio.gather(*(self._answered(model, name, data, held) for name, data in files))
        return _json({"model_name": model.name, "model_version": model.version, "answers": answers})

    async def _answered(self, model: ServedModel, name: str, data: bytes, held: HeldBytes) -> dict[str, Any]:
        assert model.description is not None  # noqa: S101 -- takes_pictures has said so
        what = f"picture {name[:100]!r}" if name else "the picture"
        pixels = await asyncio.get_running_loop().run_in_executor(self._decoders, self._decoded, what, data)
        held.add(pixels.nbytes)
        arrays: Arrays = await self._batchers[model].infer({"pixels": pixels[None]})
        values = await asyncio.get_running_loop().run_in_executor(
            self._decoders, _values_of, model.description, arrays, pixels.shape[1], pixels.shape[0]
        )
        return {"picture": name, **values} if name else values

    def _decoded(self, what: str, data: bytes) -> Pixels:
        limits = Limits(pixels=self._limits.pixels, record_bytes=self._limits.body_bytes)
        try:
            pixels = decode_picture(what, data, limits).pixels
        except PictureTooLargeError as error:
            raise RequestError(TOO_LARGE, str(error)) from None
        except DataError as error:
            raise RequestError(BAD_REQUEST, str(error)) from None
        try:
            require_sides(pixels.shape[0], pixels.shape[1])
        except PictureTooLargeError as error:
            raise RequestError(TOO_LARGE, f"{what}: {error}") from None
        return pixels

    async def _body(self, request: Request, held: HeldBytes) -> bytes:
        # The body gets most of the time, so that its own error comes before that of the whole request.
        deadline = time.monotonic() + 0.9 * self._limits.time_s
        return await read_body(request, self._limits.body_bytes, held, deadline, self._decoders)

    def _tensor_limits(self, model: ServedModel) -> TensorLimits:
        values = 3 * self._limits.pixels
        side = MOST_SIDE if model.takes_pictures else values
        return TensorLimits(rows=self._limits.batch if model.has_dynamic_batch else values, values=values, side=side)


def _values_of(description: ModelDescription, arrays: Arrays, width: int, height: int) -> dict[str, Any]:
    [answer] = predictions_of(description, arrays)
    return answer_values(answer, width, height)


def _header_length(request: Request) -> int | None:
    told = request.headers.get(_HEADER_LENGTH)
    if told is None:
        return None
    if not (told.isascii() and told.isdigit()) or len(told) > 12:
        raise RequestError(BAD_REQUEST, f"{_HEADER_LENGTH} {told[:50]!r}: want a number of bytes")
    return int(told)


def _resident_bytes() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 -- of the kernel
        return float(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _json(told: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    data = json.dumps(told, ensure_ascii=False).encode("utf-8", "replace")
    return Response(data, status, dict(headers or {}), "application/json")
