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

from chainermn.communicators import CommunicatorBase as CommunicatorBase
from chainermn.datasets import DataSizeError as DataSizeError
from chainermn.datasets import scatter_dataset as scatter_dataset
from chainermn.datasets import scatter_index as scatter_index
from chainermn.extensions import create_multi_node_checkpointer as create_multi_node_checkpointer
from chainermn.extensions import create_multi_node_evaluator as create_multi_node_evaluator
from chainermn.links import MultiNodeChainList as MultiNodeChainList

from multiring._frontend.array_collectives import allgather as allgather
from multiring._frontend.array_collectives import allreduce as allreduce
from multiring._frontend.array_collectives import broadcast as broadcast
from multiring._frontend.array_rows import alltoall as alltoall
from multiring._frontend.array_rows import broadcast_ as broadcast_
from multiring._frontend.array_rows import gather as gather
from multiring._frontend.array_rows import grouped_allgather as grouped_allgather
from multiring._frontend.array_rows import grouped_allreduce as grouped_allreduce
from multiring._frontend.array_rows import grouped_reducescatter as grouped_reducescatter
from multiring._frontend.array_rows import reducescatter as reducescatter
from multiring._frontend.compression_names import Compression as Compression
from multiring._frontend.errors import HorovodInternalError as HorovodInternalError
from multiring._frontend.evaluation import mean as mean
from multiring._frontend.first_rank import log_by_rank as log_by_rank
from multiring._frontend.first_rank import on_first_rank as on_first_rank
from multiring._frontend.first_rank import print_once as print_once
from multiring._frontend.first_rank import progress as progress
from multiring._frontend.joining import barrier as barrier
from multiring._frontend.joining import join as join
from multiring._frontend.lifecycle import cross_rank as cross_rank
from multiring._frontend.lifecycle import cross_size as cross_size
from multiring._frontend.lifecycle import init as init
from multiring._frontend.lifecycle import is_homogeneous as is_homogeneous
from multiring._frontend.lifecycle import is_initialized as is_initialized
from multiring._frontend.lifecycle import local_rank as local_rank
from multiring._frontend.lifecycle import local_size as local_size
from multiring._frontend.lifecycle import mpi_threads_supported as mpi_threads_supported
from multiring._frontend.lifecycle import rank as rank
from multiring._frontend.lifecycle import shutdown as shutdown
from multiring._frontend.lifecycle import size as size
from multiring._frontend.object_collectives import allgather_object as allgather_object
from multiring._frontend.object_collectives import broadcast_object as broadcast_object
from multiring._frontend.process_sets import ProcessSet as ProcessSet
from multiring._frontend.process_sets import add_process_set as add_process_set
from multiring._frontend.process_sets import global_process_set as global_process_set
from multiring._frontend.process_sets import remove_process_set as remove_process_set
from multiring._frontend.reduce_ops import Average as Average
from multiring._frontend.reduce_ops import Max as Max
from multiring._frontend.reduce_ops import Min as Min
from multiring._frontend.reduce_ops import Product as Product
from multiring._frontend.reduce_ops import Sum as Sum
from multiring._frontend.requests import error_of as error_of
from multiring._frontend.timeline import start_timeline as start_timeline
from multiring._frontend.timeline import stop_timeline as stop_timeline
from multiring.chainer import communicators as communicators
from multiring.chainer import datasets as datasets
from multiring.chainer import elastic as elastic
from multiring.chainer import extensions as extensions
from multiring.chainer import functions as functions
from multiring.chainer import global_except_hook as global_except_hook
from multiring.chainer import iterators as iterators
from multiring.chainer import links as links
from multiring.chainer import nccl as nccl
from multiring.chainer import optimizers as optimizers
from multiring.chainer.communicator import Communicator as Communicator
from multiring.chainer.communicators import create_communicator as create_communicator
from multiring.chainer.distributing import distribute as distribute
from multiring.chainer.optimizers import create_multi_node_optimizer as create_multi_node_optimizer
from multiring.errors import CollectiveError as CollectiveError

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
