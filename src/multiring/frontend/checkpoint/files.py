"""A checkpoint's parts, each of a file in JSON and one of arrays; folder.py says where they lie."""

import errno
import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from multiring.errors import ArgumentError
from multiring.frontend.checkpoint.array_file import ArrayFile, Entry, entries_in, header_of
from multiring.frontend.checkpoint.array_file import write as _write
from multiring.frontend.checkpoint.arrays import Buffer, Outgoing, WordSum, pieces_of
from multiring.frontend.checkpoint.folder import (
    BEFORE,
    FORMAT,
    SAVER,
    data_folder,
    manifest_in,
    places_of_before,
    publish,
)
from multiring.frontend.checkpoint.tree import resolved

Part = tuple[Any, dict[str, Outgoing]]  # a tree, and its arrays
READ_BYTES = 4 << 20
_PAUSE_S = 0.01


class VanishedError(ArgumentError):
    """A save is not there any more, as the next one has replaced it; or never was, on this disk."""


def shared_name() -> str:
    """Return the name, without its ending, of the files of what all ranks share."""
    return "shared"


def own_name(rank: int) -> str:
    """Return the name, without its ending, of the files of what is one rank's own."""
    return f"rank-{rank:05d}"


def write_part(path: Path, name: str, token: str, part: Part) -> None:
    """Write a part of a save to `path`; it is on the disk when this returns.

    Raises:
        OSError: it cannot be written. Arrays that all ranks gather were gathered all the same.
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
    """Take part in gathering these arrays, for a rank that does not write them."""
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
    """Have a save count that is written, in place of the one that did.

    Raises:
        OSError: that is not possible.
    """
    told = {"format": FORMAT, "saver": SAVER, "token": token, "ranks": ranks, "parts": parts}
    publish(path, told, _write)


def find(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return where the files of the last complete save to `path` are, and its manifest.

    Raises:
        ArgumentError: there is none, or it is of a newer version.
    """
    if _is_file(path):
        raise ArgumentError(
            f"{path} is a file, and a checkpoint of multiring's is a folder; if torch.save wrote it, torch.load reads "
            "it, and mt.save to another path makes a checkpoint of it"
        )
    token = None
    while True:
        found = _found(path)
        if found is None:
            raise ArgumentError(
                f"no finished checkpoint at {path}: want the path that `save` was given; on a first run there is none "
                "yet, which `is_saved(path)` tells"
            )
        place, manifest = found
        if manifest["format"] == BEFORE or place.is_dir():
            return place, manifest
        if manifest["token"] == token:
            raise ArgumentError(f"checkpoint {path} is damaged: {place.name}, which has its data, is not there")
        token = manifest["token"]  # replaced just now, so that the manifest names the next one; or damaged
        time.sleep(_PAUSE_S)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:  # its name is too long, or its folder is not this user's to look into
        raise ArgumentError(f"checkpoint {path} cannot be looked for: {error.strerror}") from error


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

    tree: what it says.
    entries: its arrays, in the order of their bytes.
    header: as bytes, for a rank that has not got the file.
    total: the sum of the arrays' bytes, "" where it is not known.
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
    """Return a part of the checkpoint whose files are at `place`.

    Raises:
        VanishedError: it is not there, or was replaced by the next save's.
        ArgumentError: it is damaged.
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
    """Return what a part's file in JSON says."""
    told = json.loads((place / f"{name}.json").read_text("utf-8"))
    if not isinstance(told, dict) or not isinstance(told.get("tree"), dict):
        raise ArgumentError(f"checkpoint {place}: {name}.json is damaged: it has no tree")
    if told.get("token") != token:
        raise VanishedError(f"checkpoint {place}: {name} belongs to another one; want files of one save")
    if "digest" in told and told["digest"] != _digest(told["tree"]):
        raise ArgumentError(f"checkpoint {place}: {name}.json is damaged: its values are not those that were saved")
    return told


def _resolved(tree: Any, file: ArrayFile) -> Any:
    """Return a tree of multiring 0.2 with the types and shapes of its arrays."""

    def described(name: Any) -> tuple[str, tuple[int, ...]]:
        if not isinstance(name, str) or name not in file.entries:
            raise ArgumentError(f"the checkpoint's array {name!r} is named, and not there; want all of its files")
        return file.entries[name].kind, file.entries[name].shape

    return resolved(tree, described)


def is_vanished(error: BaseException) -> bool:
    """Return whether a file was removed, here or by another host of a shared file system."""
    return isinstance(error, OSError) and error.errno in {errno.ENOENT, errno.ESTALE}


def has_part(place: Path, name: str) -> bool:
    """Return whether a part is there."""
    return (place / f"{name}.json").exists()


def _digest(tree: Any) -> str:
    """Return a digest of a tree: of all keys, values and their order, and of its arrays' names, types and shapes."""
    return hashlib.sha256(json.dumps(tree, allow_nan=False).encode()).hexdigest()
