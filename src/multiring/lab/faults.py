"""Faults of a running lab as values, and a parser for them.

`machine.py` applies the faults.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from multiring.errors import ArgumentError
from multiring.lab.plan import LabPlan, Rate, host_name, parse_rate, rail_name, rate_text


class FaultType(Enum):
    """A kind of fault or repair. The value is its spelling."""

    FREEZE = "freeze"
    THAW = "thaw"
    KILL = "kill"
    CUT = "cut"
    SLOW = "slow"
    MEND = "mend"


USAGE = {
    FaultType.FREEZE: "freeze HOST",
    FaultType.THAW: "thaw HOST",
    FaultType.KILL: "kill HOST",
    FaultType.CUT: "cut HOST [RAIL]",
    FaultType.SLOW: "slow HOST RATE [RAIL]",
    FaultType.MEND: "mend HOST [RAIL]",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A fault of `host`, or of its links on `rails`.

    `rate` is the new rate of the links for `SLOW`.
    """

    kind: FaultType
    host: int
    rails: tuple[int, ...] = ()
    rate: Rate | None = None

    def __str__(self) -> str:
        rate = [] if self.rate is None else [rate_text(self.rate)]
        return " ".join([self.kind.value, host_name(self.host), *rate, *map(rail_name, self.rails)])


@dataclass(frozen=True, slots=True)
class TimedFault:
    """A fault that the lab injects `at_s` seconds after the command's start."""

    at_s: float
    fault: Fault


def parse_fault(words: Sequence[str], plan: LabPlan) -> Fault:
    """Return the fault that words describe in a lab of `plan`.

    The words are like ("slow", "host1", "10mbit").

    Raises:
        ArgumentError: the words describe no fault. The text shows the usage.
    """
    spelt = {kind.value: kind for kind in FaultType}
    if not words or words[0] not in spelt:
        raise ArgumentError(f"unknown fault {' '.join(words)!r}; want one of: {'; '.join(USAGE.values())}")
    kind = spelt[words[0]]
    usage = USAGE[kind].split()
    needed = [word for word in usage if not word.startswith("[")]
    if not len(needed) <= len(words) <= len(usage):
        raise ArgumentError(f"invalid fault {' '.join(words)!r}; want {USAGE[kind]}")
    rate = parse_rate(words[2]) if kind is FaultType.SLOW else None
    if kind in (FaultType.FREEZE, FaultType.THAW, FaultType.KILL):
        rails: tuple[int, ...] = ()
    elif len(words) == len(usage):
        rails = (plan.rail_named(words[-1]),)
    else:
        rails = tuple(range(plan.num_rails))
    return Fault(kind=kind, host=plan.host_named(words[1]), rails=rails, rate=rate)


def parse_timed(seconds: str, words: str, plan: LabPlan) -> TimedFault:
    """Return the timed fault described by the user's texts `seconds` and `words`.

    Raises:
        ArgumentError: one of the texts is invalid.
    """
    try:
        at_s = float(seconds)
    except ValueError:
        at_s = -1.0
    if not 0 <= at_s < float("inf"):
        raise ArgumentError(f"a fault cannot happen at {seconds!r}: want seconds after the start, like 2.5")
    return TimedFault(at_s, parse_fault(words.split(), plan))
