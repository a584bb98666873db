"""Run a command as N ranks on this machine, and end every process of the job."""

import contextlib
import ctypes
import os
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from multiring._launch.commands import check_can_run, environment_of_process, refuse_places
from multiring._launch.cores import cores_of_cpus, share_cpus, thread_variables, threads_per_rank, usable_cpus
from multiring._launch.horovod import horovod_environment, positions_on
from multiring._launch.job import Job, JobOptions, JobProcess, Start, text_of
from multiring._launch.leftovers import (
    adopt_orphans,
    children_here,
    end_leftovers,
    job_processes,
    reap_adopted,
    signal_processes,
)
from multiring._launch.rank_reports import ANY, RankReports, catches, lives, name_of
from multiring._launch.standard_streams import open_closed_streams
from multiring._launch.watchdog import Watchdog
from multiring._runtime.engines.nvml import visible_gpus
from multiring._settings import TORCH_PLACE, JobNews, Settings, inherited_environment
from multiring.errors import ArgumentError

_PR_SET_PDEATHSIG = 1
_MOST_EARLY_FAILURES = 2
_LONG_S = 60.0  # a job that ran this long counts as having made progress, even without a report


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
    job = _made(command, ranks, options, environment)
    code = job.run()
    early = 0  # the number of failures in a row before the first step
    for restart in range(1, options.max_restarts + 1):
        if code == 0 or job.was_stopped:
            return code
        early = 0 if job.made_progress else early + 1
        if early == _MOST_EARLY_FAILURES:
            _say("the job failed twice before its first step, so another start would fail too: not started again")
            return code
        _say(f"start {restart + 1} of at most {options.max_restarts + 1}: all ranks, with a new secret")
        logs = options.logs
        job = _made(
            command,
            ranks,
            replace(options, logs=lambda *rank: _in_folder(f"restart-{restart}", logs(*rank))),  # noqa: B023 -- called now
            environment,
        )
        code = job.run()
    return code


def _say(text: str) -> None:
    os.write(2, f"multiring: {text}\n".encode())


def _in_folder(folder: str, names: tuple[str, str]) -> tuple[str, str]:
    return f"{folder}/{names[0]}", f"{folder}/{names[1]}"


def _made(command: Sequence[str], ranks: int, options: JobOptions, environment: Mapping[str, str]) -> "_LocalJob":
    """Return a new job, not yet started, with its own name and secret."""
    token, secret = secrets.token_hex(8), secrets.token_hex(32)
    rendezvous = f"@multiring-{token}"
    job = job_name(Settings.from_environment(environment, horovod=options.horovod).job, token)
    core_of = cores_of_cpus(usable_cpus())
    threads = threads_per_rank(core_of, ranks)
    die_with_us = dying_with(os.getpid())
    places = positions_on([("localhost", ranks)])
    port = _free_port()
    starts = [
        Start(
            name=f"rank {rank}",
            tag=f"[{rank}] ",
            log_files=options.logs(rank, ranks),
            command=tuple(command),
            environment=environment_of_process(
                environment,
                threads,
                rank=rank,
                size=ranks,
                local_rank=rank,
                local_size=ranks,
                rendezvous=rendezvous,
                secret=secret,
                job=job,
                **({} if options.timeline is None else {"timeline": options.timeline}),
            )
            | torch_environment(rank, ranks, port, options.variables)
            | (horovod_environment(environment, place) if options.horovod else {}),
            prepare=_preparation(die_with_us, cpus),
            has_stdin=rank == options.stdin_rank,
        )
        for rank, (cpus, place) in enumerate(zip(share_cpus(core_of, ranks), places, strict=True))
    ]
    is_ours = ranks > 1 and thread_variables(environment, threads)  # the user has not chosen a number of threads
    said = [_shares_told(ranks, len(core_of), threads)] if is_ours else []
    gpus = visible_gpus(environment)
    said += [_gpus_told(ranks, gpus)] if 0 < gpus < ranks else []
    return _LocalJob(job, starts, options, rendezvous, said)


def _shares_told(ranks: int, cpus: int, threads: int) -> str:
    share = f"{ranks} ranks share {cpus} CPUs" if ranks > cpus else f"each of the {ranks} ranks has CPUs of its own"
    many = "1 thread" if threads == 1 else f"{threads} threads"
    return f"{share}, and each computes with {many}; set OMP_NUM_THREADS for another number"


def _gpus_told(ranks: int, gpus: int) -> str:
    many = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    return f"{ranks} ranks share {many} of this host; -n {gpus} gives each rank a GPU of its own"


def torch_environment(rank: int, ranks: int, port: int, chosen: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a rank for torch's `init_process_group`.

    Programs need them if they do not use multiring's own functions.

    Variables in `chosen`, such as the address and the port of torch's store, keep their values.
    """
    place = {"rank": rank, "size": ranks, "local_rank": rank, "local_size": ranks, "address": "127.0.0.1", "port": port}
    return {name: chosen.get(name, str(place[key])) for key, name in TORCH_PLACE.items()}


def _free_port() -> int:
    """Return a free TCP port, on which rank 0 of torch may listen later."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def job_name(outer: str | None, token: str) -> str:
    """Return a job's name.

    Inside a rank of another job, `outer` is that job's name and becomes a prefix.
    """
    return f"{outer}/{token}" if outer else token


class _LocalJob(Job):
    """A job of ranks on this host. A watchdog process ends leftover processes if this process is killed."""

    def __init__(
        self, name: str, starts: Sequence[Start], options: JobOptions, rendezvous: str, said: Sequence[str]
    ) -> None:
        super().__init__(starts, options.log_dir, options.grace_s)
        self._name = name
        self._rendezvous = rendezvous
        self._said = said  # messages to print at the start of the job
        self._held_back: dict[int, set[int]] = {}  # first process of a rank -> the signals to send after the rank joins
        self._began_s = time.monotonic()

    @property
    def made_progress(self) -> bool:
        """Whether the ranks reported progress (a step, a save), or ran for a minute; valid after the job's end."""
        return JobNews.PROGRESS.value in self._reports.news or time.monotonic() - self._began_s >= _LONG_S

    def _open(self, stack: contextlib.ExitStack) -> None:
        self._reports = RankReports(self._rendezvous)
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
