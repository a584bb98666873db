"""What may happen to a rank in a test, as values: kill(1).at("reducing").after(0.01)."""

import signal
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Fault:
    """A signal that a rank gets once it has reached a stage; the rig fails the test if it never got it."""

    rank: int
    number: signal.Signals | None  # None: it is not even started
    stage: str = "started"
    delay_s: float = 0.0

    def at(self, stage: str) -> "Fault":
        """Return this fault, for when its rank reaches `stage`."""
        return replace(self, stage=stage)

    def after(self, seconds: float) -> "Fault":
        """Return this fault, `seconds` after its stage."""
        return replace(self, delay_s=seconds)


def kill(rank: int) -> Fault:
    """Return the death of `rank`, which it cannot notice."""
    return Fault(rank, signal.SIGKILL)


def freeze(rank: int) -> Fault:
    """Return the silence of `rank`: it lives, and does nothing any more."""
    return Fault(rank, signal.SIGSTOP)


def interrupt(rank: int) -> Fault:
    """Return a Ctrl-C for `rank`."""
    return Fault(rank, signal.SIGINT)


def absent(rank: int) -> Fault:
    """Return the absence of `rank`: it is never started."""
    return Fault(rank, None)
