"""Run a command as N ranks on this machine, and end every process of the job."""

import contextlib
import os
import secrets
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from multiring._launch.commands import check_can_run, refuse_places
from multiring._launch.cores import cores_of_cpus, threads_per_rank, usable_cpus
from multiring._launch.cpu_limit import cpu_limit
from multiring._launch.job import Job, JobOptions
from multiring._launch.job_process import JobProcess, Start, text_of
from multiring._launch.leftovers import (
    adopt_orphans,
    children_here,
    end_leftovers,
    job_processes,
    reap_adopted,
    signal_processes,
)
from multiring._launch.rank_reports import ANY, RankReports, catches, lives, name_of
from multiring._launch.rank_starts import HostPlace, free_port, rank_starts, shares_told
from multiring._launch.standard_streams import open_closed_streams
from multiring._launch.watchdog import Watchdog
from multiring._settings import JobNews, Settings, inherited_environment
from multiring.errors import ArgumentError, MultiringError

_MOST_EARLY_FAILURES = 2
LONG_S = 60.0  # a job that ran this long counts as having made progress, even without a report


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
    check_can_run("multiring run", command, environment)
    return run_with_restarts(lambda current: _made(command, ranks, current, environment), options)


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
    return LocalJob(job, starts, options, rendezvous, shares_told(ranks, len(cores), threads, environment))


def job_name(outer: str | None, token: str) -> str:
    """Return a job's name.

    Inside a rank of another job, `outer` is that job's name and becomes a prefix.
    """
    return f"{outer}/{token}" if outer else token


class LocalJob(Job):
    """A job of ranks on this host. A watchdog process ends leftover processes if this process is killed.

    Args:
        name: the job's name.
        starts: the ranks.
        options: the job's options.
        reports: the address at which ranks report, as in MULTIRING_REPORTS.
        said: messages to print at the start of the job.
    """

    def __init__(
        self, name: str, starts: Sequence[Start], options: JobOptions, reports: str, said: Sequence[str]
    ) -> None:
        super().__init__(starts, options.log_dir, options.grace_s)
        self._name = name
        self._reports_at = reports
        self._said = said
        self._held_back: dict[int, set[int]] = {}  # first process of a rank -> the signals to send after the rank joins
        self._began_s = time.monotonic()

    @property
    def made_progress(self) -> bool:
        """Whether the ranks reported progress (a step, a save), or ran for a minute; valid after the job's end."""
        return JobNews.PROGRESS.value in self._reports.news or time.monotonic() - self._began_s >= LONG_S

    def _open(self, stack: contextlib.ExitStack) -> None:
        self._reports = RankReports(self._reports_at)
        stack.callback(self._reports.close)
        for each in self._said:
            self._say(each)
        self._spared = set(children_here())  # children that this process had before the job
        adopt_orphans(on=True)
        stack.callback(adopt_orphans, on=False)
        self._watchdog = Watchdog(self._name)
        self._spared.add(self._watchdog.pid)
        stack.callback(self._watchdog.dismiss)

    def _born(self, member: JobProcess) -> None:
        self._watchdog.watch(member.pid)

    def _reaping(self, pid: int) -> None:
        del pid
        self._reports.hear()  # the last report of the process; without the process, its session is unknown

    def _reaped(self, pid: int) -> None:
        self._watchdog.forget(pid)

    def _stop_leftovers(self, known: set[int]) -> None:
        signal_processes(set(job_processes(self._name)) - known, signal.SIGTERM)

    def _end_leftovers(self, grace_s: float) -> None:
        end_leftovers(self._name, (), grace_s, spared=self._spared)

    def _watch_more(self, poll: selectors.BaseSelector) -> None:
        poll.register(self._reports.descriptor, selectors.EVENT_READ, self._reports.hear)

    def _do_more(self) -> None:
        self._reports.hear()
        reap_adopted({*self._spared, *(member.pid for member in self._members)})
        for first, numbers in list(self._held_back.items()):
            if self._ranks_in(first):
                del self._held_back[first]
                self._signal_ranks(first, numbers)

    def _lost_by(self, member: JobProcess) -> set[JobProcess] | None:
        self._reports.hear()
        lost = self._reports.lost_by(member.pid)
        if ANY in lost or (not lost and member.is_consequence):
            return None
        return {each for each in self._members if each.pid in lost}

    def _pass_on(self, number: int) -> None:
        """Signal only the rank processes. The signal would kill their workers and helpers."""
        waiting = []
        for member in self._running():
            if self._ranks_in(member.pid):
                self._signal_ranks(member.pid, {number})
            elif catches(member.pid, number):
                signal_processes([member.pid], number)
            else:
                self._held_back.setdefault(member.pid, set()).add(number)
                waiting.append(member)
        told = f"{name_of(number)} received, and handed on to the ranks"
        later = f"; {text_of(waiting)}: as soon as multiring.init() is called there" if waiting else ""
        self._say(told + later)

    def _ranks_in(self, first: int) -> list[int]:
        return [pid for pid in self._reports.rank_processes.get(first, ()) if lives(pid)]

    def _signal_ranks(self, first: int, numbers: set[int]) -> None:
        for number in numbers:
            signal_processes(self._ranks_in(first), number)

    def _conclude(self) -> None:
        self._reports.hear()
        if self._code or len(self._members) < 2:  # a rank that failed may not have reached multiring.init()
            return
        if not self._reports.news:
            self._say(
                f"none of the {len(self._members)} ranks joined the job: each of them seems to have run the whole "
                "program on its own. Call multiring.init() in the program, directly or through a library; or use -n 1"
            )
