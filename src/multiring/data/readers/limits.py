"""What a file may claim: every count and length is held against its size and these before memory is taken."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import PurePosixPath
from typing import Any

from multiring.errors import DataError, UnsupportedError

PICKLES = frozenset({"pkl", "pickle", "pyd", "pth", "pt", "joblib", "dill"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The most that one thing in a file may need."""

    record_bytes: int = 1 << 30  # of one sample, as it is stored, and of one of its fields once unpacked
    group_bytes: int = 1 << 31  # of what can only be unpacked together: a Parquet row group, a compressed shard
    pixels: int = 1 << 27  # of an image: 128 M
    index_bytes: int = 1 << 31  # of all that says where samples are
    samples: int = 1 << 40


def require_size(what: str, claimed: int, most: int, because: str) -> int:
    """Return `claimed` unless it is negative or more than `most`.

    Raises:
        DataError: it is.
    """
    if not 0 <= claimed <= most:
        raise DataError(f"{what} claims {claimed} bytes: want 0 to {most}, {because}")
    return claimed


def require_inside(archive: str, name: str) -> str:
    """Return the name of a file in an archive or a data set, which may not lead out of it.

    Raises:
        DataError: it is absolute, goes upwards, or has a character that no name has.
    """
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or re.search(r"[\x00-\x1f\\]", name):
        raise DataError(f"{archive} names {name!r}: a path that leaves it; want names of files inside")
    return name


def refuse_pickle(archive: str, what: str) -> None:
    """Raise DataError: unpickling runs whatever program the file's author put in."""
    raise DataError(
        f"{archive}: {what} is a pickle, which runs any program when it is read; want arrays, JSON, text or images"
    )


@contextmanager
def damage_told(what: str, *kinds: type[BaseException]) -> Iterator[None]:
    """Raise DataError, with `what` in it, for what a library raises on a damaged file."""
    try:
        yield
    except kinds as error:
        text = str(error).partition("\n")[0][:300]
        raise DataError(f"{what} is damaged, or not what its name says: {type(error).__name__}: {text}") from error


def library(name: str) -> Any:
    """Return a library of the extra `data`.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        return import_module(name)
    except ImportError:
        raise UnsupportedError(f"this needs {name}, which is not installed: pip install 'multiring[data]'") from None


Report = Callable[[str], None]
