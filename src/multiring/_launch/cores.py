"""Assign cores to the ranks of this host, and choose their number of threads."""

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

_CPU_ROOT = Path("/sys/devices/system/cpu")
# All these libraries fall back to OpenMP's variable, so its value decides for all of them.
_THREADS = "OMP_NUM_THREADS"
_MORE_THREADS = ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

Core = tuple[int, int]  # (package, core in the package); several CPUs (hardware threads) may share a core


def cores_of_cpus(cpus: Sequence[int], root: Path = _CPU_ROOT) -> dict[int, Core]:
    """Return the physical core of each of `cpus`.

    A CPU without topology information counts as a core of its own.
    """
    return {cpu: _core_of_cpu(cpu, root) for cpu in cpus}


def _core_of_cpu(cpu: int, root: Path) -> Core:
    topology = root / f"cpu{cpu}" / "topology"
    try:
        package = int((topology / "physical_package_id").read_text(encoding="ascii"))
        return package, int((topology / "core_id").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0, cpu


def share_cpus(core_of: Mapping[int, Core], ranks: int) -> list[frozenset[int]]:
    """Split the CPUs into one disjoint set of neighbouring CPUs for each rank.

    Every CPU is used. If there are more ranks than CPUs, every rank gets all CPUs. Hardware threads of one core stay
    together if the numbers of CPUs and ranks allow it.
    """
    ordered = sorted(core_of, key=lambda cpu: (core_of[cpu], cpu))
    if ranks > len(ordered):
        return [frozenset(ordered)] * ranks
    cuts = [rank * len(ordered) // ranks for rank in range(ranks + 1)]
    return [frozenset(ordered[first:end]) for first, end in pairwise(cuts)]


def threads_per_rank(core_of: Mapping[int, Core], ranks: int, limit: float | None = None) -> int:
    """Return the number of threads for each rank.

    It is the number of physical cores in the smallest share, or less if the ranks may not use all CPUs' time: with more
    threads than that, the system would stop all of them for a part of the time.

    All ranks get the same number, because the number of threads can change floating-point results.

    Args:
        core_of: the physical core of each CPU.
        ranks: the number of ranks on this host.
        limit: the number of CPUs whose time the ranks may use (`cpu_limit`), or None for all.
    """
    if ranks > len(core_of):
        return 1
    most = min(len({core_of[cpu] for cpu in share}) for share in share_cpus(core_of, ranks))
    return most if limit is None else max(min(most, int(limit / ranks)), 1)


def thread_variables(environment: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return the variables that make numerical libraries use `threads`.

    Variables that `environment` sets already are left out.
    """
    if _THREADS in environment:
        return {}
    return {name: str(threads) for name in (_THREADS, *_MORE_THREADS) if name not in environment}


def usable_cpus() -> list[int]:
    """Return the numbers of the CPUs that this process may run on."""
    return sorted(os.sched_getaffinity(0))
