"""Run one cell of the table of helpers and meshes, for evidence_parallel.py."""

from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from benchmarks.evidence_cases import Fault, Random
from benchmarks.evidence_parallel_helpers import cells, fault_of
from benchmarks.evidence_parallel_models import joined


def helper_case(random: Random, folder: Path) -> Iterator[Fault]:
    """Run a random helper under a random mesh in a random kind of loop."""
    joined()
    every = list(cells(dist.get_world_size()))
    name, mesh, kind = every[int(random.integers(len(every)))]
    found = fault_of(name, mesh, kind, folder)
    if found:
        yield Fault(f"helper {name}: {kind}", found)
