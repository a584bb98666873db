"""Prepare the environment of ranks that run a program written for Horovod.

Horovod's launcher sets HOROVOD_RANK, HOROVOD_SIZE and so on for each process. multiring itself only reads the
MULTIRING_* variables. It sets the HOROVOD_* variables for programs that read them.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from multiring._launch.own_modules import module_command
from multiring._settings import HOROVOD_PLACE, environment_of, inherited_environment

# This folder makes `import horovod` mean multiring. Only ranks that use it have the folder on their PYTHONPATH, at the
# front.
PACKAGES = Path(__file__).parents[1] / "horovod" / "onpath"
# Horovod uses "gloo" for a controller that needs no MPI. multiring has no Gloo, so the value is "multiring".
CARRIERS = MappingProxyType({"HOROVOD_CONTROLLER": "multiring", "HOROVOD_CPU_OPERATIONS": "multiring"})

_PLANNER = "the planner chooses the fastest algorithm for the topology (docs/plan.md)"
_NO_CYCLE = "operations start when they are submitted; there is no cycle, and no cache of the ranks' agreements"
_BUCKETS = "gradients are reduced in place, in buckets: DistributedOptimizer(bucket_bytes=)"
_NO_GPU = "multiring moves host memory"
_NO_MPI_CONTROLLER = "with MULTIRING_ENGINE=mpi, MPI only carries bytes; it does not coordinate operations"
_ELASTIC = "options make a job elastic; of the two variables, only multiring horovodrun reads HOROVOD_ELASTIC_TIMEOUT"
# The variables that Horovod reads and multiring ignores, each with the reason.
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
        "HOROVOD_ENABLE_XLA_OPS": "multiring has no operations for XLA; want tf.function without jit_compile",
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
    """A rank's position in Horovod's terms.

    `cross_rank` is the index of the rank's host among the hosts that have this local rank. `cross_size` is the number
    of these hosts.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hostname: str


def positions_on(hosts: Sequence[tuple[str, int]]) -> list[HorovodPosition]:
    """Return the position of each rank.

    Ranks fill the (host, number of ranks) pairs of `hosts` in order.
    """
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
    """Return the variables that make a rank use multiring as Horovod.

    Add them to `environment`.
    """
    told = {variable: str(getattr(place, name)) for name, variable in HOROVOD_PLACE.items()}
    return {**told, **CARRIERS, "PYTHONPATH": path_with_horovod(environment)}


def path_with_horovod(environment: Mapping[str, str]) -> str:
    """Return PYTHONPATH with multiring's `horovod` package at the front."""
    former = environment.get("PYTHONPATH")
    others = former.split(os.pathsep) if former else []
    return os.pathsep.join([str(PACKAGES), *(part for part in others if part != str(PACKAGES))])


def interface_variables(interfaces: str | None) -> dict[str, str]:
    """Return the variables for Horovod's option of network interfaces, such as "eth0" or "eth0,eth1"."""
    if interfaces is None:
        return {}
    return environment_of(**({"rails": interfaces} if "," in interfaces else {"interface": interfaces}))


def ssh_words(port: int | None, identity_file: str | None) -> tuple[str, ...]:
    """Return ssh's words for Horovod's options of a port and a key."""
    return (() if port is None else ("-p", str(port))) + (() if identity_file is None else ("-i", identity_file))


def without_position(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without the variables of an outer job's position.

    These are the HOROVOD_* variables that describe its rank.
    """
    return {name: text for name, text in environment.items() if name not in HOROVOD_PLACE.values()}


def horovod_without_effect(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that Horovod reads and multiring ignores.

    The value of each variable is the reason.

    The default for `environment` is this process's environment.
    """
    source = inherited_environment() if environment is None else environment
    return {name: HOROVOD_IGNORED[name] for name in sorted(source) if name in HOROVOD_IGNORED and source[name]}


def horovod_exec_command(hosts: str, command: Sequence[str]) -> list[str]:
    """Return the command that sets a rank's HOROVOD_* variables and runs `command`.

    mpiexec starts it.

    mpiexec gives all ranks the same environment, but HOROVOD_RANK differs by rank. `hosts` is like `a:4,b:4`.
    """
    return module_command("multiring._launch.horovod_exec", hosts, *command)
