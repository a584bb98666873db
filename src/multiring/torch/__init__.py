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
from multiring._former_names import keep_to_public_names
from multiring._frontend.requirements import require_framework

require_framework("torch", "PyTorch")

from multiring._frontend.build_questions import *  # noqa: F403 -- Horovod's names, which are not public here
from multiring._frontend.checkpoint.saving import is_saved
from multiring._frontend.errors import HorovodInternalError as HorovodInternalError
from multiring._frontend.evaluation import mean
from multiring._frontend.first_rank import log_by_rank, on_first_rank, print_once, progress
from multiring._frontend.handles import poll, synchronize
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
from multiring._frontend.metrics_hook import MetricsHook, metrics_hook
from multiring._frontend.object_collectives import allgather_object, broadcast_object
from multiring._frontend.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from multiring._frontend.reduce_ops import Adasum, Average, Max, Min, Product, Sum
from multiring._frontend.requests import error_of
from multiring._frontend.timeline import start_timeline, stop_timeline
from multiring._gradients.options import PowerSGD
from multiring.errors import CollectiveError
from multiring.torch import device_pickling as device_pickling
from multiring.torch import elastic
from multiring.torch.c10d import registration as registration
from multiring.torch.c10d.monitored import monitored_barrier
from multiring.torch.checkpoint.saving import load, save
from multiring.torch.collectives.allgather import allgather, allgather_async, grouped_allgather, grouped_allgather_async
from multiring.torch.collectives.allreduce import allreduce, allreduce_, allreduce_async, allreduce_async_
from multiring.torch.collectives.alltoall import alltoall, alltoall_async
from multiring.torch.collectives.broadcast import broadcast, broadcast_, broadcast_async, broadcast_async_
from multiring.torch.collectives.grouped import (
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from multiring.torch.collectives.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from multiring.torch.collectives.sparse import sparse_allreduce_async
from multiring.torch.compression import Compression
from multiring.torch.ddp.arena import shared_zeros_like
from multiring.torch.ddp.comm_hook import BucketSharing, allreduce_hook
from multiring.torch.distributing import DistributedLoader, distribute
from multiring.torch.feeding import DataLoader, IterableDataset
from multiring.torch.gpu_selection import init, local_device
from multiring.torch.gradients.optimizer import DistributedOptimizer, gradient_bytes
from multiring.torch.gradients.parameters import broadcast_parameters
from multiring.torch.gradients.state import broadcast_optimizer_state
from multiring.torch.loop import gather, seed_everything
from multiring.torch.nn.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
from multiring.torch.optim.lamb import LAMB
from multiring.torch.optim.larc import LARC
from multiring.torch.optim.lars import LARS
from multiring.torch.optim.muon import Muon, NewtonSchulz
from multiring.torch.optim.parameter_groups import parameter_groups
from multiring.torch.optim.shampoo import Eigendecomposition, Shampoo
from multiring.torch.optim.widths import carry_to_width
from multiring.torch.parallelizing.parallelize import parallelize
from multiring.torch.path_agreement import device_path
from multiring.torch.reporting import timeline as timeline
from multiring.torch.reporting.balance_line import measure_bottleneck
from multiring.torch.reporting.share_of_peak import measured_peak, training_report
from multiring.torch.step.accumulation import accumulate
from multiring.torch.step.after_step import adascale, clip_gradients, moving_average, schedule_learning_rate
from multiring.torch.step.lag import gradient_lag
from multiring.torch.step.noise import noise_scale
from multiring.torch.step.precision import mixed_precision
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
    "Eigendecomposition",
    "IterableDataset",
    "Max",
    "MetricsHook",
    "Min",
    "Muon",
    "NewtonSchulz",
    "PowerSGD",
    "ProcessSet",
    "Product",
    "Shampoo",
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
    "carry_to_width",
    "clip_gradients",
    "convert_sync_batchnorm",
    "cross_rank",
    "cross_size",
    "device_path",
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
    "local_device",
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


keep_untraced("multiring.torch", sys.modules[__name__])

keep_to_public_names(__name__)
