"""Place the ranks of a job on the workers of a cluster (Ray, Dask, Spark), and build each rank's variables.

All ranks of a host have consecutive numbers, and rank 0 is on the first worker. This module only computes: it reads no
environment and talks to no worker.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from multiring._launch.horovod import HorovodPosition, positions_on, without_position
from multiring._settings import TORCH_PLACE, environment_of
from multiring.errors import ArgumentError, LaunchError

# Variables of the driver that the ranks get, too. The others belong to the driver's host.
_HANDED_ON = ("MULTIRING_", "HOROVOD_", "OMP_NUM_THREADS")
_MOST_START_S = 1e7  # 116 days; a timer of Python refuses an endless time


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFacts:
    """What a worker reports about itself.

    - name: the name of the worker in the framework's own words, for messages.
    - host: `host_id()` of the worker.
    - hostname: the name of its host.
    - version: its version of multiring, or the error of its import.
    - python: its version of Python, such as "3.11".
    """

    name: str
    host: str
    hostname: str
    version: str
    python: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterRendezvous:
    """Where the ranks of a job meet, and the job's secret.

    - rendezvous: `host:port` on rank 0's host, or `@name` if all ranks are on one host.
    - secret: the secret of the job.
    - job: the name of the job.
    - torch_address, torch_port: where rank 0 of torch's own store listens.
    """

    rendezvous: str
    secret: str
    job: str
    torch_address: str
    torch_port: int

    def __repr__(self) -> str:
        return f"ClusterRendezvous(job={self.job!r}, rendezvous={self.rendezvous!r})"  # the secret is in no message


def check_workers(count: object) -> int:
    """Return the number of ranks that a user has asked for.

    Raises:
        ArgumentError: `count` is not a positive integer.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ArgumentError(f"{count!r} workers: want an integer, at least 1")
    return count


def check_start_timeout(seconds: object) -> float:
    """Return the seconds that a cluster may take to start a job, as a user has given them.

    Raises:
        ArgumentError: it is not a number above 0 that a timer can take.
    """
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 < seconds <= _MOST_START_S:
        raise ArgumentError(f"start_timeout_s={seconds!r}: want a number of seconds above 0, at most {_MOST_START_S:g}")
    return float(seconds)


def check_function(function: object) -> None:
    """Raise ArgumentError if `function` cannot be called."""
    if not callable(function):
        raise ArgumentError(f"{function!r} is not a function: want the function itself, not its result")


def check_release(framework: str, found: str, wanted: tuple[int, int]) -> None:
    """Raise LaunchError if the release `found` of a framework is older than `wanted`."""
    numbers = [int(number) for number in re.findall(r"^\d+|(?<=\.)\d+", found)[:2]]
    if tuple(numbers) < wanted:
        raise LaunchError(
            f"{framework} {found} is too old: want {wanted[0]}.{wanted[1]} or newer; "
            f"pip install '{framework.lower()}>={wanted[0]}.{wanted[1]}' on every host"
        )


def check_versions(workers: Iterable[WorkerFacts], version: str, python: str) -> None:
    """Raise LaunchError if a worker has another version of multiring or Python than this process.

    Args:
        workers: what the workers report.
        version: this process's version of multiring.
        python: this process's version of Python.
    """
    for worker in workers:
        if worker.version != version:
            raise LaunchError(
                f"{worker.name} on {worker.hostname} has multiring {worker.version}, this process has {version}: "
                "install the same version on every host"
            )
        if worker.python != python:
            raise LaunchError(
                f"{worker.name} on {worker.hostname} has Python {worker.python}, this process has {python}: functions "
                "are sent as bytecode, so use the same version on every host"
            )


def rank_order(hosts: Sequence[str]) -> list[int]:
    """Return the indices of the workers in the order of their ranks.

    Workers of one host get consecutive ranks. Hosts, and the workers of a host, keep the order of `hosts`, which has
    the host of each worker.
    """
    first = {host: index for index, host in reversed(list(enumerate(hosts)))}
    return sorted(range(len(hosts)), key=lambda index: (first[hosts[index]], index))


def positions_of(workers: Sequence[WorkerFacts]) -> list[HorovodPosition]:
    """Return the position of each rank; `workers` are in the order of their ranks."""
    runs = [list(run) for _, run in groupby(workers, key=lambda worker: worker.host)]
    return positions_on([(run[0].hostname, len(run)) for run in runs])


def slots_by_worker(free: Mapping[str, int], hosts: Mapping[str, str], ranks: int) -> list[str]:
    """Choose a worker for each rank and return the workers' names in the order of the ranks.

    The ranks are spread over the workers as evenly as the free slots allow.

    Args:
        free: the number of free slots of each worker.
        hosts: the host of each worker.
        ranks: the number of ranks, at most the number of slots.
    """
    taken = dict.fromkeys(free, 0)
    for _ in range(ranks):
        most = min((name for name in free if taken[name] < free[name]), key=lambda name: taken[name])
        taken[most] += 1
    names = [name for name in free for _ in range(taken[name])]
    return [names[index] for index in rank_order([hosts[name] for name in names])]


def rank_variables(position: HorovodPosition, place: ClusterRendezvous) -> dict[str, str]:
    """Return the variables of a rank, without the secret.

    They are multiring's own, and torchrun's for programs that call `torch.distributed.init_process_group`.
    """
    numbers = {
        "rank": position.rank,
        "size": position.size,
        "local_rank": position.local_rank,
        "local_size": position.local_size,
    }
    torch = {**numbers, "address": place.torch_address, "port": place.torch_port}
    return {
        **environment_of(**numbers, rendezvous=place.rendezvous, job=place.job),
        **{name: str(torch[key]) for key, name in TORCH_PLACE.items()},
    }


def variables_to_hand_on(environment: Mapping[str, str], chosen: Mapping[str, str]) -> dict[str, str]:
    """Return the driver's variables that apply to all ranks.

    Args:
        environment: the driver's environment.
        chosen: variables that the user sets for the ranks.
    """
    own = environment_of(
        rank=0, size=1, local_rank=0, local_size=1, rendezvous="", secret="", secret_file="", job="", rank_process="",
        launched_in="",
    )  # fmt: skip
    handed = {name: text for name, text in without_position(environment).items() if name.startswith(_HANDED_ON)}
    return {name: text for name, text in handed.items() if name not in own} | dict(chosen)
