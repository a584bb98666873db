"""init, which also tells Caffe which of how many solvers this process has."""

from typing import Any

import caffe

from multiring.frontend import lifecycle
from multiring.frontend.process_sets import ProcessSet, global_process_set, members_of


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job; see `multiring.frontend.lifecycle.init`.

    It comes before the program makes a solver, on the same thread: what Caffe is told it knows of that thread, and of
    those that its data layers start.

    Caffe is told this process's rank, so that Data layers (LMDB, LevelDB) skip the other ranks' records, and solvers of
    ranks but the first neither test nor write snapshots.
    """
    lifecycle.init(comm, process_sets)
    shard()


def shard(process_set: ProcessSet = global_process_set) -> None:
    """Have the solvers that are made from now on train on this rank's part of the data among the ranks of a set."""
    members = members_of(process_set)
    caffe.set_solver_count(members.size)
    caffe.set_solver_rank(members.rank)
    caffe.set_multiprocess(True)
