"""Run one cell of the table of helpers and meshes, for main.py."""

from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from benchmarks.evidence.parallel.helpers import cells, fault_of
from benchmarks.evidence.parallel.models import joined
from benchmarks.evidence.support.cases import Fault, Random


def helper_case(random: Random, folder: Path) -> Iterator[Fault]:
    """Run a random helper under a random mesh in a random kind of loop."""
    joined()
    every = list(cells(dist.get_world_size()))
    name, mesh, kind = every[int(random.integers(len(every)))]
    found = fault_of(name, mesh, kind, folder)
    if found:
        yield Fault(f"helper {name}: {kind}", found)
