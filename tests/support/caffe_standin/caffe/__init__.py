"""A NumPy stand-in for pycaffe 1.0, as far as multiring's code and tests use it.

Solvers and nets compute in the same order as Caffe's. Files are in Caffe's text format. Only the layers of
`caffe.layers` exist, and a net must list its layers in the order of computation. Names that pycaffe does not have
begin with `standin_`.
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
