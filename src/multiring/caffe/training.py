"""train: what the `caffe train` command does, on every rank."""

from collections.abc import Sequence
from pathlib import Path

import caffe

from multiring.caffe.joining import init
from multiring.caffe.solver_gradients import distribute
from multiring.errors import ArgumentError
from multiring.frontend.lifecycle import shutdown


def train(
    solver_file: str,
    *,
    snapshot: str | None = None,
    weights: Sequence[str] = (),
    iterations: int | None = None,
    wire: str | None = None,
) -> None:
    """Train as a solver's file says, on all ranks; rank 0 tests, and writes the snapshots.

    Args:
        solver_file: the solver's prototxt.
        snapshot: a .solverstate to go on from, which every rank reads.
        weights: .caffemodel files to begin with; they do not go with `snapshot`.
        iterations: by default max_iter of the file.
        wire: how gradients travel between hosts; see `distribute`.

    Raises:
        ArgumentError: a file is not there; snapshot and weights.
    """
    if snapshot and weights:
        raise ArgumentError(
            "snapshot and weights: give a snapshot to resume training, or weights to finetune, not both"
        )
    for name in (solver_file, *([snapshot] if snapshot else []), *weights):
        if not Path(name).is_file():
            raise ArgumentError(f"there is no file {name}; want one that every rank can read")
    init()
    caffe.set_mode_cpu()
    solver = caffe.get_solver(solver_file)
    if snapshot:
        solver.restore(snapshot)
    for name in weights:
        solver.net.copy_from(name)
    distribute(solver, wire=wire)
    if iterations is not None:
        solver.step(iterations)
    else:
        solver.solve()  # which ends with a snapshot and a test; both are rank 0's
    shutdown()
