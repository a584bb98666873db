"""Read the pictures of a folder: digests, properties and signatures."""

import hashlib
import os
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from multiring.data.readers.limits import Limits
from multiring.errors import DataError
from multiring.vision.pictures import ENDINGS, Picture, decode_picture
from multiring.vision.signatures import signature_of

DATABASE, RUNS = "labels.sqlite", "runs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A file that a scan found: its path relative to the folder, and what tells whether it changed."""

    path: str
    size_bytes: int
    modified_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A file after reading. `picture` is None if there is a problem; its pixels are let go of."""

    found: Found
    digest: str
    problem: str | None
    values: tuple[object, ...]  # width ... signature, in the order of the table's columns


COLUMNS = (
    "width", "height", "format", "mode", "bits", "frames", "is_transparent", "is_turned", "pixels_digest", "signature",
)  # fmt: skip


def files_below(folder: Path) -> tuple[list[Found], list[tuple[str, str]]]:
    """Return the pictures' files below a folder, by their endings, and the names that are refused with the reasons.

    The folder `runs` and hidden names are left out; so are the folders `runs` of other projects inside. A link is
    followed if it leads to a file inside the folder. Links to folders are not followed: those inside would count twice,
    and those outside are refused.
    """
    root = Path(os.path.realpath(folder))
    found: list[Found] = []
    refused: list[tuple[str, str]] = []

    def refuse(path: Path, reason: str) -> None:
        inner = path.relative_to(root).as_posix()
        refused.append((inner.encode("utf-8", "backslashreplace").decode(), reason))

    def unread(error: OSError) -> None:
        refuse(Path(error.filename), f"the folder cannot be read: {error.strerror or error}")

    for place, folders, names in os.walk(root, onerror=unread):
        at_top = Path(place) == root
        inside = without_runs(folders, [*names, *[DATABASE] * at_top])
        folders[:] = sorted(each for each in inside if not each.startswith("."))
        for name in folders:
            if _leads_out(root, Path(place, name)):
                refuse(Path(place, name), "the link leads out of the folder: copy the folder into it")
        for name in sorted(names):
            path = Path(place, name)
            if name.startswith(".") or path.suffix.lower() not in ENDINGS:
                continue
            inner = path.relative_to(root).as_posix()
            if reason := _refusal(root, path, inner):
                refuse(path, reason)
                continue
            state = path.stat()
            found.append(Found(path=inner, size_bytes=state.st_size, modified_ns=state.st_mtime_ns))
    return found, refused


def _refusal(root: Path, path: Path, inner: str) -> str:
    """Return why a file cannot be in the project, or ""."""
    if not inner.isprintable():
        return "the name has control characters or is not UTF-8: rename the file"
    if _leads_out(root, path):
        return "the link leads out of the folder: copy the file into it"
    if not path.exists():
        return "the link leads to no file"
    return "" if path.is_file() else "it is no regular file"


def _leads_out(root: Path, path: Path) -> bool:
    return path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root)


def without_runs(folders: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the folders in a folder without that of a project's results, whose pictures belong to no data.

    Args:
        folders: the names of the folders.
        names: the names of the files beside them, which tell a project.
    """
    is_project = DATABASE in names
    return [each for each in folders if not (is_project and each == RUNS)]


def measured(folder: Path, files: Iterable[Found], limits: Limits, threads: int) -> Iterator[Measured]:
    """Read files and yield what they are, in the order of `files`."""

    def read(found: Found) -> Measured:
        return _measure(folder, found, limits)

    pending = list(files)
    with warnings.catch_warnings(), ThreadPoolExecutor(threads) as pool:
        # The filters belong to the process, and each decoding thread sets and resets them. With this filter around
        # all, any order of resets leaves warnings ignored.
        warnings.simplefilter("ignore")
        step = 64  # a bounded number of results wait for the writer
        for start in range(0, len(pending), step):
            yield from pool.map(read, pending[start : start + step])


def _measure(folder: Path, found: Found, limits: Limits) -> Measured:
    nothing = (None,) * len(COLUMNS)
    if found.size_bytes > limits.record_bytes:
        problem = f"picture {found.path!r} has {found.size_bytes} bytes: want at most {limits.record_bytes}"
        return Measured(found=found, digest="", problem=problem, values=nothing)
    try:
        data = (folder / found.path).read_bytes()
    except OSError as error:
        problem = f"picture {found.path!r} cannot be read: {error.strerror or error}"
        return Measured(found=found, digest="", problem=problem, values=nothing)
    digest = hashlib.sha256(data).hexdigest()
    try:
        picture = decode_picture(f"picture {found.path!r}", data, limits)
    except DataError as error:
        return Measured(found=found, digest=digest, problem=str(error), values=nothing)
    values = (
        picture.width, picture.height, picture.format, picture.mode, picture.bits, picture.frames,
        int(picture.is_transparent), int(picture.is_turned), digest_of_pixels(picture), signature_of(picture.pixels),
    )  # fmt: skip
    return Measured(found=found, digest=digest, problem=None, values=values)


def differs(folder: Path, known: Found, digest: str) -> bool:
    """Return whether a picture's file is not the one that a scan found.

    A file of the same size and time of modification counts as the same, and is not read.

    Args:
        folder: the project's folder.
        known: what the scan found.
        digest: SHA-256 of the file at that time.

    Raises:
        FileNotFoundError: the file is gone.
        OSError: it cannot be read.
    """
    path = folder / known.path
    state = path.stat()
    if (state.st_size, state.st_mtime_ns) == (known.size_bytes, known.modified_ns):
        return False
    if state.st_size != known.size_bytes:
        return True
    return hashlib.sha256(path.read_bytes()).hexdigest() != digest


def digest_of_pixels(picture: Picture) -> str:
    """Return SHA-256 of a picture's size and pixels, as hexadecimal digits."""
    size = f"{picture.width}x{picture.height}\n".encode()
    return hashlib.sha256(size + picture.pixels.tobytes()).hexdigest()
