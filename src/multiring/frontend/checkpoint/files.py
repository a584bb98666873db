"""A checkpoint's files: a folder that is there as a whole or not at all.

    manifest.json                     how many ranks saved it; written last
    shared.json, .safetensors         what is the same on all ranks, by rank 0
    rank-00000.json, .safetensors     what is each rank's own

It is written beside its place, and put there by renaming; the one that was there goes only then. So a reader, or
whoever comes after a power cut, finds the old one or the new one.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from multiring.errors import ArgumentError, UnsupportedError
from multiring.frontend.checkpoint.tree import Stored, array_of

FORMAT = 1
_MANIFEST = "manifest.json"
# What safetensors calls types, in what it gives and takes.
_GIVEN = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}

Part = tuple[Any, dict[str, Stored]]  # a tree, and its arrays


def shared_name() -> str:
    """Return the name, without its ending, of the files of what all ranks share."""
    return "shared"


def own_name(rank: int) -> str:
    """Return the name, without its ending, of the files of what is one rank's own."""
    return f"rank-{rank:05d}"


def place_beside(path: Path) -> Path:
    """Return where a checkpoint is written that shall be at `path`."""
    return path.with_name(f".{path.name}.new")


def _place_behind(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def require_folder(path: Path) -> None:
    """Raise ArgumentError where something that is no folder is at `path`: a save would replace it."""
    if path.exists() and not path.is_dir():
        raise ArgumentError(f"{path} is a file, which a checkpoint, a folder, would replace: want another path")


def clear(path: Path) -> None:
    """Remove what an unfinished save to `path` left."""
    shutil.rmtree(place_beside(path), ignore_errors=True)


def write_part(path: Path, name: str, token: str, part: Part) -> None:
    """Write a part of the checkpoint that shall be at `path`; it is on the disk when this returns.

    Raises:
        OSError: it cannot be written.
        ArgumentError: safetensors has no such type of array.
    """
    tree, stored = part
    folder = place_beside(path)
    folder.mkdir(parents=True, exist_ok=True)
    if stored:
        safetensors = _safetensors()
        try:
            data = safetensors.numpy.save({key: array_of(each) for key, each in stored.items()})
        except (TypeError, ValueError, KeyError, safetensors.SafetensorError) as error:
            text = f"checkpoint {path}: {name} has arrays that safetensors cannot hold: {error}"
            raise ArgumentError(text) from error
        _write(folder / f"{name}.safetensors", data)
    text = json.dumps({"token": token, "arrays": bool(stored), "tree": tree}, indent=1, allow_nan=False)
    _write(folder / f"{name}.json", text.encode())


def finish(path: Path, token: str, ranks: int, parts: list[str]) -> None:
    """Put the checkpoint that is written in its place.

    Raises:
        OSError: it cannot be put there.
    """
    beside, behind = place_beside(path), _place_behind(path)
    told = {"format": FORMAT, "token": token, "ranks": ranks, "parts": parts}
    _write(beside / _MANIFEST, json.dumps(told, indent=1).encode())
    _sync(beside)
    shutil.rmtree(behind, ignore_errors=True)
    if path.exists():
        path.rename(behind)
    beside.rename(path)
    _sync(path.parent)
    shutil.rmtree(behind, ignore_errors=True)


def find(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return where the last complete checkpoint of `path` is, and its manifest.

    Raises:
        ArgumentError: there is none, or it is of a newer version.
    """
    if path.is_file():
        raise ArgumentError(
            f"{path} is a file, and a checkpoint of multiring's is a folder; if torch.save wrote it, torch.load reads "
            "it, and mt.save to another path makes a checkpoint of it"
        )
    for place in (path, _place_behind(path)):  # the latter where a power cut came between two renamings
        try:
            manifest = json.loads((place / _MANIFEST).read_text("utf-8"))
        except FileNotFoundError:
            continue
        except (ValueError, OSError) as error:
            raise ArgumentError(f"checkpoint {place}: {_MANIFEST} cannot be read: {error}") from error
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise ArgumentError(f"checkpoint {place} is not of format {FORMAT}; was it saved by a newer version?")
        if not isinstance(manifest.get("token"), str) or not isinstance(manifest.get("ranks"), int):
            raise ArgumentError(f"checkpoint {place}: {_MANIFEST} is damaged: it lacks a token, or the number of ranks")
        return place, manifest
    raise ArgumentError(
        f"no finished checkpoint at {path}: want the path that `save` was given; on a first run there is none yet, "
        "which `is_saved(path)` tells"
    )


def read_part(place: Path, name: str, token: str) -> Part:
    """Return a part of the checkpoint at `place`.

    Raises:
        ArgumentError: it is damaged, or of another checkpoint.
    """
    return parsed(place, name, token, raw_part(place, name))


def parsed(place: Path, name: str, token: str, read: tuple[Any, bytes]) -> Part:
    """Return a part of its JSON and its arrays' bytes; see `read_part`."""
    told, data = read
    if not isinstance(told, dict) or not isinstance(told.get("tree"), dict):
        raise ArgumentError(f"checkpoint {place}: {name}.json is damaged: it has no tree")
    if told.get("token") != token:
        raise ArgumentError(f"checkpoint {place}: {name} belongs to another one; want files of one save")
    if not data:
        return told["tree"], {}
    try:
        found = _safetensors().deserialize(data)
    except _safetensors().SafetensorError as error:
        raise ArgumentError(f"checkpoint {place}: {name}.safetensors is damaged: {error}") from error
    return told["tree"], {
        key: Stored(_GIVEN.get(each["dtype"], each["dtype"]), tuple(each["shape"]), each["data"]) for key, each in found
    }


def has_part(place: Path, name: str) -> bool:
    """Return whether a part is there."""
    return (place / f"{name}.json").exists()


def raw_part(place: Path, name: str) -> tuple[Any, bytes]:
    """Return a part's JSON and its arrays' bytes, also for a rank whose disk has not got them.

    Raises:
        ArgumentError: they cannot be read.
    """
    try:
        told = json.loads((place / f"{name}.json").read_text("utf-8"))
        return told, (place / f"{name}.safetensors").read_bytes() if told["arrays"] else b""
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"checkpoint {place}: {name} cannot be read: {error}") from error


def _write(file: Path, data: bytes) -> None:
    with file.open("wb") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _safetensors() -> Any:
    try:
        import safetensors.numpy  # noqa: PLC0415 -- an extra
    except ImportError:
        raise UnsupportedError(
            "checkpoints need safetensors, which is not installed: pip install safetensors"
        ) from None
    return safetensors
