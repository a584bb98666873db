"""What a process uses: resident memory, threads and descriptors."""

import os
from pathlib import Path
from typing import NamedTuple


class Usage(NamedTuple):
    """What a process uses at one moment."""

    resident: int  # bytes
    threads: int
    descriptors: int


def usage_of(pid: int) -> Usage:
    """Return what a process uses now."""
    folder = Path("/proc") / str(pid)
    resident = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Usage(resident, len(list((folder / "task").iterdir())), len(list((folder / "fd").iterdir())))
