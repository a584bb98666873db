"""The system calls that make a virtual host: unshare, setns, mount. Python has the first two from 3.12 on only."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from enum import IntFlag
from functools import cache

_PR_SET_PDEATHSIG = 1
_OWN = "/proc/thread-self/ns"


class Space(IntFlag):
    """Kinds of namespace, as clone(2) has them; `file_name` is what /proc calls one."""

    MOUNT = 0x00020000
    UTS = 0x04000000
    IPC = 0x08000000
    PID = 0x20000000
    NET = 0x40000000

    @property
    def file_name(self) -> str:
        """The entry below /proc/PID/ns; of a single kind only."""
        return {Space.MOUNT: "mnt"}.get(self, (self.name or "").lower())


class Mount(IntFlag):
    """Flags of mount(2)."""

    NOSUID = 2
    NODEV = 4
    NOEXEC = 8
    BIND = 4096
    MOVE = 8192
    REC = 16384
    PRIVATE = 1 << 18


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def unshare(spaces: Space) -> None:
    """Give the calling thread new namespaces; a new PID namespace is that of its children."""
    _check(_libc().unshare(int(spaces)), f"unshare {spaces!r}")


def enter(descriptor: int, space: Space) -> None:
    """Put the calling thread into a namespace; a PID namespace: its children to come."""
    _check(_libc().setns(descriptor, int(space)), f"setns {space!r}")


def mount(source: str, target: str, kind: str = "", flags: Mount | None = None, options: str = "") -> None:
    """Make the system call of this name; an empty text is a null pointer there."""
    arguments = [text.encode() or None for text in (source, target, kind)]
    number = ctypes.c_ulong(int(flags or 0))
    _check(_libc().mount(*arguments, number, options.encode() or None), f"mount {target}")


def die_with_parent(number: int) -> None:
    """Have the kernel send signal `number` to this process when the thread that forked it ends."""
    _check(_libc().prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl")


def open_namespace(space: Space, process: str = _OWN) -> int:
    """Return a descriptor of the namespace that /proc, at `process`, shows; to be closed by the caller."""
    return os.open(f"{process}/{space.file_name}", os.O_RDONLY | os.O_CLOEXEC)


@contextlib.contextmanager
def _returning(space: Space) -> Iterator[None]:
    own = open_namespace(space)
    try:
        yield
    finally:
        enter(own, space)
        os.close(own)


@contextlib.contextmanager
def inside(descriptor: int, space: Space) -> Iterator[None]:
    """Have the calling thread in that namespace for a while; a PID namespace: the children it makes meanwhile."""
    with _returning(space):
        enter(descriptor, space)
        yield


@contextlib.contextmanager
def inside_new(space: Space) -> Iterator[None]:
    """The same with a namespace made for it, which lives on only where something holds it."""
    with _returning(space):
        unshare(space)
        yield
