"""The page's HTTP interface: `create_application`."""

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from multiring._web.guard import Guard
from multiring.errors import ArgumentError, DataError, MultiringError, StateError, UnsupportedError
from multiring.vision.labelling.frames import make_frames, videos_without_frames
from multiring.vision.labelling.previews import SIDES, PreviewCache
from multiring.vision.labelling.proposals import ProposalStore
from multiring.vision.labelling.states import LabellingStates
from multiring.vision.project.folder import VisionProject
from multiring.vision.project.schema import LabelStoreError

_PAGE = Path(__file__).parent / "page"
_TYPES = {".css": "text/css", ".html": "text/html; charset=utf-8", ".js": "text/javascript", ".svg": "image/svg+xml"}
COOKIE = "multiring_label"
_DEEPEST = 24  # levels of a JSON text: a polygon has 7
Told = Mapping[str, Any]


class LabellingService:
    """The requests of the page, for one project.

    Args:
        folder: the project's folder.
        author: the name that the page suggests.
    """

    def __init__(self, folder: Path, author: str = "") -> None:
        self.folder = folder
        self.proposals = ProposalStore(folder)
        self._author = author
        self._states = LabellingStates(folder, self.proposals)
        self._previews = PreviewCache()
        self._lock = threading.Lock()
        self._counts = {"changes": 0, "corrections": 0, "accepted": 0}
        self._scanning = threading.Lock()

    def project(self) -> dict[str, Any]:
        """Return what the page shows around the pictures."""
        with VisionProject.open(self.folder) as project:
            classes = project.classes()
        with self._lock:
            counts = dict(self._counts)
        return {
            "name": self.folder.resolve().name,
            "author": self._author,
            "classes": classes,
            "counts": counts,
            "videos": videos_without_frames(self.folder),
            "proposals": self._proposals(),
        }

    def pictures(self, since: int) -> dict[str, Any]:
        """Return the pictures whose labels changed after a change; -1: all."""
        with VisionProject.open(self.folder) as project:
            found = project.summaries(since)
        return {"pictures": [asdict(each) for each in found]}

    def picture(self, path: str) -> dict[str, Any]:
        """Return a picture's state."""
        self.proposals.update()
        return self._states.picture(path)

    def preview(self, path: str, digest: str, side: int) -> tuple[str, bytes]:
        """Return the content type and the bytes of a picture. See `PreviewCache.preview`."""
        if side not in SIDES:
            raise ArgumentError(f"side {side}: want one of {', '.join(map(str, SIDES))}")
        with VisionProject.open(self.folder) as project:
            image = project.image(path)
        if not image.is_usable:
            raise DataError(image.problem or f"picture {path!r} is gone")
        if image.digest != digest:
            raise StateError(f"picture {path!r} is another file now: read it again")
        return self._previews.preview(self.folder, path, digest, side)

    def edit(self, told: Told) -> dict[str, Any]:
        """Edit labels, count the corrections, and return the picture's state with the sums since the start."""
        self.proposals.update()
        state = self._states.edit(told)
        with self._lock:
            self._counts["changes"] += 1
            self._counts["corrections"] += state["corrections"]
            self._counts["accepted"] += state["accepted"]
            return {**state, "counts": dict(self._counts)}

    def undo(self, told: Told) -> dict[str, Any]:
        """Take back a change."""
        return self._states.undo(told)

    def tracks(self, told: Told) -> dict[str, Any]:
        """Fill the frames between those in which a track is stated."""
        return self._states.fill_track(told)

    def classes(self, told: Told) -> dict[str, Any]:
        """Add the class "add", or rename the class "rename" to "new"."""
        with VisionProject.open(self.folder) as project:
            if "add" in told:
                project.add_class(_name(told["add"]))
            else:
                project.rename_class(_name(told.get("rename")), _name(told.get("new")))
            return {"classes": project.classes()}

    def scan(self, told: Told) -> dict[str, Any]:
        """Look for new, changed and moved pictures."""
        del told
        with self._scanning, VisionProject.open(self.folder) as project:
            found = project.scan(threads=2)
        return {name: len(value) for name, value in asdict(found).items()}

    def frames(self, told: Told) -> dict[str, Any]:
        """Make the frames of the video "file" pictures, every "every"th one."""
        every = told.get("every", 1)
        if type(every) is not int:
            raise DataError(f"every {every!r}: want a whole number")
        with self._scanning, VisionProject.open(self.folder) as project:
            return {"frames": len(make_frames(project, _name(told.get("file")), every))}

    def propose(self, told: Told) -> dict[str, Any]:
        """Start ("do": "start") or stop the process that proposes labels."""
        if told.get("do") == "start":
            self.proposals.start()
        elif told.get("do") == "stop":
            self.proposals.stop()
        else:
            raise DataError(f"do {told.get('do')!r}: want start or stop")
        return self._proposals()

    def proposed(self) -> dict[str, Any]:
        """Return the state of the proposals, and the confidence of each picture by its file's digest."""
        return {**self._proposals(), "confidences": self.proposals.confidences()}

    def _proposals(self) -> dict[str, Any]:
        self.proposals.update()
        return self.proposals.status()


def create_application(service: LabellingService, host: str = "127.0.0.1", token: str | None = None) -> Guard:
    """Return the ASGI application of the page.

    Args:
        service: the project's requests.
        host: the address on which it will listen.
        token: what a browser must know; None on a loopback address only.

    Raises:
        ArgumentError: other machines can reach the address, and there is no token.
    """
    routes = [
        Route("/", _index),
        Route("/page/{name}", _file),
        Route("/api/session", _session, methods=["POST"]),
        Route("/api/project", _get(lambda _: service.project())),
        Route("/api/pictures", _get(lambda query: service.pictures(_whole(query, "since", -1)))),
        Route("/api/picture", _get(lambda query: service.picture(query.get("path", "")))),
        Route("/api/proposals", _get(lambda _: service.proposed())),
        *(
            Route(f"/api/{name}", _post(act), methods=["POST"])
            for name, act in (
                ("edit", service.edit),
                ("undo", service.undo),
                ("tracks", service.tracks),
                ("classes", service.classes),
                ("scan", service.scan),
                ("frames", service.frames),
                ("propose", service.propose),
            )
        ),
        Route("/picture", partial(_preview, service)),
    ]
    application = Starlette(routes=routes, exception_handlers={MultiringError: _told})
    guard = Guard(application, host, token, COOKIE)
    application.state.guard = guard
    return guard


def _told(request: Request, error: Exception) -> Response:
    """Answer an error that is no fault of ours."""
    del request
    status = 409 if isinstance(error, StateError) else 400
    if isinstance(error, UnsupportedError):
        status = 501
    if isinstance(error, LabelStoreError):
        status = 503  # the page keeps the change, and tries again
    return JSONResponse({"error": str(error)}, status)


def _get(act: Callable[[Told], dict[str, Any]]) -> Callable[[Request], Any]:
    async def respond(request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(act, request.query_params))

    return respond


def _post(act: Callable[[Told], dict[str, Any]]) -> Callable[[Request], Any]:
    async def respond(request: Request) -> Response:
        told = _json(await request.body())
        return JSONResponse(await run_in_threadpool(act, told))

    return respond


def _json(data: bytes) -> Told:
    """Return a JSON object.

    Raises:
        DataError: the text is something else, or is nested so deeply that a parser could run out of stack.
    """
    depth = deepest = 0
    for each in data.translate(None, bytes(set(range(256)) - set(b"[]{}"))):
        depth += 1 if each in b"[{" else -1
        deepest = max(deepest, depth)
    if deepest > _DEEPEST:
        raise DataError(f"the request is nested {deepest} levels deep: want at most {_DEEPEST}")
    try:
        told = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the request is no JSON: {str(error)[:100]}") from error
    if not isinstance(told, dict):
        raise DataError("the request is no JSON object")
    if b"\\ud" in data.lower():
        try:
            json.dumps(told, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise DataError("the request has a half of a surrogate pair, which is no text") from error
    return told


async def _index(request: Request) -> Response:
    return await _named(request, "index.html")


async def _file(request: Request) -> Response:
    return await _named(request, request.path_params["name"])


async def _named(request: Request, name: str) -> Response:
    # Only names of the folder's listing are opened, so no path can lead elsewhere.
    del request
    names = await run_in_threadpool(lambda: {each.name for each in _PAGE.iterdir()})
    if name not in names or (ending := Path(name).suffix) not in _TYPES:
        return JSONResponse({"error": "no such page"}, 404)
    data = await run_in_threadpool((_PAGE / name).read_bytes)
    return Response(data, media_type=_TYPES[ending], headers={"cache-control": "no-cache"})


async def _session(request: Request) -> Response:
    """Give a cookie for a token."""
    told = _json(await request.body())
    guard: Guard = request.app.state.guard
    session = guard.session_of(str(told.get("token", "")))
    if session is None:
        return JSONResponse({"error": "the token is wrong"}, 401)
    answer = JSONResponse({})
    answer.set_cookie(COOKIE, session, httponly=True, samesite="strict", max_age=30 * 24 * 3600)
    return answer


async def _preview(service: LabellingService, request: Request) -> Response:
    query = request.query_params
    side = _whole(query, "side", SIDES[1])
    kind, data = await run_in_threadpool(service.preview, query.get("path", ""), query.get("digest", ""), side)
    # The address has the digest, so the answer never changes.
    return Response(data, media_type=kind, headers={"cache-control": "private, max-age=31536000, immutable"})


def _whole(query: Told, name: str, default: int) -> int:
    text = str(query.get(name, default))
    digits = text.removeprefix("-")
    if not digits.isdecimal() or not digits.isascii() or len(digits) > 15:
        raise DataError(f"{name}={text[:50]!r}: want a whole number")
    return int(text)


def _name(value: object) -> str:
    if not isinstance(value, str) or len(value) > 4096:
        raise DataError(f"{str(value)[:100]!r}: want a text of at most 4096 characters")
    return value
