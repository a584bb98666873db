"""The parts of a checkpoint: each has a JSON file and a file of arrays. folder.py describes the folder."""

import errno
import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from multiring._frontend.checkpoint.array_file import ArrayFile, Entry, entries_in, header_of
from multiring._frontend.checkpoint.array_file import write as _write
from multiring._frontend.checkpoint.arrays import Buffer, Outgoing, WordSum, pieces_of
from multiring._frontend.checkpoint.folder import (
    BEFORE,
    FORMAT,
    SAVER,
    data_folder,
    manifest_in,
    places_of_before,
    publish,
)
from multiring._frontend.checkpoint.tree import resolved
from multiring.errors import ArgumentError

Part = tuple[Any, dict[str, Outgoing]]  # a tree, and its arrays
READ_BYTES = 4 << 20
_PAUSE_S = 0.01


class NoCheckpointError(ArgumentError):
    """There is no checkpoint."""


class VanishedError(ArgumentError):
    """The files of a save are missing.

    Either the next save has replaced them, or they never were on this disk.
    """


def shared_name() -> str:
    """Return the name, without the extension, of the files with values that all ranks share."""
    return "shared"


def own_name(rank: int) -> str:
    """Return the name, without the extension, of the files with a rank's own values."""
    return f"rank-{rank:05d}"


def write_part(path: Path, name: str, token: str, part: Part) -> None:
    """Write a part of a save to `path`, and wait until it is on the disk.

    Raises:
        OSError: the part cannot be written. The ranks have gathered the distributed arrays nevertheless.
    """
    tree, arrays = part
    folder = data_folder(path, token)
    total = WordSum()
    if arrays:
        waiting = [each for each in arrays.values() if each.gathers]
        try:
            _write(
                folder / f"{name}.safetensors",
                [[header_of(arrays)], *(_summed(each, total, waiting) for each in arrays.values())],
            )
        finally:
            gather(waiting)
    told = {
        "token": token,
        "arrays": bool(arrays),
        "words": total.value(),
        "digest": _digest(tree),
        "tree": tree,
    }
    _write(folder / f"{name}.json", [[json.dumps(told, indent=1, allow_nan=False).encode()]])


def gather(waiting: Iterable[Outgoing]) -> None:
    """Contribute to the gathering of these arrays on a rank that does not write them."""
    for array in list(waiting):
        for _ in array.pieces():
            pass


def _summed(array: Outgoing, total: WordSum, waiting: list[Outgoing]) -> Iterator[Buffer]:
    if array.gathers:
        waiting.remove(array)
    for piece in array.pieces():
        for each in pieces_of(memoryview(piece), READ_BYTES):
            total.add(each)
            yield each


def finish(path: Path, token: str, ranks: int, parts: list[str]) -> None:
    """Make a completely written save the current save of the checkpoint.

    Raises:
        OSError: the manifest cannot be replaced.
    """
    told = {"format": FORMAT, "saver": SAVER, "token": token, "ranks": ranks, "parts": parts}
    publish(path, told, _write)


def find(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder of the last complete save to `path`, and its manifest.

    Raises:
        NoCheckpointError: there is no complete save.
        ArgumentError: the save is damaged, or a newer version wrote it.
    """
    if _is_file(path):
        raise ArgumentError(
            f"{path} is a file, and a checkpoint of multiring is a folder; if torch.save wrote the file, read it with "
            "torch.load, and make a checkpoint with mt.save to another path"
        )
    token = None
    while True:
        found = _found(path)
        if found is None:
            raise NoCheckpointError(
                f"no finished checkpoint at {path}: want the path that was passed to `save`; on a first run there is "
                "none yet, and `is_saved(path)` returns False"
            )
        place, manifest = found
        if manifest["format"] == BEFORE or place.is_dir():
            return place, manifest
        if manifest["token"] == token:
            raise ArgumentError(f"checkpoint {path} is damaged: its data folder {place.name} is missing")
        token = manifest["token"]  # retry: if a save has just replaced this save, the manifest has a new token
        time.sleep(_PAUSE_S)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:  # for example, the name is too long, or this user may not read the folder
        raise ArgumentError(f"checkpoint {path} cannot be accessed: {error.strerror}") from error


def _found(path: Path) -> tuple[Path, dict[str, Any]] | None:
    for place in places_of_before(path):
        try:
            manifest = manifest_in(place)
        except FileNotFoundError:
            continue
        if manifest["format"] == BEFORE:
            return place, manifest
        if place == path:
            return data_folder(path, manifest["token"]), manifest
    return None


class OpenPart:
    """A part of a checkpoint whose files are open.

    tree: the part's values.
    entries: the part's arrays, in the order of their bytes.
    header: the header of the file of arrays, as bytes; rank 0 sends it to ranks that do not have the file.
    total: the checksum of the arrays' bytes; "" if it is not known.
    """

    def __init__(self, tree: Any, total: str, file: ArrayFile | None, header: bytes = b"", what: str = "") -> None:
        self.tree = tree
        self.total = total
        self.file = file
        self.header = file.header if file is not None else header
        self.what = file.what if file is not None else what
        self.entries: dict[str, Entry] = {}
        if file is not None:
            self.entries = file.entries
        elif header:
            self.entries = entries_in(header, None, what)

    def close(self) -> None:
        """Close the files."""
        if self.file is not None:
            self.file.close()


def open_part(place: Path, name: str, token: str) -> OpenPart:
    """Open and return a part of the checkpoint whose files are in `place`.

    Raises:
        VanishedError: the part is missing, or the next save has replaced it.
        ArgumentError: the part is damaged.
    """
    try:
        told = _part_in(place, name, token)
        if not told["arrays"]:
            return OpenPart(told["tree"], "", None)
        opened = (place / f"{name}.safetensors").open("rb", buffering=0)
        try:
            file = ArrayFile(opened, f"checkpoint {place}: {name}.safetensors")
        except BaseException:
            opened.close()
            raise
        tree = told["tree"] if "digest" in told else _resolved(told["tree"], file)
        return OpenPart(tree, str(told.get("words", "")), file)
    except ArgumentError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        kind = VanishedError if is_vanished(error) else ArgumentError
        raise kind(f"checkpoint {place}: {name} cannot be read: {error}") from error


def _part_in(place: Path, name: str, token: str) -> dict[str, Any]:
    """Return the contents of a part's JSON file."""
    told = json.loads((place / f"{name}.json").read_text("utf-8"))
    if not isinstance(told, dict) or not isinstance(told.get("tree"), dict):
        raise ArgumentError(f"checkpoint {place}: {name}.json is damaged: it has no tree")
    if told.get("token") != token:
        raise VanishedError(f"checkpoint {place}: {name} belongs to another save; want files of one save")
    if "digest" in told and told["digest"] != _digest(told["tree"]):
        raise ArgumentError(f"checkpoint {place}: {name}.json is damaged: its values are not those that were saved")
    return told


def _resolved(tree: Any, file: ArrayFile) -> Any:
    """Return a tree of multiring 0.2, completed by the types and shapes of its arrays."""

    def described(name: Any) -> tuple[str, tuple[int, ...]]:
        if not isinstance(name, str) or name not in file.entries:
            raise ArgumentError(f"the checkpoint's array {name!r} is missing; want all files of the checkpoint")
        return file.entries[name].kind, file.entries[name].shape

    return resolved(tree, described)


def is_vanished(error: BaseException) -> bool:
    """Return whether an error says that a file was removed, here or by another host."""
    return isinstance(error, OSError) and error.errno in {errno.ENOENT, errno.ESTALE}


def has_part(place: Path, name: str) -> bool:
    """Return whether a part exists."""
    return (place / f"{name}.json").exists()


def _digest(tree: Any) -> str:
    """Return a digest of a tree's keys and values, in their order, and of its arrays' names, types and shapes."""
    return hashlib.sha256(json.dumps(tree, allow_nan=False).encode()).hexdigest()
