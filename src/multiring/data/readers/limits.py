"""Limits for the sizes that a file declares.

Readers check each count and length against the file's size and these limits before they allocate memory.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import PurePosixPath
from typing import Any

from multiring._arguments import require_whole
from multiring.errors import DataError, UnsupportedError

PICKLES = frozenset({"pkl", "pickle", "pyd", "pth", "pt", "joblib", "dill"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The largest sizes that a file may declare.

    Raises:
        ArgumentError: a size is not a whole number from 1 on.
    """

    record_bytes: int = 1 << 30  # bytes of a stored sample, and of one decompressed field of a sample
    group_bytes: int = 1 << 31  # bytes of a unit that is decompressed as a whole: a Parquet row group, a shard
    pixels: int = 1 << 27  # pixels of an image: 128 M
    index_bytes: int = 1 << 31  # bytes of a data set's index, which has the places of the samples
    samples: int = 1 << 40

    def __post_init__(self) -> None:
        for each in fields(self):
            require_whole(f"Limits: {each.name}", getattr(self, each.name), 1)


def require_size(what: str, claimed: int, most: int, because: str) -> int:
    """Return `claimed` if it is in 0 ... `most`.

    Args:
        what: the object that declares the size, for the error message.
        claimed: the declared size in bytes.
        most: the largest valid size in bytes.
        because: the reason for `most`, for the error message.

    Raises:
        DataError: `claimed` is negative or larger than `most`.
    """
    if not 0 <= claimed <= most:
        raise DataError(f"{what} claims {claimed} bytes: want 0 to {most}, {because}")
    return claimed


def require_inside(archive: str, name: str) -> str:
    """Return `name` if it is a path inside an archive or a data set.

    Raises:
        DataError: the name is absolute, contains "..", or has a control character or a backslash.
    """
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or re.search(r"[\x00-\x1f\\]", name):
        raise DataError(f"{archive} names {name!r}, a path that leads out of it; want names of files inside")
    return name


def refuse_pickle(archive: str, what: str) -> None:
    """Raise DataError, because unpickling can run any code of the file's author."""
    raise DataError(
        f"{archive}: {what} is a pickle, which can run any code when it is read; want arrays, JSON, text or images"
    )


@contextmanager
def damage_told(what: str, *kinds: type[BaseException]) -> Iterator[None]:
    """Turn exceptions of `kinds` into a DataError that names `what` as damaged."""
    try:
        yield
    except kinds as error:
        text = str(error).partition("\n")[0][:300]
        raise DataError(f"{what} is damaged, or has another format: {type(error).__name__}: {text}") from error


def library(name: str, extra: str = "data") -> Any:
    """Import and return a library of one of multiring's extras.

    Raises:
        UnsupportedError: the library is not installed.
    """
    try:
        return import_module(name)
    except ImportError:
        raise UnsupportedError(f"this needs {name}, which is not installed: pip install 'multiring[{extra}]'") from None


Report = Callable[[str], None]
