"""Open a data set with the reader of its format, which the caller or the files' names determine."""

import sys
from collections.abc import Callable
from typing import Any

from multiring._arguments import is_of
from multiring.data.readers.arrays import NpyFilesSource, NpySource
from multiring.data.readers.columns import ParquetSource
from multiring.data.readers.folder import ENDINGS, FolderSource
from multiring.data.readers.hdf5 import Hdf5Source
from multiring.data.readers.limits import Limits
from multiring.data.readers.manifest import MANIFEST
from multiring.data.readers.mds import INDEX, MdsSource
from multiring.data.readers.packed import PackedSource
from multiring.data.readers.source import Opening
from multiring.data.readers.storage import Storage
from multiring.data.readers.tar import ENDINGS as TARS
from multiring.data.readers.tar import TarSource
from multiring.data.readers.tfrecord import TfRecordSource, is_tfrecord
from multiring.errors import ArgumentError, DataError

READERS: dict[str, Callable[[Opening], Any]] = {
    "hdf5": Hdf5Source,
    "imagefolder": FolderSource,
    "mds": MdsSource,
    "npy": NpySource,
    "npy-files": NpyFilesSource,
    "pack": PackedSource,
    "parquet": ParquetSource,
    "tar": TarSource,
    "tfrecord": TfRecordSource,
}
_BY_ENDING = {
    **dict.fromkeys(TARS, "tar"),
    ".parquet": "parquet",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
    ".npy": "npy",
    **dict.fromkeys(ENDINGS, "imagefolder"),
}


def format_of(storage: Storage, names: list[str]) -> str:
    """Return the format of a data set, determined by its files' names.

    Raises:
        DataError: the names match no format, or several.
    """
    if MANIFEST in names:
        return "pack"
    if INDEX in names and any(name.endswith((".mds", ".mds.zstd")) for name in names):
        return "mds"
    shown = [name or storage.url for name in names]
    found = {kind for name in shown for ending, kind in _BY_ENDING.items() if name.lower().endswith(ending)}
    found |= {"tfrecord" for name in shown if is_tfrecord(name)}
    if len(found) != 1:
        raise DataError(
            f"{storage.url} has {len(names)} files, whose names suggest "
            f"{' or '.join(sorted(found)) or 'no data set'}; pass format={' or '.join(map(repr, READERS))}"
        )
    return found.pop()


def tell(text: str) -> None:
    """Print a warning to standard error."""
    sys.stderr.write(f"multiring: {text}\n")


def open_source(
    storage: Storage, kind: str | None = None, limits: Limits | None = None, report: Callable[[str], None] = tell
) -> Any:
    """Return a reader of the data set in a storage.

    Args:
        storage: the storage of the data set's files.
        kind: the format; by default the files' names determine it.
        limits: the largest sizes that the files may declare.
        report: called with the text of a warning.

    Raises:
        ArgumentError: the format does not exist.
        DataError: the data set is damaged, or has no files of a known format.
    """
    if kind is not None and (not is_of(kind, str) or kind not in READERS):
        raise ArgumentError(f"format {kind!r}: want one of {', '.join(READERS)}")
    names = _names(storage, kind)
    if not names:
        raise DataError(f"{storage.url} has no files")
    chosen = kind or format_of(storage, names)
    return READERS[chosen](Opening(storage=storage, names=tuple(names), limits=limits or Limits(), report=report))


def _names(storage: Storage, kind: str | None) -> list[str]:
    """Return a data set's files, or its manifest or index alone, because not every source can list files."""
    telling = {None: (MANIFEST,), "pack": (MANIFEST,), "mds": (INDEX,)}
    for name in telling.get(kind, ()):
        try:
            storage.size(name)
        except (DataError, OSError):
            continue
        return [name]
    return storage.names()
