"""Objects of any kind for all ranks: pickled, as Horovod does.

Unpickling runs what the sender wants. The bytes come over the job's own connections only, from ranks that have shown
that they know its secret or are processes of this host that started it, never from strangers.
"""

import importlib
import importlib.util
import pickle
from functools import cache
from typing import Any

import torch
from torch import Tensor

from multiring.frontend.errors import MismatchInternalError
from multiring.frontend.process_sets import ProcessSet, global_process_set, members_of, world_rank_in
from multiring.torch.collectives.broadcast import broadcast_
from multiring.torch.collectives.varying_rows import submit_rows

_FAILED = -1  # instead of a size


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
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
        data = _pickled(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    except Exception:
        broadcast_(torch.tensor([_FAILED]), root_rank, f"{name}.size", process_set)
        raise
    size = broadcast_(torch.tensor([len(data)]), root_rank, f"{name}.size", process_set).item()
    if size == _FAILED:
        raise MismatchInternalError(f"{name}: rank {root_rank} could not pickle its object, and raises why")
    if not is_root:
        data = torch.empty(int(size), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.data", process_set)
    return obj if is_root else _unpickled(data)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return every rank's `obj`, by rank; otherwise as `broadcast_object`.

    Raises:
        HorovodInternalError: on every other rank: one could not pickle; on every rank: one is gone.
    """
    members = members_of(process_set)
    name = name or "allgather_object"
    nothing = torch.empty(0, dtype=torch.uint8)  # of which no pickle consists
    try:
        data = _pickled(obj)
    except Exception:
        submit_rows(members, nothing, name, waits=True).wait()
        raise
    gathered, sizes = submit_rows(members, data, name, waits=True).wait()
    if 0 in sizes:
        raise MismatchInternalError(f"{name}: rank {sizes.index(0)} could not pickle its object, and raises why")
    return [_unpickled(part) for part in torch.split(gathered, list(sizes))]


def _pickled(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(_pickler().dumps(obj)), dtype=torch.uint8)


def _unpickled(data: Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())  # noqa: S301 -- see above


@cache
def _pickler() -> Any:
    return importlib.import_module("cloudpickle" if importlib.util.find_spec("cloudpickle") else "pickle")
