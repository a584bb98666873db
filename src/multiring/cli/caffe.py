"""multiring caffe: `caffe train` on several ranks of this machine, from the same solver's file.

Gradients are averaged as `caffe train --gpu 0,1` does: each rank has a batch of the size that the net's file says, and
its part of a database. Rank 0 tests, and writes the snapshots. It needs pycaffe.
"""

import argparse
import importlib.util
import sys

from multiring.cli.run import start
from multiring.errors import ArgumentError, UnsupportedError
from multiring.launch import JobOptions

_ACTIONS = ("train",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("action", metavar="train", help="what to do: train")
    parser.add_argument("--solver", "-solver", metavar="FILE", help="the solver's prototxt")
    parser.add_argument("--snapshot", "-snapshot", metavar="FILE", help="a .solverstate to go on from")
    parser.add_argument("--weights", "-weights", metavar="FILE,...", help="a .caffemodel to begin with")
    parser.add_argument("--iterations", "-iterations", type=int, metavar="N", help="by default max_iter of the solver")
    parser.add_argument("--gpu", "-gpu", metavar="ID", help="refused: multiring moves host memory")
    parser.add_argument("-n", "--ranks", type=int, default=1, metavar="N", help="how many ranks (default 1)")
    parser.add_argument("--wire", metavar="TYPE", help="fp16, bf16 or int8: how gradients travel between hosts")


def run(arguments: argparse.Namespace) -> int:
    """Start the ranks, and return the job's exit code."""
    if arguments.action not in _ACTIONS:
        raise ArgumentError(f"multiring caffe {arguments.action}: want train; the others have no ranks: caffe itself")
    if not arguments.solver:
        raise ArgumentError("multiring caffe train: want --solver FILE, as caffe does")
    if arguments.gpu:
        raise UnsupportedError(f"--gpu {arguments.gpu}: multiring moves host memory; leave it out, and give -n RANKS")
    if arguments.ranks < 1:
        raise ArgumentError(f"-n {arguments.ranks}: want an integer >= 1")
    if importlib.util.find_spec("caffe") is None:
        raise ArgumentError("there is no pycaffe for this Python: `import caffe` finds nothing; see docs/caffe.md")
    command = [sys.executable, "-m", "multiring.caffe", "--solver", arguments.solver]
    for name in ("snapshot", "weights", "iterations", "wire"):
        value = getattr(arguments, name)
        if value is not None:
            command += [f"--{name}", str(value)]
    return start(command, arguments.ranks, None, JobOptions())
