"""Virtual hosts of a lab with a real sshd each, for tests of launchers that reach hosts by ssh.

Each host has its own name, addresses, processes, home folder and /tmp. The user is an ordinary one that exists in these
hosts only. The machine's other files, such as this repository, are the same on all hosts.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.support import secret_search

from multiring.lab import Lab, LabPlan
from multiring.lab.host import Host

SSHD = Path("/usr/sbin/sshd")
USER, UID = "learner", 61_234
HOME = Path("/home/learner")
ROOT = Path(__file__).parents[2]
RUN = (sys.executable, "-m", "multiring", "run")
_UP_S = 240.0
_LONGEST_S = 240.0
# All of /etc is mounted: a mount on /etc/passwd alone is lost when a package that is being installed adds a user.
_FURNISH = """
mount -t tmpfs -o mode=755 tmpfs /home
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/sshd /home/learner/.ssh
cp -a /etc /run/etc
echo 'learner:x:61234:61234::/home/learner:/bin/bash' >> /run/etc/passwd
echo 'learner:x:61234:' >> /run/etc/group
echo 'learner:*:20000:0:99999:7:::' >> /run/etc/shadow
mount --bind /run/etc /etc
ssh-keygen -q -t ed25519 -N '' -f /run/sshd/host_key
cat > /run/sshd/config <<END
HostKey /run/sshd/host_key
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PrintMotd no
LogLevel ERROR
END
"""


Process = subprocess.Popen[bytes]


class SshHosts:
    """Hosts host0, host1, ... of a lab, with sshd on each and one key for all.

    Args:
        lab: the running lab.
        folder: a folder of the test, which all hosts can read.
    """

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self._processes: list[subprocess.Popen[bytes]] = []
        key = folder / "key"
        subprocess.run(["/usr/bin/ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        public = Path(f"{key}.pub").read_text(encoding="ascii")
        for host in lab.hosts:
            self.as_root(host, _with_open_paths() + _FURNISH)
        keys = [self.as_root(host, "cat /run/sshd/host_key.pub").split()[:2] for host in lab.hosts]
        known = "".join(f"host{number} {' '.join(words)}\n" for number, words in enumerate(keys))
        for host in lab.hosts:
            for name, text in (
                ("authorized_keys", public),
                ("id_ed25519", key.read_text("ascii")),
                ("known_hosts", known),
                ("id_ed25519.pub", public),
            ):
                self.as_root(host, f"cat > {HOME}/.ssh/{name}", text)
            self.as_root(host, f"chmod -R go= {HOME}/.ssh && chown -R {UID}:{UID} {HOME}")
            self._processes.append(self._popen(host, [str(SSHD), "-D", "-e", "-f", "/run/sshd/config"], None))
        for number in range(len(lab.hosts)):
            self._wait_for_sshd(number)

    def close(self) -> None:
        """Kill what was started, and reap it."""
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):  # unwritten input
                        pipe.close()

    def as_root(self, host: Host, script: str, text: str = "") -> str:
        """Run a shell script in a host as root and return its output."""
        with self._popen(host, ["/bin/sh", "-c", script], None, pipes=True) as process:
            out, err = process.communicate(text.encode(), timeout=_UP_S)
        assert process.returncode == 0, err.decode()
        return out.decode()

    def start(
        self, number: int, command: Sequence[str], folder: Path = HOME, **variables: str
    ) -> "subprocess.Popen[bytes]":
        """Start a command of the ordinary user on host `number`."""
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
        environment = {
            **kept, "HOME": str(HOME), "USER": USER, "LOGNAME": USER, "SHELL": "/bin/bash", "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1", **variables,
        }  # fmt: skip
        process = self._popen(self.lab.hosts[number], command, environment, folder=folder, pipes=True)
        self._processes.append(process)
        return process

    def run(
        self, number: int, command: Sequence[str], folder: Path = HOME, text: bytes | None = None, **variables: str
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command of the ordinary user on host `number`."""
        process = self.start(number, command, folder, **variables)
        out, err = process.communicate(text, timeout=_LONGEST_S)
        return subprocess.CompletedProcess(command, process.returncode, out.decode(), err.decode())

    def launch(self, *words: str, on: int = 0, **variables: str) -> "subprocess.CompletedProcess[str]":
        """Run `multiring run` with `words` on a host."""
        process = self.start(on, [*RUN, *words], HOME, **variables)
        out, err = process.communicate(timeout=_LONGEST_S)
        return subprocess.CompletedProcess(words, process.returncode, out.decode(), err.decode())

    def write(self, name: str, program: str, hosts: Sequence[int] | None = None) -> Path:
        """Write a file into the user's home folder of some hosts (default: all), and return its path."""
        for number in range(len(self.lab.hosts)) if hosts is None else hosts:
            script = f"mkdir -p $(dirname {HOME}/{name}); cat > {HOME}/{name}; chown -R {UID}:{UID} {HOME}"
            self.as_root(self.lab.hosts[number], script, textwrap.dedent(program))
        return HOME / name

    def read(self, number: int, name: str) -> str:
        """Return the content of a file in the user's home folder on a host."""
        return self.as_root(self.lab.hosts[number], f"cat {HOME}/{name}")

    def places_of(self, secret: str, number: int, *words: str) -> list[str]:
        """Return where a secret is found on a host; `words` are those of `secret_search`, with "-" for the secret."""
        host = self.lab.hosts[number]
        self.as_root(host, "cat > /run/search.py", Path(secret_search.__file__).read_text("utf-8"))
        found: list[str] = json.loads(self.as_root(host, f"python3 /run/search.py {' '.join(words)}", secret))
        return found

    def processes_of_user(self, number: int) -> list[str]:
        """Return the command lines of the user's processes on a host."""
        is_users = f'[ "$(stat -c %u $each 2>/dev/null)" = {UID} ]'
        script = f"for each in /proc/[0-9]*; do {is_users} && tr '\\0' ' ' <$each/cmdline && echo; done; true"
        return [line for line in self.as_root(self.lab.hosts[number], script).splitlines() if line.strip()]

    def wait_until_gone(self, number: int, within_s: float = 120.0) -> list[str]:
        """Wait until the user has no process on a host, and return those that are left after `within_s` seconds."""
        until = time.monotonic() + within_s
        while left := self.processes_of_user(number):
            if time.monotonic() > until:
                return left
            time.sleep(0.1)
        return []

    def _wait_for_sshd(self, number: int) -> None:
        until = time.monotonic() + _UP_S
        while self.run(0, ["ssh", "-oBatchMode=yes", f"host{number}", "true"]).returncode != 0:
            assert time.monotonic() < until, f"sshd of host{number} does not answer"
            time.sleep(0.1)

    def _popen(
        self,
        host: Host,
        command: Sequence[str],
        environment: Mapping[str, str] | None,
        folder: Path = Path("/"),
        *,
        pipes: bool = False,
    ) -> "subprocess.Popen[bytes]":
        enter = host.preparation(Path("/"))
        become = environment is not None
        pipe = subprocess.PIPE if pipes else subprocess.DEVNULL
        with host.birthplace():
            return subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=environment,
                start_new_session=True,
                preexec_fn=_entering(enter, folder, become=become),  # noqa: PLW1509 -- this process has one thread
            )


def _with_open_paths() -> str:
    """Return a script that lets an ordinary user enter Python and this repository, which may be in root's home."""
    needed = {Path(sys.base_prefix), Path(sys.prefix), ROOT, ROOT / ".venv"}
    needed = {each.resolve() for each in needed if each.exists()}
    closed = {folder for path in needed for folder in path.parents if not folder.stat().st_mode & 0o001}
    closed = {each for each in closed if not closed & set(each.parents)}
    lines = ["set -e", "mount -t tmpfs tmpfs /mnt"]
    for number, path in enumerate(sorted(needed)):
        if closed & set(path.parents):
            lines.append(f"mkdir /mnt/{number}; mount --bind {path} /mnt/{number}")
    lines += [f"mount -t tmpfs -o mode=755 tmpfs {folder}" for folder in closed]
    for number, path in enumerate(sorted(needed)):
        if closed & set(path.parents):
            lines.append(f"mkdir -p {path}; mount --bind /mnt/{number} {path}")
    return "\n".join(lines)


def _entering(enter: Callable[[], None], folder: Path, *, become: bool) -> Callable[[], None]:
    def prepare() -> None:
        enter()
        if become:
            os.setgroups([])
            os.setgid(UID)
            os.setuid(UID)
        os.chdir(folder)

    return prepare


@contextlib.contextmanager
def ssh_hosts(count: int, folder: Path) -> Iterator[SshHosts]:
    """Start `count` hosts with sshd, and end them after the block."""
    with Lab(LabPlan(hosts=count)) as lab:
        made = SshHosts(lab, folder)
        try:
            yield made
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            made.close()
