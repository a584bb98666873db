"""The kinds of findings, one finding, and the comparison that most findings use."""

from collections import Counter
from dataclasses import dataclass
from enum import Enum


class FindingKind(Enum):
    """What is wrong. The value is the kind's name in reports and in docs/doctor.md."""

    VERSION = "version"
    MTU = "mtu"
    WRONG_INTERFACE = "wrong-interface"
    SLOW_INTERFACE = "slow-interface"
    SLOW_LINK = "slow-link"
    SLOW_RAIL = "slow-rail"
    SLOW_HOST = "slow-host"
    FIREWALL = "firewall"
    CLOCK = "clock"
    MEMORY = "memory"
    SHARED_MEMORY = "shm"
    FILES = "files"
    OVERSUBSCRIBED = "oversubscribed"
    THROTTLED = "throttled"
    BUSY = "busy"
    MPI = "mpi"
    GPU = "gpu"
    NCCL = "nccl"
    SILENT = "silent"
    STRAGGLER = "straggler"
    COMMUNICATION = "communication"
    RAIL_LOST = "rail-lost"
    LOSS = "loss"
    INPUT = "input"
    SLOWED = "slowed"


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthFinding:
    """One thing that is wrong.

    - where: the host, the hosts, or the rank.
    - found: what was found, with the value and what was expected.
    - todo: the one thing to do.
    - is_certain: the readings leave no other explanation. Otherwise something else may have disturbed a measurement.
    """

    kind: FindingKind
    where: str
    found: str
    todo: str
    is_certain: bool = True


def usual_of(values: dict[str, str]) -> str | None:
    """Return the value that more hosts have than any other value; None if no value is the most frequent one.

    Args:
        values: a value for each host, by the host's name.
    """
    counts = Counter(values.values()).most_common(2)
    if not counts or (len(counts) == 2 and counts[0][1] == counts[1][1]):
        return None
    return counts[0][0]


def odd_ones(values: dict[str, str]) -> tuple[str, str]:
    """Return the hosts whose value differs from the usual one, and a text about them; ("", "") if all are equal."""
    if len(set(values.values())) < 2:
        return "", ""
    usual = usual_of(values)
    odd = {name: value for name, value in values.items() if value != usual}
    told = ", ".join(f"{value} on {name}" for name, value in odd.items())
    return ", ".join(odd), told if usual is None else f"{told}; {usual} on the other hosts"
