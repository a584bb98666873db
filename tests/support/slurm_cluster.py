"""A real Slurm on the virtual hosts of a lab: slurmctld on host0, slurmd and munged on every host, an ordinary user.

The daemons are those of Debian's packages slurmctld, slurmd, slurm-client and munge; `make slurm-test` installs them.
Every host has its own name, address, /run, /var/log and /var/spool. The user's home and /tmp are either the hosts' own
or shared by all hosts. With the lab everything ends, also what a job has detached.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.support.slurm_host import HostPlan, is_within

from multiring.lab import Lab, LabPlan, parse_fault
from multiring.lab.host import Host

ROOT = Path(__file__).parents[2]
USER, USER_NUMBER = "trainee", 7001
HOME = "/home/trainee"
PROGRAMS = "/opt/programs"  # the same on all hosts, and not the user's to write
NEEDED = ("slurmctld", "slurmd", "srun", "munged")
_MUNGE_SOCKET = "/run/munge/munge.socket.2"
_UP_S, _COMMAND_S = 120.0, 200.0
_ETC = Path("/etc/slurm")

_CONF = """
ClusterName=multiring
SlurmctldHost=host0
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
# A host that does not answer is lost within 20 s; the default is five minutes. Slurm waits for its last question's
# answer for MessageTimeout.
SlurmdTimeout=5
SlurmctldTimeout=30
KillWait=3
MessageTimeout=5
InactiveLimit=0
DebugFlags=NO_CONF_HASH
MpiDefault={mpi}
NodeName=host[0-{last}] CPUs={cpus} RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """Return the programs that a cluster needs and that are not on PATH."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    return [name for name in NEEDED if shutil.which(name, path=path) is None]


class SlurmCluster:
    """A context manager within which the cluster runs.

    Args:
        hosts: the number of hosts.
        shared: whether the hosts share the user's home and /tmp.
        mpi: Slurm's MpiDefault.
        cpus: the number of tasks that a host takes.
        environment: variables that the user's commands get, too.
    """

    def __init__(
        self,
        hosts: int = 3,
        *,
        shared: bool = False,
        mpi: str = "none",
        cpus: int = 4,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.hosts = hosts
        self.is_shared, self._mpi, self._cpus = shared, mpi, cpus
        self._more = dict(environment or {})
        self._stack = contextlib.ExitStack()
        self._daemons: dict[tuple[str, int], subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "SlurmCluster":  # noqa: PYI034 -- typing.Self is of 3.11
        with contextlib.ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="multiring-slurm-")))
            self._write_folder()
            self.lab = stack.enter_context(Lab(LabPlan(hosts=self.hosts, slots=1)))
            stack.callback(self._reap)
            for host in self.lab.hosts:
                command = (sys.executable, "-m", "tests.support.slurm_host", str(self.folder))
                self._run(self._spawn(host, command, {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}"}, folder="/"))
            for number in range(self.hosts):
                self._start_munged(number)
            self._start("slurmctld", 0, "slurmctld", "-D", "-i")
            for number in range(self.hosts):
                self.start_slurmd(number)
            self.wait_for_idle()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # -- commands

    def user(self, *command: str, host: int = 0, folder: str = HOME, **variables: str) -> "subprocess.Popen[str]":
        """Start a command of the ordinary user on a host."""
        environment = {
            "HOME": HOME,
            "USER": USER,
            "LOGNAME": USER,
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": f"{ROOT}/src:{ROOT}",
            **self._more,
            **variables,
        }
        return self._spawn(self.lab.hosts[host], command, environment, folder=folder, user=USER_NUMBER)

    def run(
        self, *command: str, host: int = 0, timeout_s: float = _COMMAND_S, folder: str = HOME, **variables: str
    ) -> str:
        """Return what a command of the user wrote to standard output; it must exit with 0."""
        return self._run(self.user(*command, host=host, folder=folder, **variables), timeout_s)

    def root(self, *command: str, host: int = 0, timeout_s: float = _COMMAND_S) -> str:
        """Return what a command of root wrote to standard output; it must exit with 0."""
        return self._run(self._spawn(self.lab.hosts[host], command, dict(os.environ), folder="/"), timeout_s)

    def program(self, name: str, text: str) -> str:
        """Put a program on all hosts, and return its path."""
        path = self.folder / "programs" / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
        return f"{PROGRAMS}/{name}"

    # -- state

    def states(self) -> dict[str, str]:
        """Return each host's state in Slurm's words, like idle."""
        try:
            lines = self.root("sinfo", "-h", "-N", "-o", "%N %t").splitlines()
        except AssertionError:
            return {}
        return dict(line.split() for line in lines)

    def jobs(self) -> list[str]:
        """Return the numbers of the jobs that are not over."""
        return self.root("squeue", "-h", "-o", "%i").split()

    def wait_for(self, condition: Callable[[], object], limit_s: float = 200.0) -> None:
        """Block until `condition` holds."""
        latest = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < latest, f"not within {limit_s:g} s\n{self.logs()}"
            time.sleep(0.1)

    def wait_for_idle(self) -> None:
        """Block until every host is up and has no job."""
        self.wait_for(lambda: self.states() == {f"host{each}": "idle" for each in range(self.hosts)}, _UP_S)

    def logs(self) -> str:
        """Return the ends of the daemons' logs."""
        ends = []
        for path in sorted((self.folder / "logs").iterdir()):
            lines = path.read_text("utf-8", errors="replace").splitlines()
            ends += [f"--- {path.name}", *lines[-20:]]
        return "\n".join(ends)

    def set_mpi(self, mpi: str) -> None:
        """Change MpiDefault."""
        self._mpi = mpi
        self._write_conf()
        self.root("scontrol", "reconfigure")

    # -- faults

    def kill_host(self, number: int) -> None:
        """Kill all processes of a host at once, and remove it from the network."""
        self.lab.apply(parse_fault(["kill", f"host{number}"], self.lab.plan))

    def kill_slurmd(self, number: int) -> None:
        """Kill the daemon of a host, but not what it has started."""
        self._daemons["slurmd", number].kill()
        self._daemons["slurmd", number].wait()

    def start_slurmd(self, number: int) -> None:
        """Start the daemon of a host."""
        self._start("slurmd", number, "slurmd", "-D", "-N", f"host{number}")

    # -- making

    def _write_folder(self) -> None:
        self.folder.chmod(0o755)
        for name in ("etc", "logs", "programs", "home", "tmp"):
            (self.folder / name).mkdir(mode=0o755)
        (self.folder / "tmp").chmod(0o1777)
        key = self.folder / "munge.key"
        key.touch(mode=0o400)
        key.write_bytes(secrets.token_bytes(128))
        users = Path("/etc/passwd").read_text("utf-8")
        users += f"{USER}:x:{USER_NUMBER}:{USER_NUMBER}::{HOME}:/bin/bash\n"
        (self.folder / "passwd").write_text(users, encoding="utf-8")
        groups = Path("/etc/group").read_text("utf-8") + f"{USER}:x:{USER_NUMBER}:\n"
        (self.folder / "group").write_text(groups, encoding="utf-8")
        self._write_conf()
        kept = [str(self.folder), str(ROOT), sys.base_prefix, str(Path(sys.prefix).resolve())]
        hidden = {"/tmp", "/home"}  # noqa: S108 -- the hosts' own
        for path in map(Path, kept):
            # Ordinary users cannot pass through some folders, such as /root. The hosts get others in their place.
            closed = [each for each in reversed(path.parents) if not each.stat().st_mode & 0o001]
            hidden |= {str(each) for each in closed[:1]}
        hidden = {each for each in hidden if not any(is_within(Path(each), Path(other)) for other in hidden - {each})}
        bound = [
            (str(self.folder / "etc"), str(_ETC)),
            (str(self.folder / "passwd"), "/etc/passwd"),
            (str(self.folder / "group"), "/etc/group"),
            (str(self.folder / "programs"), PROGRAMS),
        ]
        shared = {"/tmp": str(self.folder / "tmp"), "/home": str(self.folder / "home")} if self.is_shared else {}  # noqa: S108
        plan = HostPlan(hidden=sorted(hidden), shared=shared, kept=kept, bound=bound, user=USER_NUMBER, home=HOME)
        plan.write(self.folder)
        for folder in (_ETC, Path(PROGRAMS)):  # the places must exist on the machine
            folder.mkdir(parents=True, exist_ok=True)

    def _write_conf(self) -> None:
        text = _CONF.format(mpi=self._mpi, last=self.hosts - 1, cpus=self._cpus)
        text += f"SlurmctldLogFile={self.folder}/logs/slurmctld\nSlurmdLogFile={self.folder}/logs/slurmd-%n\n"
        (self.folder / "etc" / "slurm.conf").write_text(text, encoding="utf-8")
        # PMIx names files by process numbers, which are the same on several hosts; /tmp may be shared by them.
        (self.folder / "etc" / "mpi.conf").write_text("PMIxCliTmpDirBase=/dev/shm\n", encoding="utf-8")

    def _start_munged(self, number: int) -> None:
        log = f"{self.folder}/logs/munged-host{number}"
        Path(log).touch(mode=0o600)
        self.root("mkdir", "-p", "/run/munge", host=number)
        options = ("--foreground", "--force", f"--key-file={self.folder}/munge.key", f"--socket={_MUNGE_SOCKET}")
        files = (f"--log-file={log}", "--pid-file=/run/munge/munged.pid", "--seed-file=/var/lib/munge/munged.seed")
        self._start("munged", number, "munged", *options, *files)
        self.wait_for(lambda: self._is_munged_up(number), _UP_S)

    def _is_munged_up(self, number: int) -> bool:
        process = self._spawn(self.lab.hosts[number], ("munge", "-n"), dict(os.environ), folder="/")
        process.communicate(timeout=_COMMAND_S)
        return process.returncode == 0

    def _start(self, kind: str, number: int, *command: str) -> None:
        with (self.folder / "logs" / f"{kind}-{number}.output").open("ab") as log:
            environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
            host = self.lab.hosts[number]
            with host.birthplace():
                self._daemons[kind, number] = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                    preexec_fn=host.preparation(Path("/")),  # noqa: PLW1509 -- one thread
                )

    def _reap(self) -> None:
        for process in self._daemons.values():
            process.kill()
            process.wait()

    def _spawn(
        self,
        host: Host,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        folder: str,
        user: int | None = None,
    ) -> "subprocess.Popen[str]":
        enter = host.preparation(Path(folder))

        def prepare() -> None:
            enter()
            if user is not None:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)

        with host.birthplace():
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=dict(environment),
                preexec_fn=prepare,  # noqa: PLW1509 -- one thread
            )

    def _run(self, process: "subprocess.Popen[str]", timeout_s: float = _COMMAND_S) -> str:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            raise AssertionError(
                f"{process.args!r} took more than {timeout_s:g} s\n{output}{errors}{self.logs()}"
            ) from None
        assert process.returncode == 0, f"{process.args!r} exited with {process.returncode}\n{output}{errors}"
        return output
