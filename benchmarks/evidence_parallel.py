"""Random parallel models and loops held against one process in float64.

    python benchmarks/evidence_parallel.py [--seconds 1800] [--seed 1] [--only models,loops] [--again]

`models`: of every kind that trips a mix: operations in place, buffers assigned anew, unused and tied parameters, layers
used past their forward, batch norm, keywords, several inputs. `loops`: accumulation, clipping, optimizers, averages,
lag and checkpoints under each mix. `optimizers`: two of them on uneven batches of `distribute`, and the noise scale of
accumulated steps. `helpers`: each public helper under each mesh in each kind of loop, as evidence_parallel_helpers.py
has them. Losses, weights, buffers and figures are those of one process, or there is a refusal by name.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # lets this script import from the repository root

from benchmarks.evidence_cases import Family, Fault, Random, Topic, main


def _of(name: str) -> Callable[[Random, Path], Iterator[Fault]]:
    def run(random: Random, folder: Path) -> Iterator[Fault]:
        from benchmarks import evidence_parallel_loops, evidence_parallel_models  # noqa: PLC0415 -- in ranks alone
        from benchmarks.evidence_parallel_table import helper_case  # noqa: PLC0415 -- the same

        cases: dict[str, Any] = {
            "models": evidence_parallel_models.model_case,
            "loops": evidence_parallel_loops.loop_case,
            "optimizers": evidence_parallel_loops.optimizers_case,
            "helpers": helper_case,
        }
        yield from cases[name](random, folder)

    return run


AIMS = {
    "models": ("05", "07", "16", "17", "18", "20"),
    "loops": ("01", "02", "04", "09"),
    "optimizers": ("03", "15"),
    "helpers": ("02", "04"),  # and what has no program: it needs what later commits have
}


def families(ranks: int = 2) -> list[Family]:
    """Return the families, each on so many ranks."""
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

TOPIC = Topic(name="parallel", program="evidence_parallel.py", families=families(), shows=SHOWS)


if __name__ == "__main__":
    raise SystemExit(main(TOPIC))
