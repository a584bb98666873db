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
from multiring._frontend.requirements import require_framework

require_framework("keras", "Keras")

from multiring._frontend.compression_names import Compression as Compression
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
from multiring._frontend.object_collectives import allgather_object as allgather_object
from multiring._frontend.object_collectives import broadcast_object as broadcast_object
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
from multiring.keras import callbacks as callbacks
from multiring.keras import elastic as elastic
from multiring.keras.distributing import distribute as distribute
from multiring.keras.joining import init as init
from multiring.keras.optimizer import DistributedOptimizer as DistributedOptimizer
from multiring.keras.optimizer import PartialDistributedOptimizer as PartialDistributedOptimizer
from multiring.keras.optimizer import load_model as load_model
from multiring.keras.sync_batch_norm import SyncBatchNormalization as SyncBatchNormalization
from multiring.keras.values import allgather as allgather
from multiring.keras.values import allreduce as allreduce
from multiring.keras.values import alltoall as alltoall
from multiring.keras.values import broadcast as broadcast
from multiring.keras.values import broadcast_global_variables as broadcast_global_variables
from multiring.keras.values import broadcast_variables as broadcast_variables
from multiring.keras.values import gather as gather
from multiring.keras.values import grouped_allgather as grouped_allgather
from multiring.keras.values import grouped_allreduce as grouped_allreduce
from multiring.keras.values import grouped_reducescatter as grouped_reducescatter
from multiring.keras.values import reducescatter as reducescatter

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


def __dir__() -> list[str]:
    """Return the public names only."""
    return __all__
