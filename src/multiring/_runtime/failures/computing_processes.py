"""Whether processes of this host compute, as their CPU time shows."""

from collections.abc import Collection, Mapping
from pathlib import Path

_USER, _SYSTEM = 11, 12  # fields of /proc/PID/stat after the command's name: utime and stime (proc_pid_stat(5))


class ComputingProcesses:
    """Tells whether processes have used CPU time between two questions about them.

    A stopped process uses none. One that holds Python's global lock in an extension does.

    Args:
        pids: the processes, by any numbers.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._pids = dict(pids)
        self._used: dict[int, int] = {}

    def any_of(self, numbers: Collection[int]) -> bool:
        """Return whether one of the processes has used CPU time since the last call, which asked about it, too."""
        found = {each: cpu_time(self._pids[each]) for each in numbers if each in self._pids}
        is_any = any(used > self._used.get(each, used) for each, used in found.items())
        self._used = found
        return is_any


def cpu_time(pid: int) -> int:
    """Return the CPU time of a process in the kernel's units; 0 if it has ended."""
    try:
        fields = (Path("/proc") / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return int(fields[_USER]) + int(fields[_SYSTEM])
