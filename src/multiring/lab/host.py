"""A virtual host: namespaces held by the keeper process, the host's pid 1.

The kernel cleans up after a host. When the keeper ends, the kernel kills every process of its PID namespace, including
detached processes. When the last process is gone, the kernel removes the other namespaces with their mounts, interfaces
and rates. The keeper is killed with the process that forked it, so a host ends with its lab in any case.
"""

import contextlib
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from multiring.errors import StateError, UnsupportedError
from multiring.lab.namespaces import (
    Mount,
    NamespaceKind,
    die_with_parent,
    enter,
    inside,
    inside_new,
    mount,
    open_namespace,
    unshare,
)
from multiring.lab.topology_file import TOPOLOGY_FILE

AGENT = "/dev/shm/.multiring-lab/ssh"  # noqa: S108 -- on the host's own tmpfs, invisible outside
_KEPT = (NamespaceKind.MOUNT, NamespaceKind.UTS, NamespaceKind.IPC, NamespaceKind.NET)
_SHOWN = (*_KEPT, NamespaceKind.PID)
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 -- the standard path of shared memory
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_READY = b"+"
_WORD_BYTES = 4096
_KEEPER_S = 10.0  # time-out for an answer that usually takes a millisecond


class Host:
    """A running virtual host, without links at first.

    It ends with `close` or with the thread that made it.

    Args:
        name: the host name.
        hosts_file: the text of the host's /etc/hosts.
        topology: the text of the host's TOPOLOGY_FILE.

    Raises:
        UnsupportedError: the kernel does not support virtual hosts, or this process has too few rights.
    """

    def __init__(self, name: str, hosts_file: str, topology: str = "") -> None:
        self.name = name
        self._spaces: dict[NamespaceKind, int] = {}
        self._channel, theirs = socket.socketpair()
        try:
            with inside_new(NamespaceKind.PID):
                self._pid = os.fork()
                if self._pid == 0:
                    _keep(theirs, name, hosts_file, topology)
        except OSError as error:
            self._channel.close()
            raise UnsupportedError(f"cannot make a virtual host: {error.strerror} ({error.filename})") from None
        finally:
            theirs.close()
        self.is_alive = True

    def wait_until_up(self) -> None:
        """Block until the host is set up.

        Raises:
            UnsupportedError: the host cannot be made. The text names the refused operation.
        """
        word, descriptors, _, _ = socket.recv_fds(self._channel, _WORD_BYTES, len(_SHOWN))
        self._spaces = dict(zip(_SHOWN, descriptors, strict=False))
        if word != _READY:
            raise UnsupportedError(f"cannot make {self.name}: {word.decode() or 'its keeper was killed'}")

    @property
    def network(self) -> int:
        """A descriptor of the host's network namespace.

        The Host object owns the descriptor.
        """
        return self._spaces[NamespaceKind.NET]

    def birthplace(self) -> AbstractContextManager[None]:
        """Return a context in which this thread forks processes of the host."""
        return inside(self._spaces[NamespaceKind.PID], NamespaceKind.PID)

    def preparation(self, folder: Path, cpus: Iterable[int] = ()) -> Callable[[], None]:
        """Return the function that moves a child into the host before exec.

        The child calls the function to enter the host's namespaces.

        It also changes to `folder`, and restricts the child to `cpus` if there are any.
        """
        spaces, cpus = [(self._spaces[space], space) for space in _KEPT], frozenset(cpus)

        def prepare() -> None:
            for descriptor, space in spaces:
                enter(descriptor, space)
            os.chdir(folder)  # after a process enters a mount namespace, its folder is the root folder
            if cpus:
                os.sched_setaffinity(0, cpus)

        return prepare

    def signal_all(self, number: int) -> None:
        """Send a signal to all processes of the host at once.

        So a process cannot evade the signal by forking.

        Raises:
            StateError: the keeper does not answer, or something other than `kill` killed it.
        """
        try:
            self._channel.settimeout(_KEEPER_S)
            self._channel.send(bytes([number]))
            answer = self._channel.recv(_WORD_BYTES)
        except TimeoutError:
            raise StateError(
                f"{self.name} does not answer for {_KEEPER_S:g} s: its keeper, process {self._pid}, was stopped"
            ) from None
        except ConnectionError:
            answer = b""
        if not answer:
            raise StateError(f"{self.name} is gone: its keeper, process {self._pid}, was killed")

    def kill(self) -> None:
        """End the host at once, like a power cut.

        Its killed processes remain zombies until their parents reap them.
        """
        self.is_alive = False
        os.kill(self._pid, signal.SIGKILL)
        # Open descriptors of the namespaces would keep the host's interfaces alive.
        self._release()

    def close(self) -> None:
        """Kill the host if it runs, and wait for its end.

        The caller must have reaped its own children in the host.
        """
        if self.is_alive:
            self.kill()
        self._channel.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _release(self) -> None:
        for descriptor in self._spaces.values():
            os.close(descriptor)
        self._spaces.clear()


def _keep(channel: socket.socket, name: str, hosts_file: str, topology: str) -> None:
    """Run the keeper, which is the host's pid 1.

    The function never returns, because it must not unwind the lab's stack.
    """
    try:
        die_with_parent(signal.SIGKILL)
        os.setsid()  # the lab handles the terminal's Ctrl-C
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_IGN)  # with SIGCHLD ignored, the kernel reaps orphans
        signal.set_wakeup_fd(-1)
        # Other hosts' channels and namespaces, and the lab's output, must not live as long as this process does.
        for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
            if descriptor != channel.fileno():
                with contextlib.suppress(OSError):  # the descriptor of the listing is closed already
                    os.close(descriptor)
        try:
            _furnish(name, hosts_file, topology)
        except OSError as error:
            channel.send(f"{error.strerror} ({error.filename})".encode())
            os._exit(1)
        # Send the descriptors themselves. The other end cannot open them in /proc, which may show this process under
        # another ID.
        spaces = [open_namespace(space) for space in _SHOWN]
        socket.send_fds(channel, [_READY], spaces)
        for descriptor in spaces:
            os.close(descriptor)
        while word := channel.recv(_WORD_BYTES):
            with contextlib.suppress(ProcessLookupError):  # raised if the host has no other process
                os.kill(-1, word[0])
            channel.send(_READY)
    finally:
        os._exit(0)


def _furnish(name: str, hosts_file: str, topology: str) -> None:
    """Enter new namespaces, and set up the host's name, mounts, /etc/hosts, ssh agent and topology file."""
    unshare(NamespaceKind.MOUNT | NamespaceKind.UTS | NamespaceKind.IPC | NamespaceKind.NET)
    socket.sethostname(name)
    mount("none", "/", flags=Mount.REC | Mount.PRIVATE)  # keeps later mounts invisible outside
    mount("proc", "/proc", "proc", Mount.NOSUID | Mount.NODEV | Mount.NOEXEC)
    mount("tmpfs", str(_SHARED_MEMORY), "tmpfs", Mount.NOSUID | Mount.NODEV, "mode=1777")
    _mount_sys()
    text = _SHARED_MEMORY / ".hosts"
    text.write_text(hosts_file, encoding="ascii")
    mount(str(text), "/etc/hosts", flags=Mount.BIND)
    text.unlink()
    agent = Path(AGENT)
    agent.parent.mkdir(mode=0o755)
    python, program = shlex.quote(sys.executable), shlex.quote(str(Path(__file__).with_name("rsh_agent.py")))
    agent.write_text(f'#!/bin/sh\nexec {python} -I -S {program} "$@"\n', encoding="utf-8")
    agent.chmod(0o755)
    Path(TOPOLOGY_FILE).write_text(topology, encoding="utf-8")
    # Without IPv6 an interface is ready at once, and a link carries only the job's packets.
    switch = Path("/proc/sys/net/ipv6/conf/default/disable_ipv6")
    with contextlib.suppress(OSError):  # the kernel has no IPv6, or a container's /proc/sys is read-only
        switch.write_text("1", encoding="ascii")


def _mount_sys() -> None:
    """Mount /sys again. A mount of /sys shows the interfaces of the network namespace in which it was mounted."""
    aside = _SHARED_MEMORY / ".cgroup"
    has_groups = _CONTROL_GROUPS.is_dir()
    if has_groups:
        aside.mkdir()
        mount(str(_CONTROL_GROUPS), str(aside), flags=Mount.BIND | Mount.REC)
    mount("sysfs", "/sys", "sysfs", Mount.NOSUID | Mount.NODEV | Mount.NOEXEC)
    if has_groups:
        mount(str(aside), str(_CONTROL_GROUPS), flags=Mount.MOVE)
        aside.rmdir()
