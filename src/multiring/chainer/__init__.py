"""Chainer 7.8: train one model on many ranks, with ChainerMN's names.

    import multiring.chainer as chainermn

    comm = chainermn.create_communicator()
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm)

Use this module in place of `import chainermn`. It has its own communicators, and takes other parts from ChainerMN if
they work unchanged. `multiring run` starts the program, without MPI.
"""

# ruff: noqa: E402 -- check for Chainer before the imports below, which would only report a missing module
from multiring._frontend.requirements import require_framework

require_framework("chainer", "Chainer")

from chainermn.communicators import CommunicatorBase
from chainermn.datasets import DataSizeError, scatter_dataset, scatter_index
from chainermn.extensions import create_multi_node_checkpointer, create_multi_node_evaluator
from chainermn.links import MultiNodeChainList

from multiring._frontend.array_collectives import allgather, allreduce, broadcast
from multiring._frontend.array_rows import (
    alltoall,
    broadcast_,
    gather,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from multiring._frontend.compression_names import Compression
from multiring._frontend.errors import HorovodInternalError as HorovodInternalError
from multiring._frontend.evaluation import mean
from multiring._frontend.first_rank import log_by_rank, on_first_rank, print_once, progress
from multiring._frontend.joining import barrier, join
from multiring._frontend.lifecycle import (
    cross_rank,
    cross_size,
    init,
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
from multiring.chainer import (
    communicators,
    datasets,
    elastic,
    extensions,
    functions,
    global_except_hook,
    iterators,
    links,
    nccl,
    optimizers,
)
from multiring.chainer.communicator import Communicator
from multiring.chainer.communicators import create_communicator
from multiring.chainer.distributing import distribute
from multiring.chainer.optimizers import create_multi_node_optimizer
from multiring.errors import CollectiveError

__all__ = [
    "Average",
    "CollectiveError",
    "Communicator",
    "CommunicatorBase",
    "Compression",
    "DataSizeError",
    "Max",
    "Min",
    "MultiNodeChainList",
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
    "broadcast_",
    "broadcast_object",
    "communicators",
    "create_communicator",
    "create_multi_node_checkpointer",
    "create_multi_node_evaluator",
    "create_multi_node_optimizer",
    "cross_rank",
    "cross_size",
    "datasets",
    "distribute",
    "elastic",
    "error_of",
    "extensions",
    "functions",
    "gather",
    "global_except_hook",
    "global_process_set",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "iterators",
    "join",
    "links",
    "local_rank",
    "local_size",
    "log_by_rank",
    "mean",
    "mpi_threads_supported",
    "nccl",
    "on_first_rank",
    "optimizers",
    "print_once",
    "progress",
    "rank",
    "reducescatter",
    "remove_process_set",
    "scatter_dataset",
    "scatter_index",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
