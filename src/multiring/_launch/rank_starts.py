"""Build the starts of the ranks of one host: their environments, CPUs and threads."""

import ctypes
import os
import secrets
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from multiring._launch.commands import environment_of_process
from multiring._launch.cores import cores_of_cpus, share_cpus, thread_variables, usable_cpus
from multiring._launch.horovod import HorovodPosition, horovod_environment, positions_on
from multiring._launch.job import JobOptions
from multiring._launch.job_process import Start
from multiring._runtime.engines.nvml import visible_gpus
from multiring._settings import TORCH_PLACE

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPlace:
    """The place of one host in a job.

    - hosts: the job's hosts with their numbers of ranks. Ranks fill the hosts in order.
    - index: the number of this host in `hosts`.
    - start: the number of this start of the ranks, from 0.
    - job, rendezvous, secret, reports: values of the ranks' settings.
    - threads: the number of threads of each rank.
    - torch_address, torch_port: where torch's store of rank 0 listens, if the user does not choose.
    """

    hosts: tuple[tuple[str, int], ...]
    index: int
    job: str
    rendezvous: str
    reports: str
    secret: str
    threads: int
    torch_address: str
    torch_port: int
    start: int = 0

    @property
    def size(self) -> int:
        """The number of ranks of the job."""
        return sum(count for _, count in self.hosts)

    @property
    def ranks(self) -> range:
        """The ranks of this host."""
        first = sum(count for _, count in self.hosts[: self.index])
        return range(first, first + self.hosts[self.index][1])


def rank_starts(
    command: Sequence[str],
    place: HostPlace,
    options: JobOptions,
    environment: Mapping[str, str],
    stdin_from: int | None = None,
) -> list[Start]:
    """Return the starts of a host's ranks.

    Args:
        command: the command of each rank.
        place: the host's place in the job.
        options: options of the job. `variables` must be in `environment` already.
        environment: the environment to extend for each rank.
        stdin_from: the descriptor for the rank that reads standard input; None means this process's.
    """
    if not place.ranks:
        return []  # a host that has come later, for newcomers
    positions = positions_on(place.hosts)
    die_with_us = dying_with(os.getpid())
    count = len(place.ranks)
    shares = share_cpus(cores_of_cpus(usable_cpus()), count)
    return [
        Start(
            name=f"rank {rank}",
            tag=f"[{rank}] ",
            log_files=options.logs(rank, place.size),
            command=tuple(command),
            environment=environment_of_process(
                environment,
                place.threads,
                rank=rank,
                size=place.size,
                local_rank=local,
                local_size=count,
                rendezvous=place.rendezvous,
                reports=place.reports,
                secret=place.secret,
                job=place.job,
                **({} if options.timeline is None else {"timeline": options.timeline}),
                **({} if options.min_ranks is None else {"min_ranks": options.min_ranks}),
                **({} if options.max_ranks is None else {"intake": rank}),
                **({"record": True} if options.reports_steps else {}),
            )
            | torch_environment(place, local, options.variables)
            | (horovod_environment(environment, positions[rank]) if options.horovod else {}),
            prepare=_preparation(die_with_us, cpus),
            has_stdin=rank == options.stdin_rank,
            stdin_from=stdin_from,
        )
        for local, (rank, cpus) in enumerate(zip(place.ranks, shares, strict=True))
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Newcomer:
    """A process that is started after the job's start.

    - number: its number in the job.
    - local, slots: the number of its place on the host, and the number of the host's places.
    - job, secret: values of its settings, which no other process has.
    """

    number: int
    local: int
    slots: int
    job: str
    secret: str = field(repr=False)


def newcomer_start(
    command: Sequence[str], place: HostPlace, options: JobOptions, environment: Mapping[str, str], newcomer: Newcomer
) -> Start:
    """Return the start of a newcomer on a host. Its variables are those of a rank of the start, but for its place here.

    The arguments are those of `rank_starts`.
    """
    rank = newcomer.number % place.size
    shares = share_cpus(cores_of_cpus(usable_cpus()), newcomer.slots)
    torch = {
        "rank": rank,
        "size": place.size,
        "local_rank": newcomer.local,
        "local_size": newcomer.slots,
        "address": place.torch_address,
        "port": place.torch_port,
    }
    return Start(
        name=f"rank {newcomer.number}",
        tag=f"[{newcomer.number}] ",
        log_files=options.logs(newcomer.number, newcomer.number + 1),
        command=tuple(command),
        environment=environment_of_process(
            environment,
            place.threads,
            rank=rank,
            size=place.size,
            local_rank=newcomer.local,
            local_size=newcomer.slots,
            rendezvous=place.rendezvous,
            reports=place.reports,
            secret=newcomer.secret,
            job=newcomer.job,
            min_ranks=options.min_ranks,
            intake=newcomer.number,
            **({"record": True} if options.reports_steps else {}),
        )
        | {name: options.variables.get(name, str(torch[key])) for key, name in TORCH_PLACE.items()}
        | (horovod_environment(environment, _position_of(newcomer, place, rank)) if options.horovod else {}),
        prepare=_preparation(dying_with(os.getpid()), shares[newcomer.local % newcomer.slots]),
    )


def _position_of(newcomer: Newcomer, place: HostPlace, rank: int) -> HorovodPosition:
    host = place.hosts[place.index][0].rpartition("@")[2]
    position = positions_on(place.hosts)[rank]
    return replace(position, local_rank=newcomer.local, local_size=newcomer.slots, hostname=host)


def torch_environment(place: HostPlace, local: int, chosen: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a host's rank number `local` for torch's `init_process_group`.

    Programs need them if they do not use multiring's own functions.

    Variables in `chosen`, such as the address and the port of torch's store, keep their values.
    """
    values = {
        "rank": place.ranks[local],
        "size": place.size,
        "local_rank": local,
        "local_size": len(place.ranks),
        "address": place.torch_address,
        "port": place.torch_port,
    }
    return {name: chosen.get(name, str(values[key])) for key, name in TORCH_PLACE.items()}


def shares_told(ranks: int, cpus: int, threads: int, environment: Mapping[str, str]) -> list[str]:
    """Return messages about what the ranks of a host share.

    Args:
        ranks: the number of ranks on the host.
        cpus: the number of CPUs.
        threads: the number of threads of each rank.
        environment: the environment of the ranks.
    """
    said = []
    if ranks > 1 and thread_variables(environment, threads):  # the user has not chosen a number of threads
        share = f"{ranks} ranks share {cpus} CPUs" if ranks > cpus else f"each of the {ranks} ranks has CPUs of its own"
        many = "1 thread" if threads == 1 else f"{threads} threads"
        said.append(f"{share}, and each computes with {many}; set OMP_NUM_THREADS for another number")
    gpus = visible_gpus(environment)
    if 0 < gpus < ranks:
        many = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        own = f"-n {gpus} gives each rank a GPU of its own"
        untried = " (several GPUs: verified on stand-ins only)" if gpus > 1 else ""
        said.append(f"{ranks} ranks share {many} of this host; {own}{untried}")
    return said


def free_port(address: str = "127.0.0.1", ports: tuple[int, int] | None = None) -> int:
    """Return a TCP port that is free at `address`, on which rank 0 may listen later.

    Args:
        address: an address of this host.
        ports: the first and the last port to choose from; None or a first port of 0 means any port.

    Raises:
        OSError: `address` is not this host's, or no port of `ports` is free.
    """
    first, last = ports or (0, 0)
    count = last - first + 1 if first else 1
    begin = secrets.randbelow(count)
    refusal: OSError | None = None
    for step in range(count):
        port = first + (begin + step) % count if first else 0
        try:
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, port))
                return int(probe.getsockname()[1])
        except OSError as error:
            refusal = error
    raise refusal or OSError("no port")


def _preparation(die_with_us: Callable[[], None], cpus: frozenset[int]) -> Callable[[], None]:
    def prepare() -> None:
        die_with_us()
        os.sched_setaffinity(0, cpus)

    return prepare


def die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent process ends.

    `parent` is the ID of the process that started this one.
    """
    dying_with(parent)()


def dying_with(parent: int) -> Callable[[], None]:
    """Return a function that makes the kernel kill a child of `parent` when `parent` ends.

    The child calls the function, possibly between fork and exec.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def die_with_parent() -> None:
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0 or os.getppid() != parent:
            os._exit(1)  # the parent died before prctl took effect

    return die_with_parent
