"""What a program written for Horovod is told of its place, and which package it gets when it imports horovod.

Horovod's launcher tells a process where it is in HOROVOD_RANK, HOROVOD_SIZE and so on. Ranks of multiring find
each other by MULTIRING_* alone; these are for programs that read them.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from multiring.settings import HOROVOD_PLACE, inherited_environment

# Put first on a rank's PYTHONPATH, this folder makes `import horovod` mean multiring; it is on nobody else's path.
PACKAGES = Path(__file__).parents[1] / "horovod" / "onpath"
# Horovod's word for a controller that needs no MPI is gloo; there is no Gloo here, and none is claimed.
CARRIERS = MappingProxyType({"HOROVOD_CONTROLLER": "multiring", "HOROVOD_CPU_OPERATIONS": "multiring"})

_PLANNER = "the planner chooses what is cheapest on the topology (docs/plan.md)"
_NO_CYCLE = "operations start when they are submitted; there is no cycle, and what ranks agree on is not cached"
_BUCKETS = "gradients are reduced where they lie, in buckets: DistributedOptimizer(bucket_bytes=)"
_NO_GPU = "multiring moves host memory"
_NO_MPI_CONTROLLER = "MPI carries bytes with MULTIRING_ENGINE=mpi, and decides nothing"
_ELASTIC = "the number of ranks is fixed"
# What Horovod reads while it runs and multiring does not, and why.
HOROVOD_IGNORED = MappingProxyType(
    {
        "HOROVOD_ADASUM_MPI_CHUNK_SIZE": _NO_MPI_CONTROLLER,
        "HOROVOD_AUTOTUNE": _PLANNER,
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": _PLANNER,
        "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": _PLANNER,
        "HOROVOD_AUTOTUNE_LOG": _PLANNER,
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": _PLANNER,
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": _PLANNER,
        "HOROVOD_BATCH_D2D_MEMCOPIES": _NO_GPU,
        "HOROVOD_CACHE_CAPACITY": _NO_CYCLE,
        "HOROVOD_CCL_BGT_AFFINITY": "oneCCL is not used",
        "HOROVOD_CCL_CACHE": "oneCCL is not used",
        "HOROVOD_CYCLE_TIME": _NO_CYCLE,
        "HOROVOD_DISABLE_GROUP_FUSION": _BUCKETS,
        "HOROVOD_DISABLE_NVTX_RANGES": _NO_GPU,
        "HOROVOD_ELASTIC": _ELASTIC,
        "HOROVOD_ELASTIC_TIMEOUT": _ELASTIC,
        "HOROVOD_ENABLE_ASYNC_COMPLETION": _NO_GPU,
        "HOROVOD_ENABLE_XLA_OPS": "XLA has no operations of multiring's; want tf.function without jit_compile",
        "HOROVOD_FUSION_THRESHOLD": _BUCKETS,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "ranks meet at MULTIRING_RENDEZVOUS",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "ranks meet at MULTIRING_RENDEZVOUS",
        "HOROVOD_HIERARCHICAL_ALLGATHER": _PLANNER,
        "HOROVOD_HIERARCHICAL_ALLREDUCE": _PLANNER,
        "HOROVOD_LOG_HIDE_TIME": "messages go to Python's logger `multiring`",
        "HOROVOD_LOG_LEVEL": "messages go to Python's logger `multiring`",
        "HOROVOD_MPI_THREADS_DISABLE": _NO_MPI_CONTROLLER,
        "HOROVOD_NUM_NCCL_STREAMS": _NO_GPU,
        "HOROVOD_SECRET_KEY": "MULTIRING_SECRET, or a secret made for each job",
        "HOROVOD_START_TIMEOUT": "ranks are started at once; HOROVOD_GLOO_TIMEOUT_SECONDS bounds how long init waits",
        "HOROVOD_THREAD_AFFINITY": "the launcher gives each rank its cores",
        "HOROVOD_TORUS_ALLREDUCE": _PLANNER,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HorovodPosition:
    """Where a rank is. A cross rank counts the hosts that have this local rank, in their order."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hostname: str


def positions_on(hosts: Sequence[tuple[str, int]]) -> list[HorovodPosition]:
    """Return the place of each rank where ranks fill the (host, ranks) of `hosts` in that order."""
    size = sum(count for _, count in hosts)
    places: list[HorovodPosition] = []
    for index, (name, count) in enumerate(hosts):
        for local in range(count):
            sharing = [number for number, (_, others) in enumerate(hosts) if others > local]
            places.append(
                HorovodPosition(
                    rank=len(places),
                    size=size,
                    local_rank=local,
                    local_size=count,
                    cross_rank=sharing.index(index),
                    cross_size=len(sharing),
                    hostname=name.rpartition("@")[2],
                )
            )
    return places


def horovod_environment(environment: Mapping[str, str], place: HorovodPosition) -> dict[str, str]:
    """Return what a rank needs besides `environment` to take multiring for Horovod."""
    told = {variable: str(getattr(place, name)) for name, variable in HOROVOD_PLACE.items()}
    return {**told, **CARRIERS, "PYTHONPATH": path_with_horovod(environment)}


def path_with_horovod(environment: Mapping[str, str]) -> str:
    """Return `environment`'s PYTHONPATH with multiring's horovod first, and once."""
    former = environment.get("PYTHONPATH")
    others = former.split(os.pathsep) if former else []
    return os.pathsep.join([str(PACKAGES), *(part for part in others if part != str(PACKAGES))])


def without_position(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` less what an outer job's launcher says of its rank's place, under Horovod's names."""
    return {name: text for name, text in environment.items() if name not in HOROVOD_PLACE.values()}


def horovod_without_effect(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables in `environment` (default: this process's) that steer Horovod and nothing here, with why."""
    source = inherited_environment() if environment is None else environment
    return {name: HOROVOD_IGNORED[name] for name in sorted(source) if name in HOROVOD_IGNORED and source[name]}


def horovod_exec_command(hosts: str, command: Sequence[str]) -> list[str]:
    """Return what mpiexec is to start on each rank of `hosts` (`a:4,b:4`) so that `command` is told of its place.

    mpiexec gives all ranks one environment, and HOROVOD_RANK differs.
    """
    return [sys.executable, "-m", "multiring.launch.horovod_exec", hosts, *command]
