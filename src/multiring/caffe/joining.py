"""Join the job, and set Caffe's solver rank and solver count."""

from typing import Any

import caffe

from multiring._frontend import lifecycle
from multiring._frontend.process_sets import ProcessSet, global_process_set, members_of


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job; see `multiring._frontend.lifecycle.init`.

    Call it before the program makes a solver, on the same thread. Caffe stores the rank for this thread and for the
    threads that its data layers start.

    Because Caffe gets this process's rank, Data layers (LMDB, LevelDB) skip other ranks' records. Only the solver of
    rank 0 tests and writes snapshots.
    """
    lifecycle.init(comm, process_sets)
    set_solver_rank()


def set_solver_rank(process_set: ProcessSet = global_process_set) -> None:
    """Make later solvers train on this rank's part of the data.

    The ranks of `process_set` share the data. The setting holds for the calling thread.
    """
    members = members_of(process_set)
    caffe.set_solver_count(members.size)
    caffe.set_solver_rank(members.rank)
    caffe.set_multiprocess(True)
