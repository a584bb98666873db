"""TensorFlow: train one model on many ranks, with Horovod's names.

    import multiring.tensorflow as mt

    mt.init()
    with tf.GradientTape() as tape:
        loss = loss_of(model(images), labels)
    tape = mt.DistributedGradientTape(tape)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    mt.broadcast_variables(model.variables, root_rank=0)  # after the first step

Each rank trains on its own samples, and the tape returns the average of all ranks' gradients. For Keras' `fit`, use
`multiring.keras`.

Names, parameters, their order and their defaults are those of `horovod.tensorflow` 0.28.1. Parameters that multiring
adds come last.
"""

# ruff: noqa: E402 -- check for TensorFlow before the imports below, which would only report a missing module
from multiring._former_names import keep_to_public_names
from multiring._frontend.requirements import require_framework

require_framework("tensorflow", "TensorFlow")

from multiring._frontend.build_questions import *  # noqa: F403 -- Horovod's names, which are not public here
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
from multiring._frontend.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from multiring._frontend.reduce_ops import Adasum, Average, Max, Min, Product, Sum
from multiring._frontend.requests import error_of
from multiring._frontend.timeline import start_timeline, stop_timeline
from multiring.errors import CollectiveError
from multiring.tensorflow import elastic
from multiring.tensorflow.collectives import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from multiring.tensorflow.compression import Compression
from multiring.tensorflow.distributing import distribute, gather
from multiring.tensorflow.feeding import DataLoader
from multiring.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from multiring.tensorflow.gradient_tape import DistributedGradientTape, PartialDistributedGradientTape
from multiring.tensorflow.joining import init
from multiring.tensorflow.library import load_op_library
from multiring.tensorflow.optimizer import DistributedOptimizer
from multiring.tensorflow.sync_batch_norm import SyncBatchNormalization

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "CollectiveError",
    "Compression",
    "DataLoader",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
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
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
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
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "log_by_rank",
    "mean",
    "mpi_threads_supported",
    "on_first_rank",
    "print_once",
    "process_set_included_op",
    "progress",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]


load_op_library()  # fails now if the operations do not load into this TensorFlow

keep_to_public_names(__name__)
