"""Measure how much of a machine's cores other work took during a measurement."""

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from multiring._runtime import Group
from multiring._runtime.bootstrap.addresses import boot_id

_WORTH_TELLING = 0.1  # a share of a machine's cores; other work below this share is not reported
_NAME_BYTES = 6  # of a digest: a float64 can hold this many bytes exactly


@dataclass(frozen=True, slots=True)
class Taken:
    """The average number of cores of a machine that other work took."""

    cores: float
    of: int
    host: str

    def __str__(self) -> str:
        where = f" of host {self.host}" if self.host else ""
        return f"Other work took {self.cores:.1f} of {self.of} core{'s' if self.of > 1 else ''}{where} meanwhile"


class OtherWork:
    """Measures other work from its creation until `taken` is called.

    All ranks of `group` create one.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._began = _now()

    def taken(self) -> Taken | None:
        """Return the other work on the most disturbed machine; None if it is too little to report.

        All ranks call it.
        """
        passed = _now() - self._began
        name = int.from_bytes(hashlib.blake2b(boot_id().encode(), digest_size=_NAME_BYTES).digest(), "big")
        row = np.concatenate([[name, os.cpu_count() or 1], passed])
        return most_taken(self._group.all_gather(row[np.newaxis]), self._group.topology.host_of(), self._names())

    def _names(self) -> tuple[str, ...]:
        topology = self._group.topology
        return topology.names or tuple(str(at) for at in range(len(topology.hosts)))


def most_taken(
    table: "np.ndarray[tuple[int, int], np.dtype[np.float64]]", hosts: Sequence[int], names: tuple[str, ...]
) -> Taken | None:
    """Return the other work on the most disturbed machine, as `OtherWork.taken` does.

    Args:
        table: one row per rank: a number for its machine, the machine's cores, the seconds that passed, the seconds
            that the machine's cores worked, and the seconds that they worked for this rank.
        hosts: each rank's host; a machine may hold several hosts.
        names: the names of the hosts.
    """
    found: list[Taken] = []
    for machine in np.unique(table[:, 0]):
        rows = table[table[:, 0] == machine]
        first = int(np.flatnonzero(table[:, 0] == machine)[0])
        others_s = rows[0, 3] - rows[:, 4].sum()
        name = names[hosts[first]] if len(np.unique(table[:, 0])) > 1 else ""
        found.append(Taken(cores=float(others_s / max(rows[0, 2], 1e-9)), of=int(rows[0, 1]), host=name))
    most = max(found, key=lambda each: each.cores / each.of)
    return most if most.cores > _WORTH_TELLING * most.of else None


def _now() -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Return the time, and the seconds that the machine's cores, and this process alone, have worked."""
    line = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
    user, nice, system, _idle, _waits, _irq, _softirq, stolen = map(int, line.split()[1:9])
    # Interrupts do not count: most of them are for the job's own packets.
    worked_s = (user + nice + system + stolen) / os.sysconf("SC_CLK_TCK")
    return np.array([time.monotonic(), worked_s, time.process_time()])
