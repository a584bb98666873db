"""Run a command on every slot of a lab, serve requests and faults meanwhile, and take the lab down."""

import contextlib
import os
import secrets
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from multiring.errors import LaunchError, MultiringError
from multiring.lab.control_socket import (
    Caller,
    ControlSocket,
    Message,
    check_lab_name,
    open_host_socket,
    open_lab_socket,
)
from multiring.lab.faults import Fault, Kind, TimedFault, parse_fault
from multiring.lab.launchers import OPEN_MPI_STATE, Launcher, Process, processes_of
from multiring.lab.machine import Lab, require_root
from multiring.lab.namespaces import Space, inside
from multiring.lab.pid_namespace import FORWARDED, run_in_pid_namespace
from multiring.lab.plan import Plan
from multiring.lab.topology_file import TOPOLOGY_FILE
from multiring.launch.commands import check_can_run, check_command, environment_of_process
from multiring.launch.cores import cores_of_cpus, share_cpus, threads_per_rank, usable_cpus
from multiring.launch.job import Job, Member, Start, log_files
from multiring.launch.leftovers import signal_group
from multiring.launch.local import job_name
from multiring.launch.mpiexec import version_of_mpiexec
from multiring.settings import Settings, inherited_environment

_PATIENCE_S = 10.0  # after a fault: how long the survivors of a first failure get to say what they saw


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How a job runs in a lab. `name` is where `ask_lab` finds it; `faults` come by themselves.

    `tells_topology`: the ranks read from a file what the lab is, unless MULTIRING_TOPOLOGY names another one already.

    Raises:
        ArgumentError: no lab can have that name.
    """

    launcher: Launcher = Launcher.MULTIRING
    name: str = "lab"
    log_dir: Path | None = None
    faults: tuple[TimedFault, ...] = ()
    tells_topology: bool = True

    def __post_init__(self) -> None:
        check_lab_name(self.name)


def run_lab(plan: Plan, command: Sequence[str], options: Options | None = None) -> int:
    """Run `command` on every slot of a new lab and return the job's exit code; as `run_local`, see there.

    After a fault the first failure does not stop the job at once: the others get 10 seconds to tell what they saw.
    The ranks of a host that was killed by a fault do not count, unless no others are left.
    Needs root. Whatever ends this process, nothing is left of the lab. Call it from the main thread.

    Raises:
        ArgumentError: no command, a MULTIRING variable that makes no sense, or the name is taken.
        CommandError: the command, mpiexec or torchrun does not exist or cannot be executed.
        LaunchError: the system refuses so many processes, `log_dir` cannot be written, pyroute2 is missing.
        UnsupportedError: not Linux, not root, a kernel without what the lab needs, an unknown mpiexec.
        StateError: not called from the main thread.
    """
    options = options or Options()
    environment = inherited_environment()
    check_can_run("multiring lab", command, environment)
    outer = Settings.from_environment(environment)
    place = {"job": job_name(outer.job, secrets.token_hex(8)), "secret": secrets.token_hex(32)}
    if options.tells_topology and outer.topology is None:
        place["topology"] = TOPOLOGY_FILE
    version = ""
    if options.launcher is not Launcher.MULTIRING:
        check_command(options.launcher.value, environment)
    if options.launcher is Launcher.MPIEXEC:
        version = version_of_mpiexec(environment)
    processes = processes_of(plan, options.launcher, command, version, place)

    def work() -> int:
        with Lab(plan) as lab:
            return LabJob(lab, processes, environment, options).run()

    require_root()
    return run_in_pid_namespace(work)


def _starts(lab: Lab, processes: Sequence[Process], environment: dict[str, str]) -> list[Start]:
    core_of = cores_of_cpus(usable_cpus())
    threads = threads_per_rank(core_of, lab.plan.num_ranks)
    # One of several processes to a rank only; other launchers' ranks are theirs to place.
    is_ranks = len(processes) == lab.plan.num_ranks and all("rank" in process.settings for process in processes)
    shares = share_cpus(core_of, len(processes)) if is_ranks else [frozenset(core_of)] * len(processes)
    folder = Path.cwd()
    return [
        Start(
            name=process.name,
            tag=process.tag,
            log_files=log_files(process.log_name),
            command=process.command,
            environment=OPEN_MPI_STATE
            | environment_of_process(environment, threads, **process.settings)
            | dict(process.variables),
            prepare=lab.hosts[process.host].preparation(folder, cpus),
            birthplace=lab.hosts[process.host].birthplace,
        )
        for process, cpus in zip(processes, shares, strict=True)
    ]


@dataclass(slots=True, eq=False)
class _Errand:
    """A process that was asked for from within a host."""

    process: "subprocess.Popen[bytes]"
    caller: Caller


class LabJob(Job):
    """The processes in a running lab. The hosts' keepers end what they leave: this has little to do for it."""

    def __init__(self, lab: Lab, processes: Sequence[Process], environment: dict[str, str], options: Options) -> None:
        super().__init__(_starts(lab, processes, environment), options.log_dir)
        self._lab = lab
        self._host_of = [process.host for process in processes]
        self._name = options.name
        self._due = sorted(options.faults, key=lambda timed: timed.at_s)
        self._control_sockets: list[ControlSocket] = []
        self._errands: list[_Errand] = []
        self._begin = 0.0  # when the last process was started, by the monotonic clock

    def run(self) -> int:
        """As `Job.run`; where nobody survived the faults, what a shell says of a killed process."""
        code = super().run()
        return code or (128 + signal.SIGKILL if all(member.is_excused for member in self._members) else 0)

    def _open(self, stack: contextlib.ExitStack) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)  # handled from here on
        self._add_control_socket(stack, open_lab_socket(self._name, self._on_fault))
        for host in self._lab.hosts:
            with inside(host.network, Space.NET):
                self._add_control_socket(stack, open_host_socket(self._on_errand))

    def _add_control_socket(self, stack: contextlib.ExitStack, control_socket: ControlSocket) -> None:
        self._control_sockets.append(control_socket)
        stack.callback(control_socket.close)

    def _born(self, member: Member) -> None:
        self._begin = time.monotonic()
        member.known_as = _number_outside(member.pid)

    def _watch_more(self, poll: selectors.BaseSelector) -> None:
        for control_socket in self._control_sockets:
            control_socket.watch(poll)

    # -- faults

    def _wake_at(self) -> float | None:
        return self._begin + self._due[0].at_s if self._due else None

    def _do_more(self) -> None:
        while self._due and self._begin + self._due[0].at_s <= time.monotonic():
            fault = self._due.pop(0).fault
            try:
                self._apply(fault)
            except MultiringError as error:
                self._say(f"lab: {error}")
        self._reap_errands()

    def _on_fault(self, caller: Caller, message: Message) -> None:
        self._apply(parse_fault(message["fault"], self._lab.plan))
        caller.answer(error=None)

    def _apply(self, fault: Fault) -> None:
        self._lab.apply(fault)
        self._say(f"lab: {fault}")
        self._patience_s = _PATIENCE_S
        if fault.kind is Kind.KILL:
            for member, host in zip(self._members, self._host_of, strict=True):
                member.is_excused |= host == fault.host and member.code is None

    # -- what hosts ask for

    def _on_errand(self, caller: Caller, message: Message) -> None:
        host = self._lab.hosts[self._lab.plan.host_named(message["host"])]
        if not host.is_alive:
            raise LaunchError(f"{host.name}: no route to host")
        folder = Path(message["folder"])
        with host.birthplace():
            process = subprocess.Popen(  # noqa: S603 -- who may ask for it is checked at the door
                ["/bin/sh", "-c", message["command"]],
                stdin=caller.descriptors[0],
                stdout=caller.descriptors[1],
                stderr=caller.descriptors[2],
                env=message["environment"],
                start_new_session=True,
                preexec_fn=host.preparation(folder),  # noqa: PLW1509 -- this process has one thread
            )
        caller.release()
        caller.hang_up = lambda: _hang_up(process)
        self._errands.append(_Errand(process, caller))

    def _reap_errands(self) -> None:
        for errand in list(self._errands):
            code = errand.process.poll()
            if code is not None:
                errand.caller.answer(code=code if code >= 0 else 128 - code)
                self._errands.remove(errand)

    # -- the end

    def _stop_leftovers(self, known: set[int]) -> None:
        for errand in self._errands:
            if errand.process.pid not in known:
                _hang_up(errand.process)

    def _end_leftovers(self, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        self._stop_leftovers(set())
        for errand in self._errands:
            with contextlib.suppress(subprocess.TimeoutExpired):
                errand.process.wait(max(deadline - time.monotonic(), 0.0))
            signal_group(errand.process.pid, signal.SIGKILL)
            errand.process.wait()
        self._errands.clear()


def _number_outside(pid: int) -> int:
    """Return the number that /proc, mounted outside, has for this process's child."""
    descriptor = os.pidfd_open(pid)
    try:
        lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii").splitlines()
    finally:
        os.close(descriptor)
    return next(int(line.split()[1]) for line in lines if line.startswith("Pid:"))


def _hang_up(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        signal_group(process.pid, signal.SIGTERM)
        signal_group(process.pid, signal.SIGCONT)
