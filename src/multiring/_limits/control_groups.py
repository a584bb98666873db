"""Find the folders of this process's control groups.

Source: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/cgroups.rst.
"""

from collections.abc import Sequence
from pathlib import Path

_MOUNTS = Path("/sys/fs/cgroup")


def group_folders(told: str, controller: str, files: Sequence[str], mounts: Path = _MOUNTS) -> list[Path]:
    """Return the folders that may limit this process by `controller`, the process's own group first.

    The folders of its parent groups follow, because their limits hold, too.

    Args:
        told: the content of /proc/self/cgroup.
        controller: a controller's name, like "memory".
        files: a folder counts if it has one of these files.
        mounts: the folder in which control groups are mounted.
    """
    found = []
    for line in told.splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            top = mounts / controller
        elif not controllers:
            top = mounts
        else:
            continue
        own = top / path.lstrip("/")
        # In a container, the path may belong to the host. Then only the top exists, which is the container's own group.
        above = [each for each in own.parents if each.is_relative_to(top)] if ".." not in own.parts else [top]
        found += [each for each in (own, *above) if any((each / file).is_file() for file in files)]
    return found


def groups_told() -> str:
    """Return the content of /proc/self/cgroup, or an empty text if there is none."""
    return text_of(Path("/proc/self/cgroup"))


def text_of(path: Path) -> str:
    """Return the content of a file of the kernel, or an empty text if it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
