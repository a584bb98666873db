"""What killed jobs of MPI leave in shared memory: a run of the tests removes the files of its own.

MPICH leaves 2 MB and Open MPI 16 MB for each killed job, which nobody removes before the machine starts again.
"""

import contextlib
import os
from collections.abc import Set as AbstractSet
from pathlib import Path

SHARED = Path("/dev/shm")  # noqa: S108 -- the place of both
_BEGINS = ("mpich_shm_", "sm_segment.")


def files_of_mpi(folder: Path = SHARED) -> set[str]:
    """Return the names of MPI's files."""
    return {each.name for begin in _BEGINS for each in folder.glob(f"{begin}*")}


def remove_leftovers(known: AbstractSet[str], folder: Path = SHARED) -> None:
    """Remove this user's files of MPI that are not `known` and that no process has in its memory."""
    new = files_of_mpi(folder) - known
    if not new:
        return
    used = _memory_of_processes()
    for path in (folder / name for name in new):
        if str(path) not in used:
            with contextlib.suppress(OSError):  # another run removed it
                if path.stat().st_uid == os.getuid():
                    path.unlink()


def _memory_of_processes() -> str:
    """Return what this user's processes have in their memory, as text with the paths of files."""
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            found.append(maps.read_text(errors="replace"))
    return "".join(found)
