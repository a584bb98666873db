"""What of a run's setting may harm its convergence, and why."""

from dataclasses import dataclass

from multiring.convergence.noise_scale import Interval

_FAR = 10.0  # times the critical batch: 11 times the least samples
_OWED = 10.0  # times the gradient: what was sent is mostly old
_UNEVEN = 2.0
_SKIPS = 0.1
_MANY = 100  # steps, before a part of them says something
_HEAVY = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What is known of a run.

    Args:
        batch: samples of a step.
        noise: the noise scale, where it is known.
        lag: of gradients, in steps.
        momentum: of the optimizer.
        wire: the wire type, where gradients travel in another than their own.
        has_feedback: whether what the wire loses goes along with the next gradient.
        owed: the norm of what compression has not sent yet.
        gradient: the norm of a gradient.
        shares: samples of the rank that has fewest, and of an even share.
        steps: how many there have been.
        skipped: how many of them overflowed.
    """

    batch: float = 0.0
    noise: Interval | None = None
    lag: int = 0
    momentum: float = 0.0
    wire: str | None = None
    has_feedback: bool = False
    owed: float = 0.0
    gradient: float = 0.0
    shares: tuple[int, int] | None = None
    steps: int = 0
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Concern:
    """One thing that may harm convergence."""

    kind: str
    reason: str

    def __str__(self) -> str:
        return f"convergence: {self.kind}: {self.reason}"


def concerns(facts: Facts) -> list[Concern]:
    """Return what may harm the convergence of such a run; of each kind one at most."""
    found = []
    noise = facts.noise
    if noise is not None and 0 < noise.high < facts.batch / _FAR:
        part = 1 + facts.batch / noise.value if noise.value else float("inf")
        found.append(
            Concern(
                "batch",
                f"{facts.batch:,.0f} samples a step with a noise scale of {noise}: about {part:,.0f} times the samples "
                "that a small batch needs; fewer ranks, or a smaller batch, would take hardly more steps",
            )
        )
    if facts.lag and facts.momentum >= _HEAVY:
        least, most = 1 - facts.momentum, 2 * (1 + facts.momentum)
        found.append(
            Concern(
                "lag",
                f"gradient lag {facts.lag} with momentum {facts.momentum:g} is stable up to a learning rate "
                f"{most / least:.0f} times lower than without lag on a quadratic ({least:.2g}/c, not {most:.2g}/c): "
                "lower one of them",
            )
        )
    if facts.wire == "int8" and not facts.has_feedback:
        found.append(
            Concern(
                "compression",
                "gradients travel as int8 and what that loses is lost: what is below 1/254 of a block's largest never "
                "arrives; pass error_feedback=True",
            )
        )
    if facts.gradient > 0 and facts.owed > _OWED * facts.gradient:
        found.append(
            Concern(
                "residual",
                f"compression owes {facts.owed / facts.gradient:.0f} times a gradient: what is sent is mostly old; "
                "want a higher rank, or a finer wire type",
            )
        )
    if facts.shares is not None and facts.shares[0] * _UNEVEN < facts.shares[1]:
        found.append(
            Concern(
                "uneven ranks",
                f"a rank had {facts.shares[0]} samples where an even share is {facts.shares[1]}: batch statistics and "
                "compression see a noisier gradient there; want batches that the ranks divide",
            )
        )
    if facts.steps >= _MANY and facts.skipped > _SKIPS * facts.steps:
        found.append(
            Concern(
                "overflow",
                f"{facts.skipped} of {facts.steps} steps overflowed and were left out; want bf16, a lower first loss "
                "scale, or a lower learning rate",
            )
        )
    return found
