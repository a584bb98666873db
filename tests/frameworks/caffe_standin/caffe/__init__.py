"""A stand-in for pycaffe 1.0: what multiring.caffe and its tests use of it, on NumPy, in the order of Caffe's work.

Files are of Caffe's text format; the layers are those below, in nets whose layers are listed in their order. What it
has beyond pycaffe begins with `standin_`.
"""

from caffe.nets import Blob, Net
from caffe.prototxt import read
from caffe.settings import (
    set_mode_cpu,
    set_multiprocess,
    set_solver_count,
    set_solver_rank,
    solver_count,
    solver_rank,
)
from caffe.solvers import SGDSolver, get_solver

TRAIN, TEST = 0, 1
standin = True
__version__ = "1.0.0"

__all__ = [
    "TEST",
    "TRAIN",
    "Blob",
    "Net",
    "SGDSolver",
    "get_solver",
    "read",
    "set_mode_cpu",
    "set_multiprocess",
    "set_solver_count",
    "set_solver_rank",
    "solver_count",
    "solver_rank",
]
