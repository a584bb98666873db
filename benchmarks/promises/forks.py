"""Measure forks of a process with large buckets, and the memory of a later step.

    multiring run -n 2 -- python benchmarks/promises/forks.py [--gib 1]

Each rank has buckets of the given size, first in ordinary memory that the backend reduces, then in the arena
(`shared_zeros_like`). For comparison, a program without multiring runs the same steps. The floors are 0.5 s for eight
forks, and 1.1 times the memory that the program without multiring adds.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))  # lets this script import from the repository root

from benchmarks.evidence.support.claims import commit, machine

import multiring.torch as mt

FORKS, FLOOR_S, FLOOR_RATIO = 8, 0.5, 1.1


def main() -> int:
    """Print a line for each kind of memory; return 1 if a floor is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the buckets of each rank (1)")
    count = int(parser.parse_args().gib * (1 << 28))
    plain = measured(torch.ones(count), lambda tensor: tensor.mul_(0.5))
    dist.init_process_group("multiring")
    ordinary = measured(torch.ones(count), dist.all_reduce)
    mt.init()
    (bucket,) = mt.shared_zeros_like([torch.empty(count)])
    arena = measured(bucket.fill_(1), dist.all_reduce)
    is_right = True
    if dist.get_rank() == 0:
        print(f"`multiring run -n {dist.get_world_size()} -- python {' '.join(sys.argv)}` at {commit()}, {machine()}")
        for name, (forks_s, added) in {"no multiring": plain, "reduced": ordinary, "arena": arena}.items():
            ratio = added / max(1, plain[1])
            holds = forks_s <= FLOOR_S and ratio <= FLOOR_RATIO
            is_right &= holds
            print(
                f"{'holds' if holds else 'MISSED'}: {name}: {FORKS} forks in {forks_s * 1e3:.0f} ms; a step then adds "
                f"{added / (1 << 20):.0f} MiB, {ratio:.2f} times"
            )
    dist.barrier()
    dist.destroy_process_group()
    return 0 if is_right else 1


def measured(tensor: torch.Tensor, step: object) -> tuple[float, int]:
    """Return the seconds that eight forks take, and the bytes that a step then adds.

    The step runs while the children live. The bytes are those of the whole machine.
    """
    step(tensor)  # type: ignore[operator] # of the three above
    children = []
    began = time.perf_counter()
    for _ in range(FORKS):
        child = os.fork()
        if not child:
            signal.pause()
            os._exit(0)
        children.append(child)
    forks_s = time.perf_counter() - began
    before = used()
    step(tensor)  # type: ignore[operator] # as above
    added = used() - before
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return forks_s, added


def used() -> int:
    """Return the bytes of this machine's memory in use."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return (int(lines["MemTotal"].split()[0]) - int(lines["MemAvailable"].split()[0])) << 10


if __name__ == "__main__":
    sys.exit(main())
