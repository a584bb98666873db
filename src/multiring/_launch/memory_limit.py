"""Read the memory limit of this control group, and its out-of-memory kills.

Source: the kernel's Documentation/admin-guide/cgroup-v2.rst (memory.events, memory.max) and cgroup-v1/memory.rst
(memory.oom_control, memory.limit_in_bytes).
"""

from pathlib import Path

_FILES = (("memory.events", "memory.max"), ("memory.oom_control", "memory.limit_in_bytes"))
_NO_LIMIT = 1 << 62  # version 1 reports a number above this if there is no limit


def memory_group(told: str, mounts: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """Return the folder of the control group that limits this process's memory.

    The result is None if it cannot be found.

    Args:
        told: the content of /proc/self/cgroup.
        mounts: the folder in which control groups are mounted.
    """
    for line in told.splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            folders = [mounts / "memory" / path.lstrip("/"), mounts / "memory"]
        elif not controllers:
            folders = [mounts / path.lstrip("/"), mounts]  # in a container, the path may belong to the host
        else:
            continue
        for folder in folders:
            if any((folder / events).is_file() for events, _ in _FILES):
                return folder
    return None


def killed_for_memory(group: Path | None) -> int:
    """Return how many processes of `group` were killed for lack of memory.

    The result is 0 if the system does not report the number.
    """
    if group is None:
        return 0
    for events, _ in _FILES:
        for line in _read(group / events).splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdecimal():
                return int(count)
    return 0


def limit_bytes(group: Path | None) -> int | None:
    """Return the memory limit of `group` in bytes.

    The result is None if there is no limit, or if the system does not report the limit.
    """
    if group is None:
        return None
    for _, limit in _FILES:
        text = _read(group / limit).strip()
        if text.isdecimal() and int(text) < _NO_LIMIT:
            return int(text)
    return None


def group_here() -> Path | None:
    """Return the folder of this process's control group, as `memory_group` does."""
    return memory_group(_read(Path("/proc/self/cgroup")))


class MemoryKills:
    """Tells whether processes of this control group were killed for lack of memory since the creation of the object."""

    def __init__(self) -> None:
        self._group = group_here()
        self._before = killed_for_memory(self._group)

    def told(self) -> str:
        """Return a text for the user that says why a process was killed, or an empty text."""
        if killed_for_memory(self._group) <= self._before:
            return ""
        limit = limit_bytes(self._group)
        most = "" if limit is None else f" of {limit / (1 << 20):.0f} MiB"
        return (
            f"the system killed it, because the memory of its control group{most} ({self._group}) was used up: raise "
            "the limit, or use smaller models, smaller batches or fewer ranks"
        )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
