"""The parts of an adapter for a new framework: collectives of arrays, gradients, process sets, elastic states.

docs/adapters.md shows how they make an adapter, and `multiring.adapters.conformance` checks the result. No framework is
imported.
"""

from multiring._frontend.array_collectives import allgather, allreduce, broadcast, start_allreduce
from multiring._frontend.handles import Pending, handle_of, poll, submit, synchronize
from multiring._frontend.lifecycle import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from multiring._frontend.object_collectives import allgather_object, broadcast_object
from multiring._frontend.process_sets import (
    Members,
    ProcessSet,
    add_process_set,
    global_process_set,
    members_of,
    remove_process_set,
)
from multiring._gradients.buckets import GradientSpec
from multiring._gradients.options import GradientOptions, WireOnly
from multiring._gradients.reducer import GradientReducer
from multiring._runtime.arrays import numpy_dtype

__all__ = [
    "GradientOptions",
    "GradientReducer",
    "GradientSpec",
    "Members",
    "Pending",
    "ProcessSet",
    "WireOnly",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_object",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "handle_of",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "members_of",
    "numpy_dtype",
    "poll",
    "rank",
    "remove_process_set",
    "shutdown",
    "size",
    "start_allreduce",
    "submit",
    "synchronize",
]
