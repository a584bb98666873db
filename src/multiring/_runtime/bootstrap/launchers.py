"""Determine this process's rank from the variables of its launcher.

MULTIRING_RANK (`multiring run`) has priority, then torchrun, mpiexec and srun. Without any of them the job has one
rank. Nothing is guessed: incomplete variables are an error. An MPI launcher whose MPI cannot be loaded is also an
error; otherwise its N ranks would become N jobs of one rank.
"""

import contextlib
import hashlib
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from multiring._runtime.bootstrap.addresses import LocalAddress, TcpAddress, host_id, listen, own_address, parse_address
from multiring._runtime.bootstrap.handshake import SECRET_BYTES
from multiring._runtime.bootstrap.rank_process import RankPosition, launch_root
from multiring._runtime.engines.mpi_library import check_place, load_mpi
from multiring._settings import TORCH_PLACE, Settings, environment_of, places_told
from multiring.errors import ArgumentError, LaunchError, MultiringError

_ALONE_JOB = "alone"
# Slurm's batch script and interactive shell are steps with reserved numbers (slurm.h: SLURM_BATCH_SCRIPT,
# SLURM_INTERACTIVE_STEP, SLURM_EXTERN_CONT, SLURM_PENDING_STEP). Processes there were not started by srun.
_FIRST_RESERVED_STEP = 0xFFFFFFFA
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_SEVERAL_HOSTS = (
    "its ranks are on several hosts, so set MULTIRING_RENDEZVOUS=host:port (rank 0's host and a free port there) and "
    "MULTIRING_SECRET or MULTIRING_SECRET_FILE, the same on all ranks"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """A rank's numbers in its job, and the address and secret of the rendezvous.

    - `secret` may be empty if the address is an abstract socket, because the kernel reports the user at the other end.
      Then rank 0 draws a secret and sends it to the others; see `Rendezvous.secret`.
    - `local_rank` and `local_size` are None if the launcher does not set them.
    - `source` names the launcher.
    - `told` lists the variables that gave these values, for error messages.
    - `listener` is set on rank 0 if multiring chose the address: the socket that is already bound to it.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    rendezvous: str
    secret: bytes = field(repr=False)
    job: str
    source: str
    told: str = field(default="", compare=False)
    listener: socket.socket | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_rendezvous_point(self.source, "rank", self.rank, self.size)
        if self.local_rank is not None and self.local_size is not None:
            _check_rendezvous_point(self.source, "local rank", self.local_rank, self.local_size)


def identify(settings: Settings, foreign: Mapping[str, str]) -> Identity:
    """Return this process's Identity according to its launcher's variables.

    Args:
        settings: this process's settings. MULTIRING_RENDEZVOUS and the secret also apply to ranks of other launchers.
        foreign: the variables of other launchers; see `settings.foreign_environment`.

    Raises:
        ArgumentError: a variable has an invalid value, or required variables are missing.
        LaunchError: the ranks cannot meet with these variables; the text says what to set or install.
    """
    inner = innermost(settings, foreign)
    known = _from_settings(inner) if _is_placed(inner) else _source_of(foreign)(inner, foreign)
    return replace(known, told=told_by(inner, foreign))


def innermost(settings: Settings, foreign: Mapping[str, str]) -> Settings:
    """Return `settings` without the values of an outer launcher.

    The values of `multiring run` are dropped if another launcher, for example torchrun, started this process inside a
    rank. The inner launcher is recognized by variables that were not set when `multiring run` started.
    """
    if not _is_placed(settings) or settings.launched_in is None:
        return settings
    if set(places_told(foreign).split(";")) <= set(settings.launched_in.split(";")):
        return settings
    placeless = replace(settings, rank=None, size=None, local_rank=None, local_size=None)
    return replace(placeless, rendezvous=None, secret=None, secret_file=None, job=None)


def launch_key(settings: Settings, foreign: Mapping[str, str]) -> str | None:
    """Return a text that identifies one launcher's variables for one rank.

    The text is equal in all processes that have inherited these variables. Return None if no launcher has set
    variables, or if the job has one rank. Such a rank may run several programs, each a job of its own.
    """
    inner = innermost(settings, foreign)
    met_at = (inner.job, inner.rendezvous)
    if _is_placed(inner):
        return None if inner.rendezvous is None else repr((*met_at, inner.rank, inner.size))
    source = _source_of(foreign)
    names = _NAMES.get(source)
    if names is None:
        return None
    said = [(name, foreign[name]) for name in names if name in foreign]
    if source is _from_torchrun or source is _from_torch_variables:
        return repr((*met_at, *said))
    size = next((text for name, text in said if name.endswith(("_SIZE", "TASKS"))), "1")
    if size == "1":
        return None
    # Two jobs on one host have equal variables of mpiexec. The process that mpiexec started distinguishes them.
    root = launch_root(*next(each for each in said if each[0].endswith("RANK"))) if source is _from_mpi else ""
    return repr((*met_at, *said, root))


def told_by(settings: Settings, foreign: Mapping[str, str]) -> str:
    """Return the variables that determine this process's rank.

    The variables have the form NAME=VALUE, separated by commas.
    """
    if _is_placed(settings):
        values = {"rank": settings.rank, "size": settings.size, "rendezvous": settings.rendezvous}
        said = environment_of(**{name: value for name, value in values.items() if value is not None})
    else:
        said = {name: foreign[name] for name in _NAMES.get(_source_of(foreign), ()) if name in foreign}
    return ", ".join(f"{name}={text}" for name, text in said.items())


def place_told(settings: Settings, foreign: Mapping[str, str]) -> RankPosition:
    """Return the rank's numbers from the variables alone.

    Missing local numbers default to those of the job.
    """
    inner = innermost(settings, foreign)
    local_rank, local_size = inner.local_rank, inner.local_size
    rank, size = inner.rank, inner.size
    if not _is_placed(inner):
        rank = _first_number(foreign, "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
        size = _first_number(foreign, "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
        local_rank = _first_number(foreign, "LOCAL_RANK", *_LOCAL_RANKS, "SLURM_LOCALID")
        local_size = _first_number(foreign, "LOCAL_WORLD_SIZE", *_LOCAL_SIZES)
    rank, size = rank or 0, size or 1
    return RankPosition(
        rank, size, rank if local_rank is None else local_rank, size if local_size is None else local_size
    )


def _is_placed(settings: Settings) -> bool:
    parts = (settings.rank, settings.size, settings.local_rank, settings.local_size)
    return any(part is not None for part in parts)


def _source_of(foreign: Mapping[str, str]) -> Callable[[Settings, Mapping[str, str]], Identity]:
    """Return the reader for the innermost launcher.

    Launchers can be nested; the outer ones' variables stay set.
    """
    if "TORCHELASTIC_RUN_ID" in foreign:
        return _from_torchrun
    if "MPI_LOCALRANKID" in foreign or "OMPI_COMM_WORLD_RANK" in foreign:
        return _from_mpi
    # srun's own PMI plug-ins set PMI_RANK or PMIX_RANK for any program, MPI or not.
    if _is_srun_step(foreign):
        return _from_srun
    if "PMI_RANK" in foreign or "PMIX_RANK" in foreign:
        return _from_mpi
    if "RANK" in foreign or "WORLD_SIZE" in foreign:
        return _from_torch_variables
    return _from_nobody


def _from_nobody(_settings: Settings, _foreign: Mapping[str, str]) -> Identity:
    return _alone("none")


def _alone(source: str) -> Identity:
    return Identity(
        rank=0, size=1, local_rank=0, local_size=1, rendezvous="", secret=b"", job=_ALONE_JOB, source=source
    )


def _from_settings(settings: Settings) -> Identity:
    if settings.rank is None or settings.size is None:
        missing = "MULTIRING_RANK" if settings.rank is None else "MULTIRING_SIZE"
        raise ArgumentError(f"{missing} is not set: a rank needs MULTIRING_RANK and MULTIRING_SIZE, or neither")
    if settings.size == 1 and settings.rendezvous is None:
        rendezvous, secret = "", b""
    else:
        rendezvous, secret = _rendezvous_point(settings, "MULTIRING_RANK", one_host=None)
    return Identity(
        rank=settings.rank,
        size=settings.size,
        local_rank=settings.local_rank,
        local_size=settings.local_size,
        rendezvous=rendezvous,
        secret=secret,
        job=settings.job or rendezvous or _ALONE_JOB,
        source="multiring",
    )


def _from_torchrun(settings: Settings, foreign: Mapping[str, str]) -> Identity:
    rank, size = _number(foreign, "RANK"), _number(foreign, "WORLD_SIZE")
    local_rank = _number(foreign, "LOCAL_RANK") if "LOCAL_RANK" in foreign else None
    local_size = _number(foreign, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in foreign else None
    # Jobs may share a run id (torchrun's default is "none"); the port distinguishes them. The restart count
    # distinguishes the restarts of one job.
    parts = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    job = settings.job or "-".join(["torchrun", *(foreign[name] for name in parts if name in foreign)])
    rendezvous, secret = _rendezvous_point(settings, "torchrun", job if local_size == size else None)
    return Identity(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        rendezvous=rendezvous,
        secret=secret,
        job=job,
        source="torchrun",
    )


def _from_torch_variables(settings: Settings, foreign: Mapping[str, str]) -> Identity:
    """Read torchrun's variables if another launcher or a shell has set them.

    An incomplete set is an error.
    """
    if foreign.get("RANK", "0") == "0" and foreign.get("WORLD_SIZE", "1") == "1":
        return _alone("none")
    is_placed = settings.rendezvous is not None or "LOCAL_WORLD_SIZE" in foreign
    if "RANK" in foreign and "WORLD_SIZE" in foreign and is_placed:
        return _from_torchrun(settings, foreign)
    found = ", ".join(f"{name}={foreign[name]}" for name in TORCH_PLACE.values() if name in foreign)
    raise LaunchError(
        f"{found}: torchrun sets these variables, but others that it also sets are missing. If another launcher left "
        "them, unset RANK and WORLD_SIZE; if this process is one of several ranks, start it with `multiring run` or "
        "torchrun, or set RANK, WORLD_SIZE, MULTIRING_RENDEZVOUS=host:port and MULTIRING_SECRET"
    )


def _is_srun_step(foreign: Mapping[str, str]) -> bool:
    return (
        "SLURM_PROCID" in foreign
        and "SLURM_STEP_ID" in foreign
        and _number(foreign, "SLURM_STEP_ID") < _FIRST_RESERVED_STEP
    )


def _from_srun(settings: Settings, foreign: Mapping[str, str]) -> Identity:
    # Prefer the values of the step, because the other variables may describe the whole allocation.
    size = _number(foreign, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in foreign else "SLURM_NTASKS")
    hosts = _number(foreign, "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in foreign else "SLURM_NNODES")
    job = settings.job or f"srun-{foreign.get('SLURM_JOB_ID', '')}-{foreign['SLURM_STEP_ID']}"
    rendezvous, secret = _rendezvous_point(settings, "srun", job if hosts == 1 else None)
    return Identity(
        rank=_number(foreign, "SLURM_PROCID"),
        size=size,
        local_rank=_number(foreign, "SLURM_LOCALID") if "SLURM_LOCALID" in foreign else None,
        local_size=size if hosts == 1 else None,
        rendezvous=rendezvous,
        secret=secret,
        job=job,
        source="srun",
    )


def _from_mpi(settings: Settings, foreign: Mapping[str, str]) -> Identity:
    """Read mpiexec's variables, or meet over MPI.

    Unless the settings have the rendezvous and the secret, rank 0 broadcasts its address and a new secret over MPI.
    """
    size = _first_number(foreign, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    rank = _first_number(foreign, "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
    if size == 1:
        return _alone("mpi")
    if rank is not None and size is not None and settings.rendezvous is not None and _secret(settings) is not None:
        # The settings are complete, for example from `multiring run --hosts`, so no MPI library is needed.
        rendezvous, secret = _rendezvous_point(settings, "mpiexec", one_host=None)
        return Identity(
            rank=rank,
            size=size,
            local_rank=_first_number(foreign, *_LOCAL_RANKS),
            local_size=_first_number(foreign, *_LOCAL_SIZES),
            rendezvous=rendezvous,
            secret=secret,
            job=settings.job or rendezvous,
            source="mpi",
        )
    mpi = load_mpi(foreign)
    check_place(mpi, rank, size, "mpiexec")
    world = mpi.COMM_WORLD
    words = world.Dup()  # keeps multiring's messages apart from the program's
    try:
        here = host_id()
        is_one_host = bool(words.allreduce(here == words.bcast(here, root=0), op=mpi.LAND))
        place = choose_rendezvous_point(settings, "mpi", is_one_host=is_one_host) if world.Get_rank() == 0 else None
        told = words.bcast(place.told if place else None, root=0)
    finally:
        words.Free()
    if "error" in told:
        raise LaunchError(f"rank 0 cannot listen: {told['error']}")
    return Identity(
        rank=world.Get_rank(),
        size=world.Get_size(),
        local_rank=_first_number(foreign, *_LOCAL_RANKS),
        local_size=_first_number(foreign, *_LOCAL_SIZES),
        rendezvous=told["rendezvous"],
        secret=bytes.fromhex(told["secret"]),
        job=told["job"],
        source="mpi",
        listener=place.listener if place else None,
    )


@dataclass(frozen=True, slots=True)
class RendezvousPoint:
    """Rank 0's address for the rendezvous.

    `told` is the message to the other ranks; it contains "error" if rank 0 cannot listen.
    """

    told: dict[str, str]
    listener: socket.socket | None = None


def choose_rendezvous_point(settings: Settings, source: str, *, is_one_host: bool) -> RendezvousPoint:
    """Choose rank 0's address and start to listen there.

    An error is returned, not raised, because the other ranks wait for the result in a broadcast.

    Args:
        settings: the address, secret and job name are taken from the settings if set; otherwise new ones are made.
        source: the launcher's name; part of a new job name.
        is_one_host: whether all ranks are on this host.
    """
    token = secrets.token_hex(8)
    job = settings.job or f"{source}-{token}"
    listener = None
    try:
        secret = _secret(settings) or secrets.token_bytes(SECRET_BYTES)
        if settings.rendezvous is not None:
            with naming("MULTIRING_RENDEZVOUS"):
                address: LocalAddress | TcpAddress = parse_address(settings.rendezvous)
        elif is_one_host:
            address = LocalAddress(f"multiring-{token}")
        else:
            host = own_address(settings.interface)
            listener = _listen_in_range(host, settings.ports)
            address = TcpAddress(host, listener.getsockname()[1])
    except (MultiringError, OSError) as error:
        return RendezvousPoint({"error": str(error)})
    return RendezvousPoint({"rendezvous": str(address), "secret": secret.hex(), "job": job}, listener)


def _listen_in_range(host: str, ports: tuple[int, int] | None) -> socket.socket:
    """Return a socket that listens at `host`, on the first free port of `ports`.

    `ports` is a range, both ends included.

    Raises:
        OSError: no port is free, or `host` is not an address of this host.
    """
    first, last = ports or (0, 0)
    refusal: OSError | None = None
    for port in range(first, last + 1):
        try:
            return listen(TcpAddress(host, port))
        except OSError as error:
            refusal = error
    raise OSError(f"no port of {first}-{last} is free at {host}: {refusal}")


def _rendezvous_point(settings: Settings, source: str, one_host: str | None) -> tuple[str, bytes]:
    """Return the rendezvous address and the secret from the settings, or new ones.

    `one_host` is the job's name if all ranks are on one host.
    """
    secret = _secret(settings)
    if settings.rendezvous is not None:
        with naming("MULTIRING_RENDEZVOUS"):
            address = parse_address(settings.rendezvous)
        if isinstance(address, TcpAddress) and secret is None:
            raise LaunchError(
                f"MULTIRING_RENDEZVOUS={settings.rendezvous} can be reached by anyone on the network: set "
                "MULTIRING_SECRET or MULTIRING_SECRET_FILE, the same on all ranks"
            )
        return settings.rendezvous, secret or b""
    if one_host is None and source == "MULTIRING_RANK":
        raise ArgumentError("MULTIRING_RENDEZVOUS is not set: ranks with MULTIRING_RANK need an address to meet at")
    if one_host is None:
        raise LaunchError(f"this job was started by {source} and {_SEVERAL_HOSTS}")
    # The name is not secret: each end asks the kernel for the other end's user, which must be the same.
    digest = hashlib.sha256(os.fsencode(one_host)).hexdigest()[:32]
    return f"@multiring-{os.getuid()}-{digest}", secret or b""


def _secret(settings: Settings) -> bytes | None:
    if settings.secret is not None and settings.secret_file is not None:
        raise ArgumentError("both MULTIRING_SECRET and MULTIRING_SECRET_FILE are set; set one")
    if settings.secret_file is not None:
        try:
            secret = Path(settings.secret_file).read_bytes().strip()
        except OSError as error:
            raise ArgumentError(f"MULTIRING_SECRET_FILE={settings.secret_file!r}: {error.strerror}") from None
    elif settings.secret is not None:
        secret = os.fsencode(settings.secret)
    else:
        return None
    if not secret:
        raise ArgumentError("the job's secret is empty; want a text that nobody can guess")
    return secret


# The variables that each reader uses.
_TORCH_NAMES = (
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
_NAMES: Mapping[Callable[[Settings, Mapping[str, str]], Identity], tuple[str, ...]] = MappingProxyType(
    {
        _from_torchrun: _TORCH_NAMES,
        _from_torch_variables: _TORCH_NAMES,
        _from_srun: ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        _from_mpi: (
            "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "PMIX_RANK",
        ),
    }
)  # fmt: skip


@contextlib.contextmanager
def naming(variable: str) -> Iterator[None]:
    """Add the variable's name to an ArgumentError that the `with` block raises."""
    try:
        yield
    except ArgumentError as error:
        if type(error) is not ArgumentError:  # callers may handle a subclass of ArgumentError
            raise
        raise ArgumentError(f"{variable}: {error}") from None


def _check_rendezvous_point(source: str, what: str, rank: int, size: int) -> None:
    if not 0 <= rank < size:
        kind = what.removesuffix("rank").replace(" ", "_").upper()
        where = f" in MULTIRING_{kind}RANK" if source == "multiring" else ""
        raise ArgumentError(f"{source}: {what} {rank} of {size}, want 0 to {size - 1}{where}")


def _first_number(foreign: Mapping[str, str], *names: str) -> int | None:
    return next((_number(foreign, name) for name in names if name in foreign), None)


def _number(foreign: Mapping[str, str], name: str) -> int:
    text = foreign.get(name)
    if text is None:
        raise ArgumentError(f"{name} is not set, although other variables of the same launcher are set")
    if not (text.isascii() and text.isdecimal()):
        raise ArgumentError(f"{name}={text!r}: want an integer >= 0")
    return int(text)
