"""A `multiring lab` under test, and its leftovers, found in the kernel's own tables."""

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

DEADLINE_S = 240.0
_NAMESPACES = ("mnt", "net", "uts", "ipc", "pid", "pid_for_children")


def namespaces_of(process: str) -> set[str]:
    """Return the namespaces of a process in /proc and those of its future children."""
    found = set()
    for kind in _NAMESPACES:
        with contextlib.suppress(OSError):
            found.add(str(Path(f"/proc/{process}/ns/{kind}").readlink()))
    return found


def traces_of_network() -> tuple[set[str], list[str]]:
    """Return the interfaces of this network namespace and the mounts of this mount namespace."""
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    return set(os.listdir("/sys/class/net")), mounts  # noqa: PTH208 -- names are what is compared


class LabRun:
    """A running `multiring lab`, in a session of its own."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self._mark = f"TEST_MARK={secrets.token_hex(8)}"
        name, _, value = self._mark.partition("=")
        self.before = traces_of_network()
        kept = {name: text for name, text in os.environ.items() if not name.startswith("MULTIRING_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "multiring", "lab", *arguments],
            env={**kept, "OMP_NUM_THREADS": "1", **variables, name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.out = self.err = ""
        # File descriptors of the lab's namespaces. While one is open, the kernel does not reuse the namespace's number.
        self._namespaces: dict[str, int] = {}

    @property
    def namespaces(self) -> set[str]:
        """The names of the lab's namespaces that `wait_for_lines` has found."""
        return set(self._namespaces)

    def wait_for_lines(self, count: int) -> list[str]:
        """Return the next `count` lines of output, and record the lab's current namespaces."""
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(count)]
        own = namespaces_of("self")
        for pid in self.members():
            for kind in _NAMESPACES:
                with contextlib.suppress(OSError):
                    self._take_down(os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC), own)
        return lines

    def _take_down(self, namespace: int, own: set[str]) -> None:
        name = os.readlink(f"/proc/self/fd/{namespace}")  # noqa: PTH115 -- a name, not a path
        if name in own or name in self._namespaces:
            os.close(namespace)
        else:
            self._namespaces[name] = namespace

    def members(self) -> list[int]:
        """Return the lab's processes: those with its mark and those in one of its namespaces."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            with contextlib.suppress(OSError):
                is_marked = self._mark.encode() in (entry / "environ").read_bytes().split(b"\0")
                if is_marked or self._namespaces.keys() & namespaces_of(entry.name):
                    found.append(int(entry.name))
        return found

    def keepers(self) -> list[int]:
        """Return the processes that are pid 1 of a namespace, outermost namespace first."""
        found = []
        for pid in self.members():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
                numbers = re.search(r"^NSpid:\t(.*)$", status, re.MULTILINE)
                if numbers is not None and numbers[1].split()[-1] == "1":
                    found.append((len(numbers[1].split()), pid))
        return [pid for _, pid in sorted(found)]

    def finish(self) -> int:
        """Wait for the command to end and return its exit code."""
        self.out, self.err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode

    def left(self) -> list[str]:
        """Return the lab's leftovers: processes, open namespaces, interfaces and mounts."""
        found = [f"process {pid}" for pid in self.members()]
        for entry in Path("/proc").glob("[0-9]*/fd/*"):
            with contextlib.suppress(OSError):
                if entry.parts[2] != str(os.getpid()) and str(entry.readlink()) in self._namespaces:
                    found.append(f"{entry} -> {entry.readlink()}")
        interfaces, mounts = traces_of_network()
        found += [f"interface {name}" for name in interfaces - self.before[0]]
        found += [f"mount {line}" for line in mounts if line not in self.before[1]]
        return found

    def left_after(self, seconds: float) -> list[str]:
        """Return the leftovers once there are none, or after `seconds`."""
        deadline = time.monotonic() + seconds
        while (found := self.left()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def close(self) -> None:
        """Kill all processes of the lab and forget its namespaces."""
        self.process.kill()
        self.process.communicate()
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while self._namespaces:
            os.close(self._namespaces.popitem()[1])


# Ways for a lab to end: the ranks' command, the receiver of the signal, the signal, and the exit code.
ENDINGS: dict[str, tuple[str, str, int, int]] = {
    "normally": ("sleep 0.2", "nobody", 0, 0),
    "by a failure": ("[ $MULTIRING_RANK != 1 ] || exit 3; sleep 1000", "nobody", 0, 3),
    "by Ctrl-C": ("sleep 1000", "lab", signal.SIGINT, 130),
    "by SIGTERM": ("sleep 1000", "lab", signal.SIGTERM, 143),
    "by SIGHUP": ("sleep 1000", "lab", signal.SIGHUP, 129),
    "by kill -9 of the lab": ("sleep 1000", "lab", signal.SIGKILL, -9),
    "by kill -9 of its pid 1": ("sleep 1000", "first", signal.SIGKILL, 137),
    "by kill -9 of a keeper": ("sleep 1000", "keeper", signal.SIGKILL, 137),
    "by kill -9 of a slot": ("sleep 1000", "slot", signal.SIGKILL, 137),
    "by kill -9 while it starts": ("sleep 1000", "early", signal.SIGKILL, -9),
}


def end(ending: str, delay_s: float = 0.0) -> LabRun:
    """Run a lab of three hosts until it ends as `ending` says. Its ranks leave detached processes behind.

    Returns:
        The finished lab.

    Raises:
        AssertionError: the exit code was wrong.
    """
    does, whom, number, code = ENDINGS[ending]
    # One child runs in a session of its own. The other one lacks the environment that marks it as the lab's.
    script = f'setsid sleep 1001 & env -i /bin/sleep 1002 & echo "up $$"; {does}'
    wires = ("--link", "1gbit", "--rail", "250mbit", "--rack", "2", "--uplink", "500mbit")
    lab = LabRun("--hosts", "3", *wires, "--", "sh", "-c", script)
    try:
        if whom == "early":
            time.sleep(delay_s)
            lab.process.kill()
        else:
            lab.wait_for_lines(3)
            time.sleep(delay_s)
            target = {
                "lab": lambda: lab.process.pid,
                "first": lambda: lab.keepers()[0],
                "keeper": lambda: lab.keepers()[1],
                "slot": lambda: next(pid for pid in lab.members() if command_of(pid).startswith(b"sh\0-c")),
            }
            if whom != "nobody":
                os.kill(target[whom](), number)
        found = lab.finish()
        assert found == code, f"{ending}: exit code {found}, want {code}: {lab.err}"
    except BaseException:
        lab.close()
        raise
    return lab


def command_of(pid: int) -> bytes:
    """Return a process's command line, or b"" if the process has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
