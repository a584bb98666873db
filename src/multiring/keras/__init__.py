"""Keras 3, on TensorFlow, torch or JAX: train one model on many ranks.

    import multiring.keras as mk

    mk.init()
    model = mk.distribute(model)

`fit`, `evaluate` and `predict` then run on all ranks together. If each rank has its own samples, use Horovod's
interface: `DistributedOptimizer`, and `callbacks` for `fit`.

Names, parameters, their order and defaults are those of `horovod.keras` 0.28.1. Parameters that multiring adds come
last.
"""

# ruff: noqa: E402 -- the check must come first, because an import below would fail with a less helpful error
from multiring._former_names import keep_to_public_names
from multiring._frontend.requirements import require_framework

require_framework("keras", "Keras")

from multiring._frontend.build_questions import *  # noqa: F403 -- Horovod's names, which are not public here
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
from multiring._frontend.reduce_ops import Adasum, Average, Max, Min, Product, Sum
from multiring._frontend.requests import error_of
from multiring._frontend.timeline import start_timeline, stop_timeline
from multiring.errors import CollectiveError
from multiring.keras import callbacks, elastic
from multiring.keras.distributing import distribute
from multiring.keras.joining import init
from multiring.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer, load_model
from multiring.keras.sync_batch_norm import SyncBatchNormalization
from multiring.keras.values import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    gather,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)

__all__ = [
    "Adasum",
    "Average",
    "CollectiveError",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "cross_rank",
    "cross_size",
    "distribute",
    "elastic",
    "error_of",
    "gather",
    "global_process_set",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_model",
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
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

keep_to_public_names(__name__)
