"""Settings of a run that may harm its convergence, with reasons."""

from dataclasses import dataclass

from multiring._schedule import FORMATS, wire_of
from multiring.convergence.noise_scale import ConfidenceInterval

_FAR = 10.0  # a multiple of the critical batch; training then needs 11 times the fewest possible samples
_OWED = 10.0  # a multiple of the gradient's norm; the ranks then send mostly old gradients
_UNEVEN = 2.0
_SKIPS = 0.1
_MANY = 100  # the number of steps after which a share of them is significant
_HEAVY = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Facts about a run that affect its convergence.

    Args:
        batch: samples of a step.
        noise: the noise scale.
        lag: gradient lag, in steps.
        momentum: the optimizer's momentum.
        wire: the wire type, if gradients are not sent in their own type.
        has_feedback: whether the compression error is added to the next gradient.
        owed: norm of the gradients that compression has not sent yet.
        gradient: norm of a gradient.
        shares: samples of the rank with the fewest samples, and of an even share.
        steps: number of steps so far.
        skipped: number of steps that overflowed.
    """

    batch: float = 0.0
    noise: ConfidenceInterval | None = None
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
    """A property of a run that may harm its convergence."""

    kind: str
    reason: str

    def __str__(self) -> str:
        return f"convergence: {self.kind}: {self.reason}"


def concerns(facts: Facts) -> list[Concern]:
    """Return the concerns about such a run, at most one of each kind."""
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
    form = FORMATS.get(wire_of(facts.wire))
    if form is not None and form.is_scaled and not facts.has_feedback:
        found.append(
            Concern(
                "compression",
                f"gradients are sent as {facts.wire} and the compression error is discarded: values below "
                f"1/{1 / form.error:.0f} of a block's largest value never arrive; pass error_feedback=True",
            )
        )
    if facts.gradient > 0 and facts.owed > _OWED * facts.gradient:
        found.append(
            Concern(
                "residual",
                f"the residual of compression is {facts.owed / facts.gradient:.0f} times a gradient: mostly old "
                "gradients are sent; want a higher rank, or a finer wire type",
            )
        )
    if facts.shares is not None and facts.shares[0] * _UNEVEN < facts.shares[1]:
        found.append(
            Concern(
                "uneven ranks",
                f"a rank had {facts.shares[0]} samples, but an even share is {facts.shares[1]}: batch statistics and "
                "compression see a noisier gradient there; want batches that the ranks divide evenly",
            )
        )
    if facts.steps >= _MANY and facts.skipped > _SKIPS * facts.steps:
        found.append(
            Concern(
                "overflow",
                f"{facts.skipped} of {facts.steps} steps overflowed and were skipped; want bf16, a lower first loss "
                "scale, or a lower learning rate",
            )
        )
    return found
