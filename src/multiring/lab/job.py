"""Run a command on every slot of a lab.

During the job, the launcher serves requests and injects faults. After the job, the lab is shut down.
"""

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

from multiring._launch.commands import check_can_run, check_command, environment_of_process
from multiring._launch.cores import cores_of_cpus, share_cpus, threads_per_rank, usable_cpus
from multiring._launch.job import Job, log_files
from multiring._launch.job_process import JobProcess, Start
from multiring._launch.leftovers import signal_group
from multiring._launch.local import job_name
from multiring._launch.mpiexec import version_of_mpiexec
from multiring._limits.cpu_limit import cpu_limit
from multiring._settings import Settings, inherited_environment
from multiring.errors import LaunchError, MultiringError
from multiring.lab.control_socket import (
    Caller,
    ControlSocket,
    Message,
    check_lab_name,
    open_host_socket,
    open_lab_socket,
)
from multiring.lab.faults import Fault, FaultType, TimedFault, parse_fault
from multiring.lab.launchers import OPEN_MPI_STATE, Launcher, Process, processes_of
from multiring.lab.machine import Lab, require_root
from multiring.lab.namespaces import NamespaceKind, inside
from multiring.lab.pid_namespace import FORWARDED, run_in_pid_namespace
from multiring.lab.plan import LabPlan
from multiring.lab.topology_file import TOPOLOGY_FILE

_PATIENCE_S = 10.0  # after a fault, the time for the other processes to report errors after a first failure


@dataclass(frozen=True, kw_only=True, slots=True)
class LabOptions:
    """Options of a job in a lab.

    Args:
        launcher: the launcher that starts the ranks.
        name: the lab's name, by which `ask_lab` finds it.
        log_dir: a folder for copies of the output of each process.
        faults: the faults that the lab injects by itself.
        tells_topology: whether the ranks get a topology file of the lab. If MULTIRING_TOPOLOGY is set already, it is
            kept.

    Raises:
        ArgumentError: the name is not valid for a lab.
    """

    launcher: Launcher = Launcher.MULTIRING
    name: str = "lab"
    log_dir: Path | None = None
    faults: tuple[TimedFault, ...] = ()
    tells_topology: bool = True

    def __post_init__(self) -> None:
        check_lab_name(self.name)


def run_lab(plan: LabPlan, command: Sequence[str], options: LabOptions | None = None) -> int:
    """Run `command` on every slot of a new lab and return the job's exit code.

    The exit code is defined as for `run_local`.

    After a fault, the first failure does not stop the job at once: the other processes have 10 seconds to report
    errors. Processes of a host that a fault killed do not count as failed. If no other processes are left, the exit
    code is 137. The lab ends with this process in any case. Call the function as root, from the main thread.

    Raises:
        ArgumentError: `command` is empty, a MULTIRING variable has an invalid value, or another lab has the name.
        CommandError: the command, mpiexec or torchrun does not exist or cannot be executed.
        LaunchError: the system refuses so many processes, `log_dir` cannot be written, or pyroute2 is missing.
        UnsupportedError: the system is not Linux, the user is not root, the kernel lacks a feature, or mpiexec is of
            an unknown kind.
        StateError: the caller is not the main thread.
    """
    options = options or LabOptions()
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
    threads = threads_per_rank(core_of, lab.plan.num_ranks, cpu_limit())
    # Assign CPUs only if the lab starts each rank itself. Other launchers place their ranks themselves.
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
    """A process that another process of the lab has requested, with the connection for its exit code."""

    process: "subprocess.Popen[bytes]"
    caller: Caller


class LabJob(Job):
    """A job in a running lab.

    The end of a host's keeper also ends leftover processes of the host.
    """

    def __init__(
        self, lab: Lab, processes: Sequence[Process], environment: dict[str, str], options: LabOptions
    ) -> None:
        super().__init__(_starts(lab, processes, environment), options.log_dir)
        self._lab = lab
        self._host_of = [process.host for process in processes]
        self._name = options.name
        self._due = sorted(options.faults, key=lambda timed: timed.at_s)
        self._control_sockets: list[ControlSocket] = []
        self._errands: list[_Errand] = []
        self._begin = 0.0  # the monotonic time at which the last process was started

    def run(self) -> int:
        """Run the job as `Job.run` does.

        Return 137, the code of a killed process, if faults killed every process.
        """
        code = super().run()
        return code or (128 + signal.SIGKILL if all(member.is_excused for member in self._members) else 0)

    def _open(self, stack: contextlib.ExitStack) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)  # the signal handlers are installed now
        self._add_control_socket(stack, open_lab_socket(self._name, self._on_fault))
        for host in self._lab.hosts:
            with inside(host.network, NamespaceKind.NET):
                self._add_control_socket(stack, open_host_socket(self._on_errand))

    def _add_control_socket(self, stack: contextlib.ExitStack, control_socket: ControlSocket) -> None:
        self._control_sockets.append(control_socket)
        stack.callback(control_socket.close)

    def _born(self, member: JobProcess) -> None:
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
        if fault.kind is FaultType.KILL:
            for member, host in zip(self._members, self._host_of, strict=True):
                member.is_excused |= host == fault.host and member.code is None

    # -- requests from hosts

    def _on_errand(self, caller: Caller, message: Message) -> None:
        host = self._lab.hosts[self._lab.plan.host_named(message["host"])]
        if not host.is_alive:
            raise LaunchError(f"{host.name}: no route to host")
        folder = Path(message["folder"])
        with host.birthplace():
            process = subprocess.Popen(  # noqa: S603 -- the control socket checks the caller's user
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
    """Return the process ID that users outside the lab see for `pid`, a child of this process."""
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
