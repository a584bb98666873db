"""The parts of an adapter for a new framework: collectives of arrays, gradients, process sets, elastic states.

docs/adapters.md shows how they make an adapter, and `multiring.adapters.conformance` checks the result. No framework is
imported.
"""

from multiring._frontend.array_collectives import allgather as allgather
from multiring._frontend.array_collectives import allreduce as allreduce
from multiring._frontend.array_collectives import broadcast as broadcast
from multiring._frontend.array_collectives import start_allreduce as start_allreduce
from multiring._frontend.handles import Pending as Pending
from multiring._frontend.handles import handle_of as handle_of
from multiring._frontend.handles import poll as poll
from multiring._frontend.handles import submit as submit
from multiring._frontend.handles import synchronize as synchronize
from multiring._frontend.lifecycle import cross_rank as cross_rank
from multiring._frontend.lifecycle import cross_size as cross_size
from multiring._frontend.lifecycle import init as init
from multiring._frontend.lifecycle import is_homogeneous as is_homogeneous
from multiring._frontend.lifecycle import is_initialized as is_initialized
from multiring._frontend.lifecycle import local_rank as local_rank
from multiring._frontend.lifecycle import local_size as local_size
from multiring._frontend.lifecycle import rank as rank
from multiring._frontend.lifecycle import shutdown as shutdown
from multiring._frontend.lifecycle import size as size
from multiring._frontend.object_collectives import allgather_object as allgather_object
from multiring._frontend.object_collectives import broadcast_object as broadcast_object
from multiring._frontend.process_sets import Members as Members
from multiring._frontend.process_sets import ProcessSet as ProcessSet
from multiring._frontend.process_sets import add_process_set as add_process_set
from multiring._frontend.process_sets import global_process_set as global_process_set
from multiring._frontend.process_sets import members_of as members_of
from multiring._frontend.process_sets import remove_process_set as remove_process_set
from multiring._gradients.buckets import GradientSpec as GradientSpec
from multiring._gradients.options import GradientOptions as GradientOptions
from multiring._gradients.options import WireOnly as WireOnly
from multiring._gradients.reducer import GradientReducer as GradientReducer
from multiring._runtime.arrays import numpy_dtype as numpy_dtype

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
