"""multiring caffe: run `caffe train` on several ranks of this machine, from the same solver file.

Gradients are averaged as `caffe train --gpu 0,1` does. Each rank has a batch of the size in the net's file, and
reads its part of a database. Rank 0 runs the tests and writes the snapshots. The command needs pycaffe.
"""

import argparse
import importlib.util
import sys

from multiring._cli.number_option import COUNT, RANKS
from multiring._cli.run import start
from multiring._launch import JobOptions
from multiring._schedule import WIRES
from multiring.errors import ArgumentError, UnsupportedError

_ACTIONS = ("train",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("action", metavar="train", help="what to do: train")
    parser.add_argument("--solver", "-solver", metavar="FILE", help="the solver's prototxt")
    parser.add_argument("--snapshot", "-snapshot", metavar="FILE", help="a .solverstate to resume from")
    parser.add_argument("--weights", "-weights", metavar="FILE,...", help=".caffemodel files with initial weights")
    parser.add_argument("--iterations", "-iterations", type=COUNT, metavar="N", help="default: max_iter of the solver")
    parser.add_argument("--gpu", "-gpu", metavar="ID", help="refused: multiring works in host memory only")
    parser.add_argument("-n", "--ranks", type=RANKS, default=1, metavar="N", help="number of ranks (default 1)")
    parser.add_argument("--wire", metavar="TYPE", help=f"type of gradients between hosts: {', '.join(WIRES)}")


def run(arguments: argparse.Namespace) -> int:
    """Start the ranks and return the job's exit code."""
    if arguments.action not in _ACTIONS:
        raise ArgumentError(f"multiring caffe {arguments.action}: want train; for other actions use caffe itself")
    if not arguments.solver:
        raise ArgumentError("multiring caffe train: want --solver FILE, as caffe does")
    if arguments.gpu:
        raise UnsupportedError(f"--gpu {arguments.gpu}: multiring uses host memory only; give -n RANKS instead")
    if importlib.util.find_spec("caffe") is None:
        raise ArgumentError("this Python has no pycaffe: `import caffe` finds no module; see docs/caffe.md")
    command = [sys.executable, "-m", "multiring.caffe", "--solver", arguments.solver]
    for name in ("snapshot", "weights", "iterations", "wire"):
        value = getattr(arguments, name)
        if value is not None:
            command += [f"--{name}", str(value)]
    return start(command, arguments.ranks, None, JobOptions())
