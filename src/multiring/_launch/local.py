"""Run a command as N ranks on this machine, and end every process of the job."""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from multiring._launch.commands import check_can_run, refuse_places
from multiring._launch.cores import cores_of_cpus, threads_per_rank, usable_cpus
from multiring._launch.growing_job import GrowingJob
from multiring._launch.job import JobOptions
from multiring._launch.local_job import LocalJob
from multiring._launch.rank_starts import HostPlace, free_port, rank_starts, shares_told
from multiring._launch.shrinking_job import ShrinkingJob
from multiring._launch.standard_streams import open_closed_streams
from multiring._limits.cpu_limit import cpu_limit
from multiring._settings import Settings, inherited_environment
from multiring.errors import ArgumentError, MultiringError

_MOST_EARLY_FAILURES = 2


def run_local(command: Sequence[str], ranks: int, options: JobOptions | None = None) -> int:
    """Run `command` as `ranks` local ranks and return the job's exit code.

    The function blocks until every process of the job has ended, and writes to file descriptors 1 and 2. It forwards
    SIGINT, SIGTERM and SIGHUP to the ranks. Call it from the main thread.

    Returns:
        0 if every rank ended with 0. 128 + n if this process received signal n. Otherwise the exit code of the rank
        that failed first, which is 128 + n if signal n killed the rank.

    Raises:
        ArgumentError: `command` is empty, `ranks` is less than 1, `stdin_rank` is not a rank, or a MULTIRING variable
            has an invalid value.
        CommandError: the command does not exist or cannot be executed.
        LaunchError: the system refuses so many processes, or `log_dir` cannot be written.
        UnsupportedError: the system is not Linux.
        StateError: the caller is not the main thread.
    """
    options = options or JobOptions()
    open_closed_streams()
    refuse_places(options.variables, horovod=options.horovod, timeline=options.timeline is not None)
    environment = inherited_environment() | dict(options.variables)
    if ranks < 1:
        raise ArgumentError(f"cannot run {ranks} ranks, want at least 1")
    if options.stdin_rank is not None and not 0 <= options.stdin_rank < ranks:
        raise ArgumentError(f"rank {options.stdin_rank} cannot read standard input: want a rank from 0 to {ranks - 1}")
    refuse_min_ranks(options, ranks, environment)
    check_can_run("multiring run", command, environment)
    return run_with_restarts(lambda current: _made(command, ranks, current, environment), options)


def refuse_min_ranks(options: JobOptions, ranks: int, environment: Mapping[str, str]) -> None:
    """Raise ArgumentError if a job of `ranks` ranks on this host cannot go on without lost ranks as `options` say."""
    refuse_wrong_numbers(options, ranks)
    refuse_unfit_settings(options, environment)


def refuse_wrong_numbers(options: JobOptions, ranks: int) -> None:
    """Raise ArgumentError if a job of `ranks` ranks has fewer than `min_ranks` or more than `max_ranks`."""
    if options.min_ranks is not None and options.min_ranks > ranks:
        raise ArgumentError(f"--min-ranks {options.min_ranks} of {ranks} ranks: want at most {ranks}")
    if options.max_ranks is not None and options.max_ranks < ranks:
        raise ArgumentError(f"--max-ranks {options.max_ranks} of {ranks} ranks: want at least {ranks}")


def refuse_too_few_places(options: JobOptions, hosts: Sequence[tuple[str, int]]) -> None:
    """Raise ArgumentError if `hosts` have fewer places than the job may have ranks."""
    total = sum(count for _, count in hosts)
    if options.max_ranks is not None and options.max_ranks > total:
        spelt = ",".join(f"{name}:{count}" for name, count in hosts)
        raise ArgumentError(f"--max-ranks {options.max_ranks}, but {spelt} has places for {total}; want more places")


def refuse_unfit_settings(options: JobOptions, environment: Mapping[str, str]) -> None:
    """Raise ArgumentError if a job that goes on without lost ranks cannot have these options or this environment."""
    if options.min_ranks is None:
        return
    settings = Settings.from_environment(environment, horovod=options.horovod)
    if options.timeline is not None or settings.timeline is not None:
        raise ArgumentError("--min-ranks: a timeline of a job that goes on without lost ranks cannot be recorded yet")
    if settings.engine == "mpi":
        raise ArgumentError("--min-ranks with MULTIRING_ENGINE=mpi: MPI does not go on without lost ranks; want auto")


class RestartableJob(Protocol):
    """A job as `run_with_restarts` sees it."""

    was_stopped: bool

    @property
    def made_progress(self) -> bool:
        """Whether the ranks made progress; valid after the job's end."""

    def run(self) -> int:
        """Run the job to its end and return its exit code."""


def run_with_restarts(
    make: Callable[[JobOptions], RestartableJob], options: JobOptions, say: Callable[[str], None] | None = None
) -> int:
    """Run the job that `make` returns, and start it again as `options` allow; return the exit code of the last run.

    The exit code of a failure stays if the job cannot be started again after it.

    `make` is called once for each start, with the options for this start. `say` shows a message, by default on standard
    error.
    """
    say = say or _say
    job = make(options)
    code = job.run()
    early = 0  # the number of failures in a row before the first step
    for restart in range(1, options.max_restarts + 1):
        if code == 0 or job.was_stopped:
            return code
        early = 0 if job.made_progress else early + 1
        if early == _MOST_EARLY_FAILURES:
            say("the job failed twice before its first step, so another start would fail too: not started again")
            return code
        say(f"start {restart + 1} of at most {options.max_restarts + 1}: all ranks, with a new secret")
        try:
            job = make(replace(options, logs=_logs_of_restart(options, restart)))
            code = job.run()
        except MultiringError as error:
            say(f"the job could not be started again: {error}")
            return code
    return code


def _logs_of_restart(options: JobOptions, restart: int) -> Callable[[int, int], tuple[str, str]]:
    return lambda *rank: _in_folder(f"restart-{restart}", options.logs(*rank))


def _say(text: str) -> None:
    os.write(2, f"multiring: {text}\n".encode())


def _in_folder(folder: str, names: tuple[str, str]) -> tuple[str, str]:
    return f"{folder}/{names[0]}", f"{folder}/{names[1]}"


def _made(command: Sequence[str], ranks: int, options: JobOptions, environment: Mapping[str, str]) -> "LocalJob":
    """Return a new job, not yet started, with its own name and secret."""
    token, secret = secrets.token_hex(8), secrets.token_hex(32)
    rendezvous = f"@multiring-{token}"
    job = job_name(Settings.from_environment(environment, horovod=options.horovod).job, token)
    cores = cores_of_cpus(usable_cpus())
    threads = threads_per_rank(cores, ranks, cpu_limit())
    place = HostPlace(
        hosts=(("localhost", ranks),),
        index=0,
        job=job,
        rendezvous=rendezvous,
        reports=rendezvous,
        secret=secret,
        threads=threads,
        torch_address="127.0.0.1",
        torch_port=free_port(),
    )
    starts = rank_starts(command, place, options, environment)
    said = shares_told(ranks, len(cores), threads, environment)
    if options.min_ranks is None:
        return LocalJob(job, starts, options, rendezvous, said)
    kind = ShrinkingJob if options.max_ranks is None else GrowingJob
    return kind(job, starts, options, rendezvous, said, secret.encode())


def job_name(outer: str | None, token: str) -> str:
    """Return a job's name.

    Inside a rank of another job, `outer` is that job's name and becomes a prefix.
    """
    return f"{outer}/{token}" if outer else token
