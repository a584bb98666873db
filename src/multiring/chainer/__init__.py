"""Chainer 7.8: train one model on many ranks, with ChainerMN's names.

    import multiring.chainer as chainermn

    comm = chainermn.create_communicator()
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm)

Use this module in place of `import chainermn`. It has its own communicators, and takes other parts from ChainerMN if
they work unchanged. `multiring run` starts the program, without MPI.
"""

# ruff: noqa: E402 -- check for Chainer before the imports below, which would only report a missing module
from multiring.frontend.requirements import require_framework

require_framework("chainer", "Chainer")

from chainermn.communicators import CommunicatorBase as CommunicatorBase
from chainermn.datasets import DataSizeError as DataSizeError
from chainermn.datasets import scatter_dataset as scatter_dataset
from chainermn.datasets import scatter_index as scatter_index
from chainermn.extensions import create_multi_node_checkpointer as create_multi_node_checkpointer
from chainermn.extensions import create_multi_node_evaluator as create_multi_node_evaluator
from chainermn.links import MultiNodeChainList as MultiNodeChainList

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
from multiring.chainer.optimizers import create_multi_node_optimizer as create_multi_node_optimizer
from multiring.frontend.errors import HorovodInternalError as HorovodInternalError
from multiring.frontend.lifecycle import init as init
from multiring.frontend.lifecycle import is_initialized as is_initialized
from multiring.frontend.lifecycle import local_rank as local_rank
from multiring.frontend.lifecycle import local_size as local_size
from multiring.frontend.lifecycle import rank as rank
from multiring.frontend.lifecycle import shutdown as shutdown
from multiring.frontend.lifecycle import size as size
from multiring.frontend.process_sets import ProcessSet as ProcessSet
from multiring.frontend.process_sets import add_process_set as add_process_set
from multiring.frontend.process_sets import global_process_set as global_process_set
from multiring.frontend.process_sets import remove_process_set as remove_process_set

__all__ = [
    "Communicator",
    "CommunicatorBase",
    "DataSizeError",
    "HorovodInternalError",
    "MultiNodeChainList",
    "ProcessSet",
    "add_process_set",
    "communicators",
    "create_communicator",
    "create_multi_node_checkpointer",
    "create_multi_node_evaluator",
    "create_multi_node_optimizer",
    "datasets",
    "elastic",
    "extensions",
    "functions",
    "global_except_hook",
    "global_process_set",
    "init",
    "is_initialized",
    "iterators",
    "links",
    "local_rank",
    "local_size",
    "nccl",
    "optimizers",
    "rank",
    "remove_process_set",
    "scatter_dataset",
    "scatter_index",
    "shutdown",
    "size",
]
