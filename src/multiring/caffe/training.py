"""train: do the work of the `caffe train` command on every rank."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import caffe

from multiring._frontend.compression_names import Compression
from multiring._frontend.former_arguments import former_arguments
from multiring._frontend.lifecycle import shutdown
from multiring.caffe.joining import init
from multiring.caffe.solver_gradients import distribute
from multiring.errors import ArgumentError


@former_arguments(wire="compression")
def train(
    solver_file: str,
    *,
    snapshot: str | None = None,
    weights: Sequence[str] = (),
    iterations: int | None = None,
    compression: Any = Compression.none,
) -> None:
    """Train with the solver of a file on all ranks.

    Rank 0 tests and writes the snapshots.

    Args:
        solver_file: the solver's prototxt.
        snapshot: a .solverstate to resume from; every rank must be able to read it.
        weights: .caffemodel files with initial weights. They cannot be combined with `snapshot`.
        iterations: the number of iterations, default: max_iter of the file.
        compression: the type of gradients between hosts; see `distribute`.

    Raises:
        ArgumentError: a file does not exist, or both `snapshot` and `weights` are given.
    """
    if snapshot and weights:
        raise ArgumentError(
            "snapshot and weights are both given: want a snapshot to resume training, or weights to finetune, not both"
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
    distribute(solver, compression=compression)
    if iterations is not None:
        solver.step(iterations)
    else:
        solver.solve()  # ends with a snapshot and a test on rank 0
    shutdown()
