"""Caffe 1.0 with pycaffe: train one net on many ranks.

    import multiring.caffe as mc

    mc.init()
    solver = mc.distribute(caffe.get_solver("solver.prototxt"))
    solver.step(1000)

Call `init` before you make the solver. Then Caffe's data layers give each rank its own part of the data, and only rank
0 tests and writes snapshots. `multiring caffe train -n 2 --solver FILE` does all of this.
"""

# ruff: noqa: E402 -- check for Caffe before the imports below, which would only report a missing module

from multiring._former_names import keep_to_public_names
from multiring._frontend.requirements import require_framework

require_framework("caffe", "Caffe")

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
from multiring.caffe import elastic
from multiring.caffe.joining import init, set_solver_rank
from multiring.caffe.solver_gradients import SolverGradients, distribute
from multiring.caffe.training import train
from multiring.errors import CollectiveError

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

keep_to_public_names(__name__)
