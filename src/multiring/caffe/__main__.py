"""A rank of `multiring caffe train`.

Other launchers: `mpiexec -n 8 python -m multiring.caffe --solver FILE`.
"""

import argparse

from multiring.caffe.training import train

parser = argparse.ArgumentParser(prog="python -m multiring.caffe", description="Train with a solver file.")
parser.add_argument("--solver", required=True)
parser.add_argument("--snapshot")
parser.add_argument("--weights", default="")
parser.add_argument("--iterations", type=int)
parser.add_argument("--wire")
options = parser.parse_args()
train(
    options.solver,
    snapshot=options.snapshot,
    weights=[each for each in options.weights.split(",") if each],
    iterations=options.iterations,
    compression=options.wire,
)
