"""Read the memory limit of this control group, and its out-of-memory kills.

Source: the kernel's Documentation/admin-guide/cgroup-v2.rst (memory.events, memory.max) and cgroup-v1/memory.rst
(memory.oom_control, memory.limit_in_bytes).
"""

from pathlib import Path

from multiring._launch.job_process import JobProcess
from multiring._limits.control_groups import group_folders, groups_told, text_of

_FILES = (("memory.events", "memory.max"), ("memory.oom_control", "memory.limit_in_bytes"))
_NO_LIMIT = 1 << 62  # version 1 reports a number above this if there is no limit


def memory_group(told: str, mounts: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """Return the folder of the control group that limits this process's memory.

    The result is None if it cannot be found.

    Args:
        told: the content of /proc/self/cgroup.
        mounts: the folder in which control groups are mounted.
    """
    return next(iter(group_folders(told, "memory", [events for events, _ in _FILES], mounts)), None)


def killed_for_memory(group: Path | None) -> int:
    """Return how many processes of `group` were killed for lack of memory.

    The result is 0 if the system does not report the number.
    """
    if group is None:
        return 0
    for events, _ in _FILES:
        for line in text_of(group / events).splitlines():
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
        text = text_of(group / limit).strip()
        if text.isdecimal() and int(text) < _NO_LIMIT:
            return int(text)
    return None


def group_here() -> Path | None:
    """Return the folder of this process's control group, as `memory_group` does."""
    return memory_group(groups_told())


class MemoryKills:
    """Tells whether processes of this control group were killed for lack of memory since the creation of the object."""

    def __init__(self) -> None:
        self._group = group_here()
        self._before = killed_for_memory(self._group)

    def told_of(self, member: JobProcess) -> str:
        """Return the text of `told` for a process that SIGKILL ended here, and its own host's for one elsewhere."""
        return self.told() if member.was_killed_here else member.told_of_memory

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
