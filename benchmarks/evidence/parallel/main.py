"""Compare random parallel models and training loops with one process in float64.

    python benchmarks/evidence/parallel/main.py [--seconds 1800] [--seed 1] [--only models,loops] [--again]

- `models` draws models with features that break a parallelism: in-place operations, reassigned buffers, unused and tied
  parameters, layers used without their forward, batch norm, keyword arguments, several inputs.
- `loops` combines accumulation, clipping, optimizers, averages, gradient lag and checkpoints under each parallelism.
- `optimizers` runs two optimizers on uneven batches of `distribute`, and measures the noise scale of accumulated steps.
- `helpers` runs each public helper under each mesh in each kind of loop (see helpers.py).

Losses, weights, buffers and reported values must be those of one process, or an error must name the unsupported
feature.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.support.cases import Family, Fault, Random, Topic, main


def _of(name: str) -> Callable[[Random, Path], Iterator[Fault]]:
    def run(random: Random, folder: Path) -> Iterator[Fault]:
        from benchmarks.evidence.parallel import loops, models  # noqa: PLC0415 -- in ranks alone
        from benchmarks.evidence.parallel.table import helper_case  # noqa: PLC0415 -- the same

        cases: dict[str, Any] = {
            "models": models.model_case,
            "loops": loops.loop_case,
            "optimizers": loops.optimizers_case,
            "helpers": helper_case,
        }
        yield from cases[name](random, folder)

    return run


AIMS = {
    "models": ("05", "07", "16", "17", "18", "20"),
    "loops": ("01", "02", "04", "09"),
    "optimizers": ("03", "15"),
    # The other helpers have no faulty program, because the programs' commits are older than those helpers.
    "helpers": ("02", "04"),
}


def families(ranks: int = 2) -> list[Family]:
    """Return the families for a number of ranks."""
    return [
        Family(name=name, run=_of(name), ranks=ranks, deadline_s=90.0, aims=[f"torch_{each}.py" for each in aims])
        for name, aims in AIMS.items()
    ]


SHOWS = {
    "torch_01.py": ("checkpoint, pipeline:",),
    "torch_02.py": ("accumulation, pipeline: weights differ",),
    "torch_03.py": ("two optimizers: weights differ",),
    "torch_04.py": ("clipping, pipeline: weights differ", "clipping, tensor: RuntimeError"),
    "torch_05.py": ("tied: RuntimeError",),
    "torch_07.py": ("buffers: changed by parallelize",),
    "torch_09.py": ("checkpoint, shard: RuntimeError", "checkpoint, tensor: RuntimeError"),
    "torch_15.py": ("noise scale: batch of an accumulated step",),
    "torch_16.py": ("in place: RuntimeError",),
    "torch_17.py": ("unused: RuntimeError",),
    "torch_18.py": ("past forward: RuntimeError",),
    "torch_20.py": ("batch norm: losses differ",),
}

TOPIC = Topic(name="parallel", program="evidence/parallel/main.py", families=families(), shows=SHOWS)


if __name__ == "__main__":
    raise SystemExit(main(TOPIC))
