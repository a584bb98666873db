"""Faults that a test injects into ranks, as values: kill(1).at("reducing").after(0.01)."""

import signal
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Fault:
    """A signal that the rig sends to a rank at a stage. The test fails if the signal was never sent."""

    rank: int
    number: signal.Signals | None  # None: the rank is never started
    stage: str = "started"
    delay_s: float = 0.0

    def at(self, stage: str) -> "Fault":
        """Return this fault, delayed until its rank reaches `stage`."""
        return replace(self, stage=stage)

    def after(self, seconds: float) -> "Fault":
        """Return this fault, delayed by `seconds` after its stage."""
        return replace(self, delay_s=seconds)


def kill(rank: int) -> Fault:
    """Return a fault that kills `rank` by SIGKILL."""
    return Fault(rank, signal.SIGKILL)


def freeze(rank: int) -> Fault:
    """Return a fault that stops `rank` by SIGSTOP: the process stays alive but does nothing."""
    return Fault(rank, signal.SIGSTOP)


def interrupt(rank: int) -> Fault:
    """Return a fault that sends SIGINT (Ctrl-C) to `rank`."""
    return Fault(rank, signal.SIGINT)


def absent(rank: int) -> Fault:
    """Return a fault by which `rank` is never started."""
    return Fault(rank, None)
