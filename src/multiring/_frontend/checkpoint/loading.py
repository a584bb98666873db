"""Loading a checkpoint: every rank reads the values that all ranks share, and its own values."""

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

from multiring._frontend.checkpoint.agreeing import NAME, agreed, shown_path, target_of
from multiring._frontend.checkpoint.array_file import Entry
from multiring._frontend.checkpoint.arrays import BYTES, NUMPY, SAFETENSORS, Arrays, WordSum, pieces_of
from multiring._frontend.checkpoint.files import (
    READ_BYTES,
    NoCheckpointError,
    OpenPart,
    VanishedError,
    find,
    has_part,
    is_vanished,
    open_part,
    own_name,
    shared_name,
)
from multiring._frontend.checkpoint.folder import BEFORE
from multiring._frontend.checkpoint.framework import Framework, SavedState
from multiring._frontend.checkpoint.tree import Builder, Ref, refs_in
from multiring._frontend.lifecycle import rank, size
from multiring._frontend.object_collectives import allgather_object, broadcast_object
from multiring._runtime.group.posting import ranks_in_words
from multiring.errors import ArgumentError, MultiringError

_log = logging.getLogger("multiring")
OWN, RANDOM, PARTS, BESIDE = "own", "$random", "parts", "beside"
# If saves keep replacing the checkpoint, a load retries for this time.
_TRIES_FOR_S = 60.0
_SENT_BYTES = 16 << 20


def is_saved(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a complete checkpoint at `path`.

    Every rank calls it, and gets the same result. A program that gets False starts anew, and later replaces whatever is
    there. So False means that no rank finds a checkpoint; a checkpoint that cannot be loaded is an error.

    Raises:
        ArgumentError: on rank 0: the checkpoint is damaged, of a newer version, or cannot be read; or `path` is a file.
            On every rank: other ranks find a checkpoint, but rank 0 finds none.
        MismatchError: on the other ranks: rank 0 cannot read the checkpoint.
    """
    doing = f"is_saved of {shown_path(path)}"
    with agreed(doing):
        target = target_of(path, "is_saved")
    with agreed(doing):
        is_here = _is_finished(target)
    owners = [number for number, told in enumerate(allgather_object(is_here, name=f"{NAME}.is_saved")) if told]
    if not owners or owners[0] == 0:
        return bool(owners)
    with agreed(doing):  # another job may have finished its first save in the meantime
        is_here = _is_finished(target)
    if not broadcast_object(is_here, name=f"{NAME}.is_saved"):
        raise ArgumentError(
            f"{doing}: rank 0 finds no checkpoint, but there is one for {ranks_in_words(owners)}: copy it to the host "
            "of rank 0, from which the ranks without it get it; or remove it from the other hosts to start anew"
        )
    return True


def _is_finished(target: Path) -> bool:
    """Return whether this rank finds a checkpoint; on rank 0, raise ArgumentError if it cannot be loaded."""
    try:
        find(target)
    except NoCheckpointError:
        return False
    except MultiringError:
        if rank() == 0:
            raise
        return False
    return True


class _Found(NamedTuple):
    """The contents of a checkpoint.

    parts, beside: trees by the names of the parts.
    build: turns a tree into values.
    own: this rank's own values.
    ranks: the number of ranks that saved the checkpoint.
    """

    parts: dict[str, Any]
    beside: dict[str, Any]
    build: Callable[[Any], Any]
    own: dict[str, Any]
    ranks: int


class _Opened(NamedTuple):
    """An open checkpoint on this rank.

    place: the folder of its files.
    shared: the part that all ranks share. If this rank lacks the file, rank 0 will send the arrays.
    is_here: whether this rank has the file of the shared part.
    own: this rank's own part; None if there is none.
    """

    manifest: dict[str, Any]
    place: Path
    shared: OpenPart
    is_here: bool
    own: OpenPart | None


def load(
    path: str | os.PathLike[str], framework: Framework, parts: Mapping[str, Any], *, randomness: bool = True
) -> dict[str, Any]:
    """Load the last complete checkpoint of `path` into `parts`.

    Every rank calls it. If the number of ranks has changed since the save, the ranks' own values are dropped, and a
    warning is logged. These values are compression residuals, states of random number generators, and `own`. Nothing is
    unpickled.

    Args:
        path: the path that was passed to `save`.
        framework: the framework of the arrays in `parts`.
        parts: objects with load_state_dict, by the names under which they were saved.
        randomness: whether to restore the states of the random number generators.

    Returns:
        The values that are not in `parts`, by name. The value of "own" is this rank's `own` value, or None.

    Raises:
        ArgumentError: on every rank: there is no checkpoint, or it lacks a part. On this rank: the checkpoint is
            damaged, or belongs to another model; the message has the first difference.
        MismatchError: on the other ranks: a rank could not load.
    """
    doing = f"load of {shown_path(path)}"
    with agreed(doing):
        target = target_of(path, "load")
    until = time.monotonic() + _TRIES_FOR_S
    found: _Found | str = ""
    while isinstance(found, str):
        with ExitStack() as files:
            opened = _open(target, files)
            found = opened if isinstance(opened, str) else _read_all(doing, framework, parts, target, opened)
        if isinstance(found, str) and broadcast_object(time.monotonic() > until, name=f"{NAME}.until"):
            raise ArgumentError(f"{doing}: {found}; the checkpoint is replaced faster than it can be read")
    with agreed(doing):
        private = found.own.get(PARTS, {})
        for name, value in parts.items():
            beside = found.build(found.beside[name]) if name in found.beside else None
            _load_part(framework, name, value, SavedState(found.build(found.parts[name]), private.get(name), beside))
        values = {name: found.build(each) for name, each in found.parts.items() if name not in parts}
    if found.ranks != size() and rank() == 0:
        _log.warning(
            "load: %s was saved by %d ranks, there are %d: each rank's own values are dropped (random numbers, "
            "compression residuals, `own`)",
            *(target, found.ranks, size()),
        )
    with agreed(doing):
        if randomness and found.own.get(RANDOM) is not None:
            _set_random_state(framework, found.own[RANDOM])
    return {**values, OWN: found.own.get(OWN)}


def _set_random_state(framework: Framework, state: Any) -> None:
    try:
        framework.set_random_state(state)
    except (KeyError, ValueError, RuntimeError, TypeError, IndexError, AttributeError) as error:
        raise ArgumentError(
            f"load: the checkpoint's states of random number generators do not fit this version ({error}); everything "
            "else was loaded; pass randomness=False to skip them"
        ) from error


def _found(target: Path) -> dict[str, Any] | str:
    """Return the manifest of the checkpoint, or the reason for a missing checkpoint."""
    try:
        return find(target)[1]
    except MultiringError as error:
        return str(error)


def _open(target: Path, files: ExitStack) -> _Opened | str:
    """Open the current save. If another save replaced it before all ranks had opened it, return the reason as text."""
    manifest: Any = broadcast_object(_found(target) if rank() == 0 else None, name=f"{NAME}.manifest")
    if isinstance(manifest, str):
        raise ArgumentError(manifest)
    with agreed(f"load of {str(target)!r}"):
        place, shared, own, why = _files(target, manifest, files)
    # If the save is still current, a rank without it has its own disk. If rank 0 lacks the file, the save is damaged.
    now = _found(target) if rank() == 0 else None
    told = (shared is not None, isinstance(now, dict) and now["token"] == manifest["token"], why)
    is_open, counts, reason = broadcast_object(told, name=f"{NAME}.counts")
    if not is_open and counts:
        raise ArgumentError(reason)
    if not is_open:
        return str(reason)
    has_all = all(allgather_object(shared is not None, name=f"{NAME}.opened"))
    if not has_all and not counts:
        return f"checkpoint {target} was replaced while it was opened"
    if has_all and shared is not None:
        return _Opened(manifest, place, shared, is_here=True, own=own)
    sent = (shared.tree, shared.total, shared.header) if rank() == 0 and shared is not None else None
    tree, total, header = broadcast_object(sent, name=f"{NAME}.shared")
    what = f"checkpoint {target}: {shared_name()}.safetensors, as rank 0 has it,"
    is_here = shared is not None
    return _Opened(manifest, place, shared or OpenPart(tree, total, None, header, what), is_here=is_here, own=own)


def _files(
    target: Path, manifest: Mapping[str, Any], files: ExitStack
) -> tuple[Path, OpenPart | None, OpenPart | None, str]:
    """Open this rank's files of a save.

    Return their folder, the shared part, the own part, and the reason if a part is missing.
    """
    shared = own = None
    try:
        place, here = find(target)
    except ArgumentError as error:
        if rank() == 0:
            raise
        return target, None, None, str(error)
    if here["token"] != manifest["token"]:
        return place, None, None, f"checkpoint {target} was replaced by another save"
    try:
        shared = files.enter_context(closing(open_part(place, shared_name(), manifest["token"])))
        if manifest["ranks"] == size():
            if has_part(place, own_name(rank())):
                own = files.enter_context(closing(open_part(place, own_name(rank()), manifest["token"])))
            elif find(target)[1]["token"] != manifest["token"]:
                return place, None, None, f"checkpoint {target} was replaced by another save"
            else:
                _log.warning("load: %s has no own values of rank %d: loading continues without them", target, rank())
    except VanishedError as error:
        return place, None, None, str(error)
    return place, shared, own, ""


def _trees(opened: _Opened, target: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tree of each part, and the trees of additional state."""
    tree = opened.shared.tree
    if opened.manifest["format"] == BEFORE:
        return tree, {}
    if not isinstance(tree.get(PARTS), dict) or not isinstance(tree.get(BESIDE), dict):
        raise ArgumentError(f"checkpoint {target}: {shared_name()}.json is damaged: it has no parts")
    return tree[PARTS], tree[BESIDE]


def _places(framework: Framework, parts: Mapping[str, Any], trees: Mapping[str, Any], target: Path) -> dict[str, Any]:
    """Check all parts; return the arrays that the file's arrays can be read into, by their names in the file."""
    places: dict[str, Any] = {}
    for name, value in parts.items():
        if name not in trees:
            raise ArgumentError(f"load: {name} is not in the checkpoint {target}, which has {', '.join(trees)}")
        if not callable(getattr(value, "load_state_dict", None)):
            raise ArgumentError(
                f"load: {name} is a {type(value).__name__}, which has no load_state_dict; leave it out, and take the "
                "value that `load` returns"
            )
        places |= framework.places(name, value, trees[name])
    return places


def _read_all(
    doing: str, framework: Framework, parts: Mapping[str, Any], target: Path, opened: _Opened
) -> _Found | str:
    """Read the checkpoint. If another save has removed its files in the meantime, return the reason as text."""
    with agreed(doing):
        trees, beside = _trees(opened, target)
        places = _places(framework, parts, trees, target)
        shared = Reading(framework, opened.shared, [trees, beside], places)
        own = None if opened.own is None else Reading(framework, opened.own, opened.own.tree, {})
    sends = not all(allgather_object(opened.is_here, name=f"{NAME}.places"))
    gone = ""
    mine: Any = {}
    with agreed(doing):
        try:
            shared.read(sends=sends)
            if own is not None and opened.own is not None:
                own.read(sends=False)
                mine = Builder(own.made, framework.special).value(opened.own.tree)
                if not isinstance(mine, dict) or not isinstance(mine.get(PARTS, {}), dict):
                    raise ArgumentError(f"checkpoint {target}: {own_name(rank())}.json is damaged: it has no parts")
        except VanishedError as error:
            gone = str(error)
    reasons: list[str] = [each for each in allgather_object(gone, name=f"{NAME}.gone") if each]
    if reasons:
        return reasons[0]
    build = Builder(shared.made, framework.special).value
    return _Found(trees, beside, build, mine, opened.manifest["ranks"])


class Reading:
    """The arrays of a part. They are read directly into their final memory.

    made: the arrays by name; their contents are defined after `read`.
    """

    def __init__(self, framework: Framework, part: OpenPart, tree: Any, places: Mapping[str, Any]) -> None:
        """Find or allocate the memory of each array.

        Args:
            framework: the framework of the arrays.
            part: the part to read from.
            tree: the tree that names the arrays.
            places: existing arrays by name, to read into instead of new arrays.

        Raises:
            ArgumentError: the part is damaged.
        """
        self.made: dict[str, Any] = {}
        self._has_places = bool(places)
        self._part = part
        self._arrays: dict[str, Arrays] = {}
        for ref in refs_in(tree):
            entry = part.entries.get(ref.name)
            if entry is None:
                raise ArgumentError(f"the checkpoint's array {ref.name!r} is missing; want all files of the checkpoint")
            if ref.name in self.made:
                raise ArgumentError(
                    f"the checkpoint has two values under the name {ref.name!r}, of which multiring 0.2 kept one: the "
                    "other is lost; want a checkpoint of this version"
                )
            self._arrays[ref.name] = NUMPY if ref.is_numpy else framework.arrays
            self.made[ref.name] = _array(self._arrays[ref.name], ref, entry, places.get(ref.name))
        if len(self.made) != len(part.entries):
            raise ArgumentError(f"{part.what} is damaged: it has arrays that belong to none of its values")

    def read(self, *, sends: bool) -> None:
        """Read the bytes of all arrays.

        With `sends`, rank 0 reads them and sends them to all ranks.

        Raises:
            VanishedError: the file was removed.
            ArgumentError: the bytes cannot be read, or are damaged.
        """
        total = WordSum()
        for name, entry in self._part.entries.items():
            done = 0
            for window in self._arrays[name].windows(self.made[name]):
                for piece in pieces_of(window, _SENT_BYTES if sends else READ_BYTES):
                    _fill(self._part, entry, done, piece, sends=sends)
                    total.add(piece)
                    done += len(piece)
        if self._part.total and self._part.total != total.value():
            read_into = "; they have overwritten the arrays of `parts`: load another checkpoint, or create these again"
            raise ArgumentError(
                f"{self._part.what} is damaged: its arrays are not those that were saved"
                f"{read_into if self._has_places else ''}"
            )


def _array(arrays: Arrays, ref: Ref, entry: Entry, place: Any) -> Any:
    """Return `place`, or a new array for an entry of the file if `place` is None."""
    native = isinstance(ref.kind, str) and ref.kind in SAFETENSORS
    stored = (SAFETENSORS[str(ref.kind)], ref.shape) if native else (BYTES, (*ref.shape, *entry.shape[-1:]))
    if stored != (entry.dtype, entry.shape):
        raise ArgumentError(
            f"the checkpoint is damaged: {ref.name!r} is described as {ref.kind} of shape {ref.shape}, but stored as "
            f"{entry.dtype} of shape {entry.shape}"
        )
    array = arrays.empty(ref.kind, ref.shape) if place is None else place
    if math.prod(ref.shape) * arrays.itemsize(array) != entry.end - entry.begin:
        raise ArgumentError(f"the checkpoint is damaged: {ref.name!r} has a number of bytes that does not fit its type")
    return array


def _fill(part: OpenPart, entry: Entry, done: int, piece: memoryview, *, sends: bool) -> None:
    """Read a piece of an array from the file, or receive it from rank 0."""
    failure: Exception | None = None
    if part.file is not None and (not sends or rank() == 0):
        try:
            part.file.read_into(entry, done, piece)
        except OSError as error:
            failure = VanishedError(str(error)) if is_vanished(error) else ArgumentError(f"{part.what}: {error}")
    if not sends:
        if failure is not None:
            raise failure
        return
    sent = (str(failure) if failure else "", bytes(piece)) if rank() == 0 else None
    text, data = broadcast_object(sent, name=f"{NAME}.piece")
    if text:
        raise ArgumentError(text)
    piece[:] = data


def _load_part(framework: Framework, name: str, value: Any, state: SavedState) -> None:
    try:
        framework.load(name, value, state)
    except ArgumentError:
        raise
    except (KeyError, ValueError, RuntimeError, TypeError, IndexError, AttributeError) as error:
        raise ArgumentError(f"load: {name} does not accept its state in the checkpoint: {error}") from error
