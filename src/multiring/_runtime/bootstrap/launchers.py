"""Determine this process's rank from the variables of its launcher.

MULTIRING_RANK (`multiring run`) has priority, then torchrun, mpiexec and srun. Without any of them the job has one
rank. Nothing is guessed: incomplete variables are an error. An MPI launcher whose MPI cannot be loaded is also an
error; otherwise its N ranks would become N jobs of one rank.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from multiring._exchanges import SlurmStep, TorchStoreExchange, ways_of_step
from multiring._runtime.bootstrap.addresses import host_id
from multiring._runtime.bootstrap.identity import Identity, first_number, number
from multiring._runtime.bootstrap.rank_process import RankPosition, launch_root
from multiring._runtime.bootstrap.rendezvous_point import (
    choose_rendezvous_point,
    given_rendezvous_point,
    meet_by_exchange,
    secret_of,
)
from multiring._runtime.engines.mpi_library import await_ranks, check_place, load_mpi
from multiring._settings import TORCH_PLACE, Settings, environment_of, places_told
from multiring.errors import ArgumentError, LaunchError

_ALONE_JOB = "alone"
_log = logging.getLogger("multiring")
# Slurm's batch script and interactive shell are steps with reserved numbers (slurm.h: SLURM_BATCH_SCRIPT,
# SLURM_INTERACTIVE_STEP, SLURM_EXTERN_CONT, SLURM_PENDING_STEP). Processes there were not started by srun.
_FIRST_RESERVED_STEP = 0xFFFFFFFA
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


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
        rank = first_number(foreign, "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
        size = first_number(foreign, "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
        local_rank = first_number(foreign, "LOCAL_RANK", *_LOCAL_RANKS, "SLURM_LOCALID")
        local_size = first_number(foreign, "LOCAL_WORLD_SIZE", *_LOCAL_SIZES)
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


def _from_nobody(_settings: Settings, foreign: Mapping[str, str]) -> Identity:
    tasks = foreign.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" in foreign and tasks != "1":
        _log.warning(
            "this process is a job of one rank, although its Slurm allocation has %s tasks: start it with srun",
            tasks,
        )
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
        rendezvous, secret = given_rendezvous_point(settings, "MULTIRING_RANK", one_host=None)
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
    rank, size = number(foreign, "RANK"), number(foreign, "WORLD_SIZE")
    local_rank = number(foreign, "LOCAL_RANK") if "LOCAL_RANK" in foreign else None
    local_size = number(foreign, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in foreign else None
    # Jobs may share a run id (torchrun's default is "none"); the port distinguishes them. The restart count
    # distinguishes the restarts of one job.
    parts = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    job = settings.job or "-".join(["torchrun", *(foreign[name] for name in parts if name in foreign)])
    is_one_host = local_size == size
    if settings.rendezvous is not None or is_one_host or not _names_store(foreign):
        rendezvous, secret = given_rendezvous_point(settings, "torchrun", job if is_one_host else None)
    else:
        rendezvous, secret = "", b""
    known = Identity(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        rendezvous=rendezvous,
        secret=secret,
        job=job,
        source="torchrun",
    )
    if rendezvous:
        return known
    store = TorchStoreExchange(
        foreign["MASTER_ADDR"],
        number(foreign, "MASTER_PORT"),
        # TORCHELASTIC_RESTART_COUNT can differ between hosts: an agent does not count the restarts of other agents.
        f"{foreign.get('TORCHELASTIC_RUN_ID', '')}-{size}",
        is_served=foreign.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        limit_s=settings.init_timeout_s,
    )
    return meet_by_exchange(settings, known, [store])


def _names_store(foreign: Mapping[str, str]) -> bool:
    return "MASTER_ADDR" in foreign and "MASTER_PORT" in foreign


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
        and number(foreign, "SLURM_STEP_ID") < _FIRST_RESERVED_STEP
    )


def _from_srun(settings: Settings, foreign: Mapping[str, str]) -> Identity:
    # Prefer the values of the step, because the other variables may describe the whole allocation.
    size = number(foreign, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in foreign else "SLURM_NTASKS")
    hosts = number(foreign, "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in foreign else "SLURM_NNODES")
    job = settings.job or f"srun-{foreign.get('SLURM_JOB_ID', '')}-{foreign['SLURM_STEP_ID']}"
    rank = number(foreign, "SLURM_PROCID")
    is_one_host = hosts == 1 or size == 1
    is_told = is_one_host or settings.rendezvous is not None
    if not is_told and settings.engine == "mpi":
        return _over_mpi(settings, foreign, (rank, size, "srun"))
    rendezvous, secret = "", b""
    if is_told:
        rendezvous, secret = given_rendezvous_point(settings, "srun", job if is_one_host else None)
    known = Identity(
        rank=rank,
        size=size,
        local_rank=number(foreign, "SLURM_LOCALID") if "SLURM_LOCALID" in foreign else None,
        local_size=size if is_one_host else None,
        rendezvous=rendezvous,
        secret=secret,
        job=job,
        source="srun",
    )
    if is_told:
        return known
    return meet_by_exchange(settings, known, ways_of_step(SlurmStep.of(foreign, settings.ports), foreign))


def _from_mpi(settings: Settings, foreign: Mapping[str, str]) -> Identity:
    """Read mpiexec's variables, or meet over MPI.

    Unless the settings have the rendezvous and the secret, rank 0 broadcasts its address and a new secret over MPI.
    """
    size = first_number(foreign, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    rank = first_number(foreign, "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
    if size == 1:
        return _alone("mpi")
    if rank is not None and size is not None and settings.rendezvous is not None and secret_of(settings) is not None:
        # The settings are complete, for example from `multiring run --hosts`, so no MPI library is needed.
        rendezvous, secret = given_rendezvous_point(settings, "mpiexec", one_host=None)
        return Identity(
            rank=rank,
            size=size,
            local_rank=first_number(foreign, *_LOCAL_RANKS),
            local_size=first_number(foreign, *_LOCAL_SIZES),
            rendezvous=rendezvous,
            secret=secret,
            job=settings.job or rendezvous,
            source="mpi",
        )
    return _over_mpi(settings, foreign, (rank, size, "mpi"))


def _over_mpi(settings: Settings, foreign: Mapping[str, str], launched: tuple[int | None, int | None, str]) -> Identity:
    """Meet over MPI: rank 0 broadcasts its address and a new secret.

    `launched` is the rank, the size and the launcher's name, as its variables say.
    """
    rank, size, source = launched
    mpi = load_mpi(foreign)
    check_place(mpi, rank, size, "mpiexec" if source == "mpi" else source)
    world = mpi.COMM_WORLD
    await_ranks(mpi, settings.init_timeout_s)
    words = world.Dup()  # keeps multiring's messages apart from the program's
    try:
        here = host_id()
        is_one_host = bool(words.allreduce(here == words.bcast(here, root=0), op=mpi.LAND))
        place = choose_rendezvous_point(settings, source, is_one_host=is_one_host) if world.Get_rank() == 0 else None
        told = words.bcast(place.told if place else None, root=0)
    finally:
        words.Free()
    if "error" in told:
        raise LaunchError(f"rank 0 cannot listen: {told['error']}")
    return Identity(
        rank=world.Get_rank(),
        size=world.Get_size(),
        local_rank=first_number(foreign, *_LOCAL_RANKS, "SLURM_LOCALID"),
        local_size=first_number(foreign, *_LOCAL_SIZES),
        rendezvous=told["rendezvous"],
        secret=bytes.fromhex(told["secret"]),
        job=told["job"],
        source=source,
        listener=place.listener if place else None,
    )


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
