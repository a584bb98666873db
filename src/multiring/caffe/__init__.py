"""Caffe 1.0 with pycaffe: train one net on many ranks.

    import multiring.caffe as mc

    mc.init()
    solver = mc.distribute(caffe.get_solver("solver.prototxt"))
    solver.step(1000)

Call `init` before you make the solver. Then Caffe's data layers give each rank its own part of the data, and only rank
0 tests and writes snapshots. `multiring caffe train -n 2 --solver FILE` does all of this.
"""

# ruff: noqa: E402 -- check for Caffe before the imports below, which would only report a missing module
from typing import TYPE_CHECKING, NoReturn

from multiring._former_names import refuse
from multiring._frontend.requirements import require_framework

require_framework("caffe", "Caffe")

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
from multiring.caffe import elastic as elastic
from multiring.caffe.joining import init as init
from multiring.caffe.joining import set_solver_rank as set_solver_rank
from multiring.caffe.solver_gradients import SolverGradients as SolverGradients
from multiring.caffe.solver_gradients import distribute as distribute
from multiring.caffe.training import train as train
from multiring.errors import CollectiveError as CollectiveError

__all__ = [
    "Average",
    "CollectiveError",
    "Compression",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "SolverGradients",
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
    "set_solver_rank",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "train",
]

if not TYPE_CHECKING:  # otherwise mypy would accept every name

    def __getattr__(name: str) -> NoReturn:
        """Raise an error with the current name if `name` is a former name."""
        refuse(__name__, name)
