"""Collectives of pickled Python objects, as in Horovod.

Unpickling runs code that the sender chooses. The bytes come only over the job's own connections. The other end is a
process of the job on this host, or a rank that has proved that it has the job's secret.
"""

import importlib
import importlib.util
import io
import pickle
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from multiring._frontend.errors import MismatchInternalError
from multiring._frontend.handles import submit
from multiring._frontend.process_sets import Members, ProcessSet, global_process_set, members_of, world_rank_in
from multiring._frontend.signatures import ALLGATHER, BROADCAST, ROOT, plain_signature, rows_signature
from multiring._runtime import Group, Handle

Array = np.ndarray[Any, np.dtype[Any]]

_FAILED = -1  # broadcast instead of a size if pickling failed


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet | Members = global_process_set
) -> Any:
    """Return the `obj` of rank `root_rank`. The root gets its own object, not a copy.

    Args:
        obj: an object that cloudpickle can pickle if it is installed, or else pickle. It is ignored on other ranks.
        root_rank: a rank of the whole job.
        name: as for allreduce.
        process_set: the ranks that take part; by default all ranks.

    Raises:
        ArgumentError: the root or this rank is not in the set.
        CollectiveError: on every other rank: the root could not pickle its object. On every rank: a rank is gone.
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
        raise MismatchInternalError(f"{name}: rank {root_rank} could not pickle its object; its own error says why")
    if not is_root:
        data = np.empty(size, np.uint8)
    _broadcast(members, data, root_rank, f"{name}.data")
    return obj if is_root else _unpickled(data)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet | Members = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in the order of the ranks.

    The arguments are as in `broadcast_object`.

    Raises:
        CollectiveError: on every other rank: a rank could not pickle its object. On every rank: a rank is gone.
    """
    members = members_of(process_set)
    name = name or "allgather_object"
    try:
        data = _pickled(obj)
    except Exception:
        _allgather(members, np.empty(0, np.uint8), name)  # no bytes mean failure: a pickle is never empty
        raise
    gathered, sizes = _allgather(members, data, name)
    if 0 in sizes:
        failed = members.group.ranks[list(sizes).index(0)]
        raise MismatchInternalError(f"{name}: rank {failed} could not pickle its object; its own error says why")
    return [_unpickled(part) for part in np.split(gathered, np.cumsum(sizes)[:-1])]


def _broadcast(members: Members, array: Array, root_rank: int, name: str) -> Array:
    """Overwrite a flat `array` with the array of `root_rank`, a rank of the whole job, and return it."""
    root = world_rank_in(members, root_rank)
    signature = plain_signature(BROADCAST, array.dtype.name, array.shape, ((ROOT, str(root_rank)),))

    def start(group: Group, label: str) -> Handle:
        return group.broadcast_async(array, root, label=label)

    def finish(_: Any) -> Array:
        return array

    found: Array = submit(members, name, signature, start, finish).wait()
    return found


def _allgather(members: Members, data: Array, name: str) -> tuple[Array, Sequence[int]]:
    """Return all ranks' bytes, concatenated in the order of the ranks, and the number of bytes of each rank."""

    def start(group: Group, label: str) -> Handle:
        return group.all_gather_async(data, label=label, with_rows=True, waits=True)

    def finish(found: tuple[Array, Sequence[int]]) -> tuple[Array, Sequence[int]]:
        return found

    found: tuple[Array, Sequence[int]] = submit(
        members, name, rows_signature(ALLGATHER, data.dtype.name, data.shape), start, finish
    ).wait()
    return found


_reducers: list[Callable[[Any], Any]] = []


def add_reducer(reduce: Callable[[Any], Any]) -> None:
    """Make objects of a framework travel in another form.

    Args:
        reduce: returns an object's form as `__reduce__` does, or NotImplemented for objects that it does not know.
    """
    _reducers.append(reduce)


def _pickled(obj: Any) -> Array:
    stream = io.BytesIO()
    pickler_class()(stream).dump(obj)
    return np.frombuffer(bytearray(stream.getbuffer()), np.uint8)


def _unpickled(data: Array) -> Any:
    return pickle.loads(data.tobytes())  # noqa: S301 -- the module's docstring says why this is safe


@cache
def pickler_class() -> Any:
    """Return the class of the best pickler here, extended by the frameworks' reducers."""
    base: Any = importlib.import_module("cloudpickle" if importlib.util.find_spec("cloudpickle") else "pickle").Pickler

    class Pickler(base):  # type: ignore[misc] # found at run time
        def reducer_override(self, obj: Any) -> Any:
            for reduce in _reducers:
                found = reduce(obj)
                if found is not NotImplemented:
                    return found
            inherited = getattr(super(), "reducer_override", None)
            return NotImplemented if inherited is None else inherited(obj)

    return Pickler
