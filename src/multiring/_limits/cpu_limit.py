"""Read how much CPU time this process's control groups allow.

Containers limit CPUs in this way: podman and docker with --cpus, Kubernetes with limits. Such a limit is no set of
CPUs: the process may run on all of them, but only for a part of the time.

Source: the kernel's Documentation/admin-guide/cgroup-v2.rst (cpu.max) and Documentation/scheduler/sched-bwc.rst
(cpu.cfs_quota_us, cpu.cfs_period_us).
"""

from pathlib import Path

from multiring._limits.control_groups import group_folders, groups_told, text_of

_MAX, _QUOTA, _PERIOD = "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"


def cpu_limit(told: str | None = None, mounts: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the number of CPUs whose time this process may use, or None if there is no limit.

    Args:
        told: the content of /proc/self/cgroup. Default: that of this process.
        mounts: the folder in which control groups are mounted.
    """
    folders = group_folders(groups_told() if told is None else told, "cpu", (_MAX, _QUOTA), mounts)
    return min((limit for each in folders if (limit := _limit_of(each)) is not None), default=None)


def _limit_of(folder: Path) -> float | None:
    words = text_of(folder / _MAX).split() or [text_of(folder / _QUOTA).strip(), text_of(folder / _PERIOD).strip()]
    if len(words) != 2 or not all(word.isdecimal() for word in words) or "0" in words:
        return None  # "max", or -1 in version 1, means no limit
    return int(words[0]) / int(words[1])
