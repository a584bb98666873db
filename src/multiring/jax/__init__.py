"""JAX: train one model on many ranks, with collectives inside jit.

    import multiring.jax as mj

    mj.init()
    parameters = mj.broadcast(parameters)
    optimizer = mj.distribute(optax.adam(1e-3))

Each rank then trains on its own samples, and `optimizer.update` takes the average of all ranks' gradients.
"""

# ruff: noqa: E402 -- check for JAX before the imports below, which would only report a missing module

from multiring._former_names import keep_to_public_names
from multiring._frontend.requirements import require_framework

require_framework("jax", "JAX")

from multiring._frontend.compression_names import Compression
from multiring._frontend.errors import HorovodInternalError as HorovodInternalError
from multiring._frontend.evaluation import mean
from multiring._frontend.first_rank import log_by_rank, on_first_rank, print_once, progress
from multiring._frontend.joining import barrier, join
from multiring._frontend.lifecycle import (
    cross_rank,
    cross_size,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_threads_supported,
    rank,
    shutdown,
    size,
)
from multiring._frontend.object_collectives import allgather_object, broadcast_object
from multiring._frontend.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from multiring._frontend.reduce_ops import Average, Max, Min, Product, Sum
from multiring._frontend.requests import error_of
from multiring._frontend.timeline import start_timeline, stop_timeline
from multiring.errors import CollectiveError
from multiring.jax import elastic
from multiring.jax.checkpoint import load, save
from multiring.jax.collectives import allgather, allreduce, alltoall, broadcast, reducescatter
from multiring.jax.evaluation import gather
from multiring.jax.feeding import DataLoader
from multiring.jax.joining import init
from multiring.jax.optimizer import distribute

__all__ = [
    "Average",
    "CollectiveError",
    "Compression",
    "DataLoader",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "cross_rank",
    "cross_size",
    "distribute",
    "elastic",
    "error_of",
    "gather",
    "global_process_set",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load",
    "local_rank",
    "local_size",
    "log_by_rank",
    "mean",
    "mpi_threads_supported",
    "on_first_rank",
    "print_once",
    "progress",
    "rank",
    "reducescatter",
    "remove_process_set",
    "save",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

keep_to_public_names(__name__)
