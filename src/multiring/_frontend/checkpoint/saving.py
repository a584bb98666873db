"""Saving a checkpoint: rank 0 writes the values that are equal on all ranks, and each rank writes its own values."""

import os
import secrets
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from multiring._frontend.checkpoint.agreeing import NAME, agreed, shown_path, target_of
from multiring._frontend.checkpoint.arrays import Outgoing
from multiring._frontend.checkpoint.files import Part, finish, gather, own_name, shared_name, write_part
from multiring._frontend.checkpoint.folder import MARK, SaveAttempt, data_folder, require_ours
from multiring._frontend.checkpoint.framework import Framework, SavedState
from multiring._frontend.checkpoint.last_saved import note_saved
from multiring._frontend.checkpoint.loading import BESIDE, OWN, PARTS, RANDOM, is_saved, load
from multiring._frontend.checkpoint.tree import Flattener
from multiring._frontend.lifecycle import local_rank, rank, size
from multiring._frontend.object_collectives import allgather_object, broadcast_object
from multiring._runtime.group.handles import told_apart
from multiring._runtime.job.job import note_progress
from multiring.errors import ArgumentError, MismatchError

__all__ = ["Framework", "is_saved", "load", "save"]


def save(
    path: str | os.PathLike[str],
    framework: Framework,
    parts: Mapping[str, Any],
    *,
    own: Any = None,
    randomness: bool = True,
) -> None:
    """Save `parts` to the folder `path`, and replace the checkpoint that was there.

    Every rank calls it. The checkpoint is complete when the function returns.

    Args:
        path: the same on all ranks, in a file system that all ranks share or in each host's own.
        framework: the framework of the arrays in `parts`.
        parts: by name: objects with state_dict and load_state_dict, or plain values. Rank 0's parts are saved, except
            the compression residuals of an optimizer: each rank saves its own.
        own: a plain value that each rank saves for itself, such as its position in the data.
        randomness: whether to save the states of the random number generators of each rank.

    Raises:
        ArgumentError: a value cannot be saved, or `path` has other files. Nothing was saved, and an earlier checkpoint
            is unchanged.
        MismatchError: on the other ranks: a rank could not save.
        OSError: this rank could not write.
    """
    token: str = broadcast_object(secrets.token_hex(8), name=f"{NAME}.token")
    _require_alike(path, parts)
    doing = f"save to {shown_path(path)}"
    with agreed(doing):
        target = target_of(path, "save")
        if rank() == 0 and not parts:
            raise ArgumentError("save: no parts; want objects or values by name, as save(path, model=model)")
        if OWN in parts or not all(map(str.isidentifier, parts)):
            raise ArgumentError(f"save: parts {', '.join(map(repr, parts))}; want identifiers, and not {OWN!r}")
        if rank() == 0:
            require_ours(target)
    with agreed(doing):
        states = {name: _state(framework, name, value) for name, value in parts.items()}
        mine = {
            PARTS: {name: each.own for name, each in states.items() if each.own is not None},
            OWN: own,
            RANDOM: framework.random_state() if randomness else None,
        }
        private = _flat(mine, OWN, framework)
        shared: Part | None = _shared(states, framework) if rank() == 0 else None
        gathered = list(_gathered(states, framework)) if shared is None else []
    with SaveAttempt(target, token) as attempt:
        _begin(doing, attempt, target, token)
        with agreed(doing):
            write_part(target, own_name(rank()), token, private)
        with agreed(doing):
            if shared is None:
                gather(gathered)
            else:
                write_part(target, shared_name(), token, shared)
        # Rank 0 finishes first, and then one rank of each host that has its own file system.
        for turn in (rank() == 0, rank() != 0 and attempt.has_begun):
            with agreed(doing):
                if turn:
                    finish(target, token, size(), list(parts))
    note_saved(shown_path(path))
    note_progress()


def _begin(doing: str, attempt: SaveAttempt, target: Path, token: str) -> None:
    """Make the folder of a save on rank 0, and on one rank of each host that does not see rank 0's folder."""
    mark = data_folder(target, token) / MARK
    for turn in (rank() == 0, rank() != 0 and local_rank() == 0):
        with agreed(doing):
            if turn and not mark.exists():
                require_ours(target)
                attempt.begin()
    with agreed(doing):
        if not mark.exists():
            raise FileNotFoundError(
                f"save: rank {rank()} does not see {mark.parent}, which local rank 0 of its host has made: want a path "
                "that all ranks of a host share; an absolute path does not depend on the working folder"
            )


def _require_alike(path: str | os.PathLike[str], parts: Mapping[str, Any]) -> None:
    """Raise MismatchError on every rank if the ranks save to different paths, or save different parts."""
    told = allgather_object(f"path {shown_path(path)}, parts {', '.join(map(str, parts))}", name=NAME)
    if len(set(told)) > 1:
        apart = told_apart(dict(enumerate(told)))
        raise MismatchError(
            f"save: the ranks save different paths or parts: {apart}. Want one path on all ranks; pass a rank's own "
            "values as own="
        )


def _state(framework: Framework, name: str, value: Any) -> SavedState:
    if callable(getattr(value, "state_dict", None)):
        return framework.state(name, value)
    return SavedState(value)


def _shared(states: Mapping[str, SavedState], framework: Framework) -> Part:
    """Return the tree and the arrays that rank 0 saves for all ranks."""
    made = Flattener(framework.arrays, framework.special)
    parts = {name: made.tree(each.shared, name) for name, each in states.items()}
    beside = {name: made.tree(each.beside, name) for name, each in states.items() if each.beside is not None}
    return {PARTS: parts, BESIDE: beside}, made.arrays


def _flat(value: Any, name: str, framework: Framework) -> Part:
    made = Flattener(framework.arrays, framework.special)
    return made.tree(value, name), made.arrays


def _gathered(states: Mapping[str, SavedState], framework: Framework) -> Iterator[Outgoing]:
    """Yield the arrays that are distributed over several ranks, in the order in which rank 0 writes them."""
    for name, state in states.items():
        yield from _gathered_in(state.shared, name, framework)
    for name, state in states.items():
        yield from _gathered_in(state.beside, name, framework)


def _gathered_in(value: Any, name: str, framework: Framework) -> Iterator[Outgoing]:
    if framework.arrays.is_array(value):
        found = framework.arrays.outgoing(value, name)
        if found.gathers:
            yield found
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _gathered_in(each, f"{name}.{key}", framework)
    elif isinstance(value, list | tuple | deque):
        for number, each in enumerate(value):
            yield from _gathered_in(each, f"{name}.{number}", framework)
