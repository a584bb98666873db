"""Saving and loading: what is equal on all ranks once, what is a rank's own by each."""

import logging
import os
import random
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from multiring.errors import ArgumentError, MismatchError, MultiringError
from multiring.frontend.checkpoint.files import (
    Part,
    clear,
    find,
    finish,
    has_part,
    own_name,
    parsed,
    place_beside,
    raw_part,
    read_part,
    require_folder,
    shared_name,
    write_part,
)
from multiring.frontend.checkpoint.tree import (
    Arrays,
    NumpyArrays,
    Stored,
    first_difference,
    flattened,
    names_in,
    unflattened,
)
from multiring.frontend.errors import HorovodInternalError
from multiring.frontend.lifecycle import local_rank, rank, size
from multiring.frontend.object_collectives import allgather_object, broadcast_object
from multiring.runtime.group.handles import told_apart
from multiring.runtime.job.job import note_progress

_log = logging.getLogger("multiring")
_OWN, _RANDOM = "own", "$random"
_WHAT = "checkpoint"


class Framework:
    """What a checkpoint needs to know of a framework; this one is NumPy."""

    arrays: Arrays = NumpyArrays()

    def is_model(self, value: Any) -> bool:  # noqa: ARG002 -- there are none
        """Return whether every array of `value`, which has a state_dict, is to be in the checkpoint, and no other."""
        return False

    def split(self, value: Any, state: Any) -> tuple[Any, Any]:  # noqa: ARG002 -- nothing is
        """Return what of the state of `value` all ranks share, and what is this rank's own; None for nothing."""
        return state, None

    def joined(self, value: Any, shared: Any, own: Any) -> Any:  # noqa: ARG002 -- nothing is a rank's own
        """Return the state of `value` whose parts these are; `own` is None where this rank has saved nothing."""
        return shared

    def random_state(self) -> dict[str, Any]:
        """Return the states of the generators of random numbers."""
        return {"python": random.getstate(), "numpy": np.random.get_state()}  # noqa: NPY002 -- programs use it

    def set_random_state(self, state: Mapping[str, Any]) -> None:
        """Set the generators to what `random_state` returned."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])  # noqa: NPY002 -- as above


def save(
    path: str | os.PathLike[str],
    framework: Framework,
    parts: Mapping[str, Any],
    *,
    own: Any = None,
    randomness: bool = True,
) -> None:
    """Save `parts` to the folder `path`, in place of what is there; every rank calls it, and has saved when it returns.

    Args:
        path: the same on all ranks; a file system that they share, or one of each host's own.
        framework: whose arrays there are.
        parts: by name: objects with state_dict and load_state_dict, or plain values; rank 0's are saved, but what an
            optimizer owes of its gradients is each rank's own.
        own: a plain value of this rank's own, such as its place in the data.
        randomness: whether the states of the generators of random numbers are saved, which are each rank's own.

    Raises:
        ArgumentError: something is neither; nothing was saved, and what was there is there.
        MismatchError: on the other ranks: one could not save.
        OSError: this rank could not write.
    """
    target = Path(path).absolute()
    token: str = broadcast_object(secrets.token_hex(8), name=f"{_WHAT}.token")
    _require_alike(path, parts)
    with _agreed(f"save to {target}"):
        require_folder(target)
        if rank() == 0 and not parts:
            raise ArgumentError("save: no parts; want objects or values by name, as save(path, model=model)")
        if _OWN in parts or any(not name.isidentifier() for name in parts):
            raise ArgumentError(f"save: parts {', '.join(map(repr, parts))}; want identifiers, and not {_OWN!r}")
        if local_rank() == 0:
            clear(target)
    with _agreed(f"save to {target}", cleans=target):
        shared, private = _split(framework, parts)
        mine = {"parts": private, _OWN: own, _RANDOM: framework.random_state() if randomness else None}
        write_part(target, own_name(rank()), token, _flat(mine, _OWN, framework))
        if rank() == 0:
            stored: dict[str, Stored] = {}
            tree = {name: flattened(value, name, framework.arrays, stored) for name, value in shared.items()}
            write_part(target, shared_name(), token, (tree, stored))
    # By rank 0, and then on hosts that have a file system of their own.
    for turn in (rank() == 0, rank() != 0 and local_rank() == 0):
        with _agreed(f"save to {target}"):
            if turn and place_beside(target).exists():
                finish(target, token, size(), list(parts))
    note_progress()


def _require_alike(path: str | os.PathLike[str], parts: Mapping[str, Any]) -> None:
    """Raise MismatchError, on every rank, where they save to different paths, or different parts."""
    told = allgather_object(f"path {os.fspath(path)!r}, parts {', '.join(parts)}", name=_WHAT)
    if len(set(told)) > 1:
        apart = told_apart(dict(enumerate(told)))
        raise MismatchError(
            f"save: the ranks save different paths or parts: {apart}. Want one path on all; what is a rank's own goes "
            "in own="
        )


def is_saved(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a complete checkpoint at `path`, as rank 0 sees it; every rank calls it."""
    found = _found(Path(path).absolute()) if rank() == 0 else None
    return bool(broadcast_object(not isinstance(found, str), name=f"{_WHAT}.is_saved"))


def load(
    path: str | os.PathLike[str], framework: Framework, parts: Mapping[str, Any], *, randomness: bool = True
) -> dict[str, Any]:
    """Load the last complete checkpoint of `path` into `parts`; return the other values. Every rank calls it.

    On another number of ranks than saved it, what is a rank's own is dropped, and the log says so: what it owed of its
    gradients, its random numbers, its `own`. Nothing is unpickled.

    Args:
        path: what `save` was given.
        framework: whose arrays there are.
        parts: objects with load_state_dict, by the names under which they were saved.
        randomness: whether the generators of random numbers go on from where they were.

    Returns:
        What is not among `parts`, by name; and under "own" what this rank saved as its own, or None.

    Raises:
        ArgumentError: on every rank: there is no checkpoint, or a part is not in it. On this one: it is damaged, or of
            another model, whose first difference is named.
        MismatchError: on the other ranks: one could not load.
    """
    target = Path(path).absolute()
    found = broadcast_object(_found(target) if rank() == 0 else None, name=f"{_WHAT}.manifest")
    if isinstance(found, str):
        raise ArgumentError(found)
    manifest: dict[str, Any] = found
    token, saved_by = manifest["token"], manifest["ranks"]
    with _agreed(f"load of {target}"):
        here, is_here = _here(target, token)
    tree, stored = _shared_part(target, here, token, is_here=is_here)
    with _agreed(f"load of {target}"):
        missing = [name for name in parts if name not in tree]
        if missing:
            raise ArgumentError(f"load: {missing[0]} is not in the checkpoint {target}, which has {', '.join(tree)}")
        mine: dict[str, Any] = {}
        if is_here and saved_by == size() and has_part(here, own_name(rank())):
            own_tree, own_stored = read_part(here, own_name(rank()), token)
            mine = unflattened(own_tree, framework.arrays, own_stored)
        elif saved_by != size() and rank() == 0:
            _log.warning(
                "load: %s was saved by %d ranks, there are %d: what was each rank's own is dropped (random numbers, "
                "what was owed of gradients, `own`)",
                *(target, saved_by, size()),
            )
        private = mine.get("parts", {})
        for name, value in parts.items():
            _load_part(framework, name, value, (tree[name], stored), private.get(name))
    values = {name: unflattened(each, framework.arrays, stored) for name, each in tree.items() if name not in parts}
    if randomness and mine.get(_RANDOM) is not None:
        framework.set_random_state(mine[_RANDOM])
    return {**values, _OWN: mine.get(_OWN)}


@contextmanager
def _agreed(what: str, *, cleans: Path | None = None) -> Iterator[None]:
    """Have all ranks leave the block together: where it failed with that error, the others with one that says so.

    Args:
        what: for the error.
        cleans: a checkpoint whose unfinished files are removed then.
    """
    failure: Exception | None = None
    try:
        yield
    except HorovodInternalError:  # the others have it, too, or nobody can be told any more
        raise
    except Exception as error:  # noqa: BLE001 -- it is raised below
        failure = error
    told: list[str] = allgather_object(f"{type(failure).__name__}: {failure}" if failure else "", name=_WHAT)
    failed = next((f"rank {number} failed with {text}" for number, text in enumerate(told) if text), None)
    if failed and cleans is not None:
        if local_rank() == 0:
            clear(cleans)
        allgather_object("", name=_WHAT)
    if failure is not None:
        raise failure
    if failed:
        raise MismatchError(f"{what}: {failed}")


def _split(framework: Framework, parts: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    shared, private = {}, {}
    for name, value in parts.items():
        if not callable(getattr(value, "state_dict", None)):
            shared[name] = value
            continue
        shared[name], mine = framework.split(value, value.state_dict())
        if mine is not None:
            private[name] = mine
    return shared, private


def _flat(value: Any, name: str, framework: Framework) -> Part:
    stored: dict[str, Stored] = {}
    return flattened(value, name, framework.arrays, stored), stored


def _found(target: Path) -> dict[str, Any] | str:
    """Return the manifest of the checkpoint, or why there is none."""
    try:
        return find(target)[1]
    except MultiringError as error:
        return str(error)


def _here(target: Path, token: str) -> tuple[Path, bool]:
    """Return where this rank finds the checkpoint, and whether it does: its host may have another disk."""
    try:
        place, manifest = find(target)
    except ArgumentError:
        return target, False
    return place, manifest["token"] == token


def _shared_part(target: Path, here: Path, token: str, *, is_here: bool) -> Part:
    """Return what all ranks share, from this rank's disk or, where some rank has it not, from rank 0's."""
    if all(allgather_object(is_here, name=f"{_WHAT}.places")):
        with _agreed(f"load of {target}"):
            return read_part(here, shared_name(), token)
    with _agreed(f"load of {target}"):
        raw = raw_part(here, shared_name()) if rank() == 0 else None
    text, data = broadcast_object(raw, name=f"{_WHAT}.shared")
    with _agreed(f"load of {target}"):
        return parsed(target, shared_name(), token, (text, data))


def _load_part(framework: Framework, name: str, value: Any, part: Part, own: Any) -> None:
    load_state: Callable[[Any], Any] | None = getattr(value, "load_state_dict", None)
    if load_state is None:
        raise ArgumentError(
            f"load: {name} is a {type(value).__name__}, which has no load_state_dict; leave it out, and take the value "
            "that `load` returns"
        )
    tree, stored = part
    if framework.is_model(value):
        mine: dict[str, Stored] = {}
        flattened(value.state_dict(), name, framework.arrays, mine)
        difference = first_difference({key: stored[key] for key in names_in(tree) if key in stored}, mine)
        if difference:
            raise ArgumentError(f"load: the checkpoint is another model's: {difference}")
    state = framework.joined(value, unflattened(tree, framework.arrays, stored), own)
    try:
        load_state(state)
    except (KeyError, ValueError, RuntimeError, TypeError, IndexError) as error:
        raise ArgumentError(f"load: {name} does not take what the checkpoint has of it: {error}") from error
