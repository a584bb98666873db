"""PyTorch: train one model on many ranks, with Horovod's names.

    import multiring.torch as mt

    mt.init()
    mt.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = mt.DistributedOptimizer(optimizer, model.named_parameters())

Each rank then trains on its own samples; `loss.backward()` leaves the average of all ranks' gradients.

Names, parameters, their order and their defaults are those of `horovod.torch` 0.28.1. Parameters that multiring adds
come after Horovod's.
"""

import sys

# ruff: noqa: E402 -- this check comes before the imports below, because their errors would not say how to install torch
from typing import TYPE_CHECKING, NoReturn

from multiring._former_names import refuse
from multiring._frontend.requirements import require_framework

require_framework("torch", "PyTorch")

from multiring._frontend.checkpoint.saving import is_saved as is_saved
from multiring._frontend.errors import HorovodInternalError as HorovodInternalError
from multiring._frontend.evaluation import mean as mean
from multiring._frontend.first_rank import log_by_rank as log_by_rank
from multiring._frontend.first_rank import on_first_rank as on_first_rank
from multiring._frontend.first_rank import print_once as print_once
from multiring._frontend.first_rank import progress as progress
from multiring._frontend.handles import poll as poll
from multiring._frontend.handles import synchronize as synchronize
from multiring._frontend.joining import barrier as barrier
from multiring._frontend.joining import join as join
from multiring._frontend.lifecycle import ccl_built as ccl_built
from multiring._frontend.lifecycle import cross_rank as cross_rank
from multiring._frontend.lifecycle import cross_size as cross_size
from multiring._frontend.lifecycle import cuda_built as cuda_built
from multiring._frontend.lifecycle import ddl_built as ddl_built
from multiring._frontend.lifecycle import gloo_built as gloo_built
from multiring._frontend.lifecycle import gloo_enabled as gloo_enabled
from multiring._frontend.lifecycle import init as init
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
from multiring._frontend.metrics_hook import MetricsHook as MetricsHook
from multiring._frontend.metrics_hook import metrics_hook as metrics_hook
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
from multiring._gradients.options import PowerSGD as PowerSGD
from multiring.errors import CollectiveError as CollectiveError
from multiring.torch import elastic as elastic
from multiring.torch.c10d import registration as registration
from multiring.torch.c10d.monitored import monitored_barrier as monitored_barrier
from multiring.torch.checkpoint.saving import load as load
from multiring.torch.checkpoint.saving import save as save
from multiring.torch.collectives.allgather import allgather as allgather
from multiring.torch.collectives.allgather import allgather_async as allgather_async
from multiring.torch.collectives.allgather import grouped_allgather as grouped_allgather
from multiring.torch.collectives.allgather import grouped_allgather_async as grouped_allgather_async
from multiring.torch.collectives.allreduce import allreduce as allreduce
from multiring.torch.collectives.allreduce import allreduce_ as allreduce_
from multiring.torch.collectives.allreduce import allreduce_async as allreduce_async
from multiring.torch.collectives.allreduce import allreduce_async_ as allreduce_async_
from multiring.torch.collectives.alltoall import alltoall as alltoall
from multiring.torch.collectives.alltoall import alltoall_async as alltoall_async
from multiring.torch.collectives.broadcast import broadcast as broadcast
from multiring.torch.collectives.broadcast import broadcast_ as broadcast_
from multiring.torch.collectives.broadcast import broadcast_async as broadcast_async
from multiring.torch.collectives.broadcast import broadcast_async_ as broadcast_async_
from multiring.torch.collectives.grouped import grouped_allreduce as grouped_allreduce
from multiring.torch.collectives.grouped import grouped_allreduce_ as grouped_allreduce_
from multiring.torch.collectives.grouped import grouped_allreduce_async as grouped_allreduce_async
from multiring.torch.collectives.grouped import grouped_allreduce_async_ as grouped_allreduce_async_
from multiring.torch.collectives.reducescatter import grouped_reducescatter as grouped_reducescatter
from multiring.torch.collectives.reducescatter import grouped_reducescatter_async as grouped_reducescatter_async
from multiring.torch.collectives.reducescatter import reducescatter as reducescatter
from multiring.torch.collectives.reducescatter import reducescatter_async as reducescatter_async
from multiring.torch.collectives.sparse import sparse_allreduce_async as sparse_allreduce_async
from multiring.torch.compression import Compression as Compression
from multiring.torch.ddp.arena import shared_zeros_like as shared_zeros_like
from multiring.torch.ddp.comm_hook import BucketSharing as BucketSharing
from multiring.torch.ddp.comm_hook import allreduce_hook as allreduce_hook
from multiring.torch.distributing import DistributedLoader as DistributedLoader
from multiring.torch.distributing import distribute as distribute
from multiring.torch.feeding import DataLoader as DataLoader
from multiring.torch.feeding import IterableDataset as IterableDataset
from multiring.torch.gradients.optimizer import DistributedOptimizer as DistributedOptimizer
from multiring.torch.gradients.optimizer import gradient_bytes as gradient_bytes
from multiring.torch.gradients.parameters import broadcast_parameters as broadcast_parameters
from multiring.torch.gradients.state import broadcast_optimizer_state as broadcast_optimizer_state
from multiring.torch.loop import gather as gather
from multiring.torch.loop import seed_everything as seed_everything
from multiring.torch.nn.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
from multiring.torch.nn.sync_batch_norm import convert_sync_batchnorm as convert_sync_batchnorm
from multiring.torch.optim.lamb import LAMB as LAMB
from multiring.torch.optim.larc import LARC as LARC
from multiring.torch.optim.lars import LARS as LARS
from multiring.torch.optim.muon import Muon as Muon
from multiring.torch.optim.muon import NewtonSchulz as NewtonSchulz
from multiring.torch.optim.parameter_groups import parameter_groups as parameter_groups
from multiring.torch.parallelizing.parallelize import parallelize as parallelize
from multiring.torch.reporting import timeline as timeline
from multiring.torch.reporting.balance_line import measure_bottleneck as measure_bottleneck
from multiring.torch.reporting.share_of_peak import measured_peak as measured_peak
from multiring.torch.reporting.share_of_peak import training_report as training_report
from multiring.torch.step.accumulation import accumulate as accumulate
from multiring.torch.step.after_step import adascale as adascale
from multiring.torch.step.after_step import clip_gradients as clip_gradients
from multiring.torch.step.after_step import moving_average as moving_average
from multiring.torch.step.after_step import schedule_learning_rate as schedule_learning_rate
from multiring.torch.step.lag import gradient_lag as gradient_lag
from multiring.torch.step.noise import noise_scale as noise_scale
from multiring.torch.step.precision import mixed_precision as mixed_precision
from multiring.torch.tracing import keep_untraced

__all__ = [
    "LAMB",
    "LARC",
    "LARS",
    "Adasum",
    "Average",
    "BucketSharing",
    "CollectiveError",
    "Compression",
    "DataLoader",
    "DistributedLoader",
    "DistributedOptimizer",
    "IterableDataset",
    "Max",
    "MetricsHook",
    "Min",
    "Muon",
    "NewtonSchulz",
    "PowerSGD",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "accumulate",
    "adascale",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "allreduce_hook",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "clip_gradients",
    "convert_sync_batchnorm",
    "cross_rank",
    "cross_size",
    "distribute",
    "elastic",
    "error_of",
    "gather",
    "global_process_set",
    "gradient_bytes",
    "gradient_lag",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "is_saved",
    "join",
    "load",
    "local_rank",
    "local_size",
    "log_by_rank",
    "mean",
    "measure_bottleneck",
    "measured_peak",
    "metrics_hook",
    "mixed_precision",
    "monitored_barrier",
    "moving_average",
    "mpi_threads_supported",
    "noise_scale",
    "on_first_rank",
    "parallelize",
    "parameter_groups",
    "poll",
    "print_once",
    "progress",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "save",
    "schedule_learning_rate",
    "seed_everything",
    "shared_zeros_like",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
    "training_report",
]

if not TYPE_CHECKING:  # otherwise mypy would accept every name

    def __getattr__(name: str) -> NoReturn:
        """Raise an error with the current name if `name` is a former name."""
        refuse(__name__, name)


def __dir__() -> list[str]:
    """Return the public names, without imported modules."""
    return __all__


keep_untraced("multiring.torch", sys.modules[__name__])
