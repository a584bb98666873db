"""A virtual host: namespaces of its own, held by a keeper, the process that is its pid 1.

The kernel takes a host down: when the keeper ends, every process of its PID namespace is killed, however it
detached itself, and with the last of them the other namespaces go: mounts, interfaces and rates too. The keeper
ends when the lab does, in whatever way: it is killed with the process that forked it.
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
    Space,
    die_with_parent,
    enter,
    inside,
    inside_new,
    mount,
    open_namespace,
    unshare,
)
from multiring.lab.topology_file import TOPOLOGY_FILE

AGENT = "/dev/shm/.multiring-lab/ssh"  # noqa: S108 -- on the host's own tmpfs, which only root and its processes see
_KEPT = (Space.MOUNT, Space.UTS, Space.IPC, Space.NET)
_SHOWN = (*_KEPT, Space.PID)
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 -- the place shared memory is at
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_READY = b"+"
_WORD_BYTES = 4096
_KEEPER_S = 10.0  # for an answer that takes a millisecond


class Host:
    """A running host. It is up, but alone, when made; `close` or the end of the calling thread ends it.

    Args:
        name: what it calls itself.
        hosts_file: the text of its /etc/hosts.
        topology: the text of its TOPOLOGY_FILE.

    Raises:
        UnsupportedError: the kernel or this process's rights do not allow it.
    """

    def __init__(self, name: str, hosts_file: str, topology: str = "") -> None:
        self.name = name
        self._spaces: dict[Space, int] = {}
        self._channel, theirs = socket.socketpair()
        try:
            with inside_new(Space.PID):
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
        """Block until the host is complete.

        Raises:
            UnsupportedError: it cannot be made; the text says what was refused.
        """
        word, descriptors, _, _ = socket.recv_fds(self._channel, _WORD_BYTES, len(_SHOWN))
        self._spaces = dict(zip(_SHOWN, descriptors, strict=False))
        if word != _READY:
            raise UnsupportedError(f"cannot make {self.name}: {word.decode() or 'its keeper was killed'}")

    @property
    def network(self) -> int:
        """A descriptor of its network namespace; the host's own."""
        return self._spaces[Space.NET]

    def birthplace(self) -> AbstractContextManager[None]:
        """Return a context in which this thread's children are born as processes of the host."""
        return inside(self._spaces[Space.PID], Space.PID)

    def preparation(self, folder: Path, cpus: Iterable[int] = ()) -> Callable[[], None]:
        """Return what such a child runs before exec to see the host only, from `folder`, on `cpus` if any."""
        spaces, cpus = [(self._spaces[space], space) for space in _KEPT], frozenset(cpus)

        def prepare() -> None:
            for descriptor, space in spaces:
                enter(descriptor, space)
            os.chdir(folder)  # entering a mount namespace leaves one at its root
            if cpus:
                os.sched_setaffinity(0, cpus)

        return prepare

    def signal_all(self, number: int) -> None:
        """Send a signal to all of the host's processes, at one moment: none can fork its way out.

        Raises:
            StateError: the keeper was killed, not by `kill`.
        """
        try:
            self._channel.settimeout(_KEEPER_S)
            self._channel.send(bytes([number]))
            answer = self._channel.recv(_WORD_BYTES)
        except TimeoutError:
            raise StateError(
                f"{self.name} does not answer for {_KEEPER_S:g} s: somebody stopped its keeper, process {self._pid}"
            ) from None
        except ConnectionError:
            answer = b""
        if not answer:
            raise StateError(f"{self.name} is gone: somebody killed its keeper, process {self._pid}")

    def kill(self) -> None:
        """End the host at once, as a power cut does. Its processes are gone when their parents reaped them."""
        self.is_alive = False
        os.kill(self._pid, signal.SIGKILL)
        # The namespaces' descriptors would keep its interfaces in being.
        self._release()

    def close(self) -> None:
        """Kill it if it lives, and wait for its end; this process's own children in it must be reaped before."""
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
    """Be the pid 1 of a host; never returns: in this process the lab's stack must not be unwound."""
    try:
        die_with_parent(signal.SIGKILL)
        os.setsid()  # the terminal's Ctrl-C is the lab's to hear
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_IGN)  # SIGCHLD: orphans are reaped by the kernel
        signal.set_wakeup_fd(-1)
        # Other hosts' channels and namespaces, and the lab's output, must not live as long as this process does.
        for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
            if descriptor != channel.fileno():
                with contextlib.suppress(OSError):  # the listing's own, closed already
                    os.close(descriptor)
        try:
            _furnish(name, hosts_file, topology)
        except OSError as error:
            channel.send(f"{error.strerror} ({error.filename})".encode())
            os._exit(1)
        # Handed over, not opened by the other end: that may know this process by another number than /proc does.
        spaces = [open_namespace(space) for space in _SHOWN]
        socket.send_fds(channel, [_READY], spaces)
        for descriptor in spaces:
            os.close(descriptor)
        while word := channel.recv(_WORD_BYTES):
            with contextlib.suppress(ProcessLookupError):  # there is no other process
                os.kill(-1, word[0])
            channel.send(_READY)
    finally:
        os._exit(0)


def _furnish(name: str, hosts_file: str, topology: str) -> None:
    """Take new namespaces and put into them what a host has of its own."""
    unshare(Space.MOUNT | Space.UTS | Space.IPC | Space.NET)
    socket.sethostname(name)
    mount("none", "/", flags=Mount.REC | Mount.PRIVATE)  # nothing mounted here is seen outside
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
    # Without IPv6 an interface is ready at once, and nothing but the job's packets is on the wire.
    switch = Path("/proc/sys/net/ipv6/conf/default/disable_ipv6")
    with contextlib.suppress(OSError):  # a kernel without it, or a container's read-only /proc/sys
        switch.write_text("1", encoding="ascii")


def _mount_sys() -> None:
    """Mount /sys anew: it shows the interfaces of the network namespace it was mounted in."""
    aside = _SHARED_MEMORY / ".cgroup"
    has_groups = _CONTROL_GROUPS.is_dir()
    if has_groups:
        aside.mkdir()
        mount(str(_CONTROL_GROUPS), str(aside), flags=Mount.BIND | Mount.REC)
    mount("sysfs", "/sys", "sysfs", Mount.NOSUID | Mount.NODEV | Mount.NOEXEC)
    if has_groups:
        mount(str(aside), str(_CONTROL_GROUPS), flags=Mount.MOVE)
        aside.rmdir()
