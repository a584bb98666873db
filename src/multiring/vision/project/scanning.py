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

RUNS = "runs"


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

    The folder `runs` and hidden names are left out. A link is followed if it leads to a file inside the folder. Links
    to folders are not followed, because their pictures would count twice.
    """
    root = Path(os.path.realpath(folder))
    found: list[Found] = []
    refused: list[tuple[str, str]] = []
    for place, folders, names in os.walk(root):
        at_top = Path(place) == root
        folders[:] = sorted(each for each in folders if not each.startswith(".") and not (at_top and each == RUNS))
        for name in sorted(names):
            path = Path(place, name)
            if name.startswith(".") or path.suffix.lower() not in ENDINGS:
                continue
            inner = path.relative_to(root).as_posix()
            if reason := _refusal(root, path, inner):
                refused.append((inner.encode("utf-8", "backslashreplace").decode(), reason))
                continue
            state = path.stat()
            found.append(Found(path=inner, size_bytes=state.st_size, modified_ns=state.st_mtime_ns))
    return found, refused


def _refusal(root: Path, path: Path, inner: str) -> str:
    """Return why a file cannot be in the project, or ""."""
    if not inner.isprintable():
        return "the name has control characters or is not UTF-8: rename the file"
    if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
        return "the link leads out of the folder: copy the file into it"
    if not path.exists():
        return "the link leads to no file"
    return "" if path.is_file() else "it is no regular file"


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


def digest_of_pixels(picture: Picture) -> str:
    """Return SHA-256 of a picture's size and pixels, as hexadecimal digits."""
    size = f"{picture.width}x{picture.height}\n".encode()
    return hashlib.sha256(size + picture.pixels.tobytes()).hexdigest()
