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
from multiring._frontend.requirements import require_framework

require_framework("tensorflow", "TensorFlow")

from multiring._frontend.errors import HorovodInternalError as HorovodInternalError
from multiring._frontend.evaluation import mean as mean
from multiring._frontend.first_rank import log_by_rank as log_by_rank
from multiring._frontend.first_rank import on_first_rank as on_first_rank
from multiring._frontend.first_rank import print_once as print_once
from multiring._frontend.first_rank import progress as progress
from multiring._frontend.joining import barrier as barrier
from multiring._frontend.joining import join as join
from multiring._frontend.lifecycle import ccl_built as ccl_built
from multiring._frontend.lifecycle import cross_rank as cross_rank
from multiring._frontend.lifecycle import cross_size as cross_size
from multiring._frontend.lifecycle import cuda_built as cuda_built
from multiring._frontend.lifecycle import ddl_built as ddl_built
from multiring._frontend.lifecycle import gloo_built as gloo_built
from multiring._frontend.lifecycle import gloo_enabled as gloo_enabled
from multiring._frontend.lifecycle import is_homogeneous as is_homogeneous
from multiring._frontend.lifecycle import is_initialized as is_initialized
from multiring._frontend.lifecycle import local_rank as local_rank
from multiring._frontend.lifecycle import local_size as local_size
from multiring._frontend.lifecycle import mpi_built as mpi_built
from multiring._frontend.lifecycle import mpi_enabled as mpi_enabled
from multiring._frontend.lifecycle import mpi_threads_supported as mpi_threads_supported
from multiring._frontend.lifecycle import nccl_built as nccl_built
from multiring._frontend.lifecycle import rank as rank
from multiring._frontend.lifecycle import rocm_built as rocm_built
from multiring._frontend.lifecycle import shutdown as shutdown
from multiring._frontend.lifecycle import size as size
from multiring._frontend.process_sets import ProcessSet as ProcessSet
from multiring._frontend.process_sets import add_process_set as add_process_set
from multiring._frontend.process_sets import global_process_set as global_process_set
from multiring._frontend.process_sets import remove_process_set as remove_process_set
from multiring._frontend.reduce_ops import Adasum as Adasum
from multiring._frontend.reduce_ops import Average as Average
from multiring._frontend.reduce_ops import Max as Max
from multiring._frontend.reduce_ops import Min as Min
from multiring._frontend.reduce_ops import Product as Product
from multiring._frontend.reduce_ops import Sum as Sum
from multiring._frontend.requests import error_of as error_of
from multiring._frontend.timeline import start_timeline as start_timeline
from multiring._frontend.timeline import stop_timeline as stop_timeline
from multiring.errors import CollectiveError as CollectiveError
from multiring.tensorflow import elastic as elastic
from multiring.tensorflow.collectives import allgather as allgather
from multiring.tensorflow.collectives import allreduce as allreduce
from multiring.tensorflow.collectives import alltoall as alltoall
from multiring.tensorflow.collectives import broadcast as broadcast
from multiring.tensorflow.collectives import broadcast_ as broadcast_
from multiring.tensorflow.collectives import grouped_allgather as grouped_allgather
from multiring.tensorflow.collectives import grouped_allreduce as grouped_allreduce
from multiring.tensorflow.collectives import grouped_reducescatter as grouped_reducescatter
from multiring.tensorflow.collectives import reducescatter as reducescatter
from multiring.tensorflow.compression import Compression as Compression
from multiring.tensorflow.distributing import distribute as distribute
from multiring.tensorflow.distributing import gather as gather
from multiring.tensorflow.feeding import DataLoader as DataLoader
from multiring.tensorflow.functions import BroadcastGlobalVariablesHook as BroadcastGlobalVariablesHook
from multiring.tensorflow.functions import allgather_object as allgather_object
from multiring.tensorflow.functions import broadcast_global_variables as broadcast_global_variables
from multiring.tensorflow.functions import broadcast_object as broadcast_object
from multiring.tensorflow.functions import broadcast_object_fn as broadcast_object_fn
from multiring.tensorflow.functions import broadcast_variables as broadcast_variables
from multiring.tensorflow.functions import local_rank_op as local_rank_op
from multiring.tensorflow.functions import local_size_op as local_size_op
from multiring.tensorflow.functions import process_set_included_op as process_set_included_op
from multiring.tensorflow.functions import rank_op as rank_op
from multiring.tensorflow.functions import size_op as size_op
from multiring.tensorflow.gradient_tape import DistributedGradientTape as DistributedGradientTape
from multiring.tensorflow.gradient_tape import PartialDistributedGradientTape as PartialDistributedGradientTape
from multiring.tensorflow.joining import init as init
from multiring.tensorflow.library import load_op_library
from multiring.tensorflow.optimizer import DistributedOptimizer as DistributedOptimizer
from multiring.tensorflow.sync_batch_norm import SyncBatchNormalization as SyncBatchNormalization

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


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__


load_op_library()  # fails now if the operations do not load into this TensorFlow
