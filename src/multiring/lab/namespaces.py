"""The system calls for virtual hosts: unshare, setns and mount.

Python offers the first two only since 3.12.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from enum import IntFlag
from functools import cache

_PR_SET_PDEATHSIG = 1
_OWN = "/proc/thread-self/ns"


class NamespaceKind(IntFlag):
    """Kinds of namespace, with the flags of clone(2)."""

    MOUNT = 0x00020000
    UTS = 0x04000000
    IPC = 0x08000000
    PID = 0x20000000
    NET = 0x40000000

    @property
    def file_name(self) -> str:
        """The name of the file in /proc/PID/ns. It is valid for a single kind only."""
        return {NamespaceKind.MOUNT: "mnt"}.get(self, (self.name or "").lower())


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


def unshare(spaces: NamespaceKind) -> None:
    """Move the calling thread into new namespaces.

    A new PID namespace applies to its future children only.
    """
    _check(_libc().unshare(int(spaces)), f"unshare {spaces!r}")


def enter(descriptor: int, space: NamespaceKind) -> None:
    """Move the calling thread into a namespace.

    A PID namespace applies to its future children only.
    """
    _check(_libc().setns(descriptor, int(space)), f"setns {space!r}")


def mount(source: str, target: str, kind: str = "", flags: Mount | None = None, options: str = "") -> None:
    """Make the system call mount. Empty texts are passed as null pointers."""
    arguments = [text.encode() or None for text in (source, target, kind)]
    number = ctypes.c_ulong(int(flags or 0))
    _check(_libc().mount(*arguments, number, options.encode() or None), f"mount {target}")


def die_with_parent(number: int) -> None:
    """Make the kernel signal this process when its parent thread ends.

    The signal is `number`. The parent thread is the thread that forked this process.
    """
    _check(_libc().prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl")


def open_namespace(space: NamespaceKind, process: str = _OWN) -> int:
    """Return a descriptor of a namespace of `process`, a folder like /proc/PID/ns.

    The caller must close it.
    """
    return os.open(f"{process}/{space.file_name}", os.O_RDONLY | os.O_CLOEXEC)


@contextlib.contextmanager
def _returning(space: NamespaceKind) -> Iterator[None]:
    own = open_namespace(space)
    try:
        yield
    finally:
        enter(own, space)
        os.close(own)


@contextlib.contextmanager
def inside(descriptor: int, space: NamespaceKind) -> Iterator[None]:
    """Move the calling thread into a namespace during the `with` block.

    A PID namespace applies to the children that the thread makes in the block.
    """
    with _returning(space):
        enter(descriptor, space)
        yield


@contextlib.contextmanager
def inside_new(space: NamespaceKind) -> Iterator[None]:
    """Move the calling thread into a new namespace during the `with` block.

    The namespace exists after the block only if a process or a descriptor keeps it.
    """
    with _returning(space):
        unshare(space)
        yield
