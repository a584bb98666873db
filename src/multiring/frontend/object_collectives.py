"""Objects of any kind for all ranks: pickled, as Horovod does.

Unpickling runs what the sender wants. The bytes come over the job's own connections only, from ranks that have shown
that they know its secret or are processes of this host that started it, never from strangers.
"""

import importlib
import importlib.util
import pickle
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from multiring.frontend.errors import MismatchInternalError
from multiring.frontend.handles import submit
from multiring.frontend.process_sets import Members, ProcessSet, global_process_set, members_of, world_rank_in
from multiring.frontend.signatures import ALLGATHER, BROADCAST, ROOT, plain_signature, rows_signature
from multiring.runtime import Group, Handle

Array = np.ndarray[Any, np.dtype[Any]]

_FAILED = -1  # instead of a size


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet | Members = global_process_set
) -> Any:
    """Return rank `root_rank`'s `obj`; the root its own.

    Args:
        obj: what cloudpickle, where it is installed, or else pickle takes; the other ranks' is not looked at.
        root_rank: as ranks are numbered in the whole job.
        name: as for allreduce.
        process_set: by default all ranks.

    Raises:
        ArgumentError: the root or this rank is not in the set.
        HorovodInternalError: on every other rank: the root could not pickle; on every rank: one is gone.
    """
    members = members_of(process_set)
    is_root = members.rank == world_rank_in(members, root_rank)
    name = name or "broadcast_object"
    try:
        data = _pickled(obj) if is_root else np.empty(0, np.uint8)
    except Exception:
        _broadcast(members, np.array([_FAILED]), root_rank, f"{name}.size")
        raise
    size = int(_broadcast(members, np.array([len(data)]), root_rank, f"{name}.size")[0])
    if size == _FAILED:
        raise MismatchInternalError(f"{name}: rank {root_rank} could not pickle its object, and raises why")
    if not is_root:
        data = np.empty(size, np.uint8)
    _broadcast(members, data, root_rank, f"{name}.data")
    return obj if is_root else _unpickled(data)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet | Members = global_process_set
) -> list[Any]:
    """Return every rank's `obj`, by rank; otherwise as `broadcast_object`.

    Raises:
        HorovodInternalError: on every other rank: one could not pickle; on every rank: one is gone.
    """
    members = members_of(process_set)
    name = name or "allgather_object"
    try:
        data = _pickled(obj)
    except Exception:
        _allgather(members, np.empty(0, np.uint8), name)  # no pickle consists of nothing
        raise
    gathered, sizes = _allgather(members, data, name)
    if 0 in sizes:
        failed = members.group.ranks[list(sizes).index(0)]
        raise MismatchInternalError(f"{name}: rank {failed} could not pickle its object, and raises why")
    return [_unpickled(part) for part in np.split(gathered, np.cumsum(sizes)[:-1])]


def _broadcast(members: Members, array: Array, root_rank: int, name: str) -> Array:
    """Overwrite a flat `array` with that of `root_rank`, as ranks are numbered in the whole job, and return it."""
    root = world_rank_in(members, root_rank)
    signature = plain_signature(BROADCAST, array.dtype.name, array.shape, ((ROOT, str(root_rank)),))

    def start(group: Group, label: str) -> Handle:
        return group.broadcast_async(array, root, label=label)

    def finish(_: Any) -> Array:
        return array

    found: Array = submit(members, name, signature, start, finish).wait()
    return found


def _allgather(members: Members, data: Array, name: str) -> tuple[Array, Sequence[int]]:
    """Return every rank's bytes, one rank's behind the other's, and how many each rank had."""

    def start(group: Group, label: str) -> Handle:
        return group.all_gather_async(data, label=label, with_rows=True, waits=True)

    def finish(found: tuple[Array, Sequence[int]]) -> tuple[Array, Sequence[int]]:
        return found

    found: tuple[Array, Sequence[int]] = submit(
        members, name, rows_signature(ALLGATHER, data.dtype.name, data.shape), start, finish
    ).wait()
    return found


def _pickled(obj: Any) -> Array:
    return np.frombuffer(bytearray(_pickler().dumps(obj)), np.uint8)


def _unpickled(data: Array) -> Any:
    return pickle.loads(data.tobytes())  # noqa: S301 -- see above


@cache
def _pickler() -> Any:
    return importlib.import_module("cloudpickle" if importlib.util.find_spec("cloudpickle") else "pickle")
