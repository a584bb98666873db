"""Caffe 1.0 with pycaffe: train one net on many ranks.

    import multiring.caffe as mc

    mc.init()
    solver = mc.distribute(caffe.get_solver("solver.prototxt"))
    solver.step(1000)

Call `init` before you make the solver. Then Caffe's data layers give each rank its own part of the data, and only rank
0 tests and writes snapshots. `multiring caffe train -n 2 --solver FILE` does all of this.
"""

# ruff: noqa: E402 -- check for Caffe before the imports below, which would only report a missing module
from multiring.frontend.requirements import require_framework

require_framework("caffe", "Caffe")

from multiring.caffe import elastic as elastic
from multiring.caffe.joining import init as init
from multiring.caffe.joining import shard as shard
from multiring.caffe.solver_gradients import SolverGradients as SolverGradients
from multiring.caffe.solver_gradients import distribute as distribute
from multiring.caffe.training import train as train
from multiring.frontend.array_collectives import allgather as allgather
from multiring.frontend.array_collectives import allreduce as allreduce
from multiring.frontend.array_collectives import broadcast as broadcast
from multiring.frontend.compression_names import Compression as Compression
from multiring.frontend.errors import HorovodInternalError as HorovodInternalError
from multiring.frontend.evaluation import mean as mean
from multiring.frontend.first_rank import on_first_rank as on_first_rank
from multiring.frontend.first_rank import print_once as print_once
from multiring.frontend.joining import barrier as barrier
from multiring.frontend.lifecycle import is_initialized as is_initialized
from multiring.frontend.lifecycle import local_rank as local_rank
from multiring.frontend.lifecycle import local_size as local_size
from multiring.frontend.lifecycle import rank as rank
from multiring.frontend.lifecycle import shutdown as shutdown
from multiring.frontend.lifecycle import size as size
from multiring.frontend.object_collectives import allgather_object as allgather_object
from multiring.frontend.object_collectives import broadcast_object as broadcast_object
from multiring.frontend.process_sets import ProcessSet as ProcessSet
from multiring.frontend.process_sets import add_process_set as add_process_set
from multiring.frontend.process_sets import global_process_set as global_process_set
from multiring.frontend.process_sets import remove_process_set as remove_process_set

__all__ = [
    "Compression",
    "HorovodInternalError",
    "ProcessSet",
    "SolverGradients",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "distribute",
    "elastic",
    "global_process_set",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mean",
    "on_first_rank",
    "print_once",
    "rank",
    "remove_process_set",
    "shard",
    "shutdown",
    "size",
    "train",
]
