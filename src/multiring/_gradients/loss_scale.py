"""Dynamic loss scaling, which keeps 16-bit gradients large without overflow.

Half precision has no values below 6e-8. Therefore the loss is multiplied by a scale, and gradients are divided by it
once they are float32 again. If a gradient overflows, it is discarded, and the scale is reduced. After some steps
without overflow, the scale grows.

Ranks with the same gradients make the same decision without communication: an infinity or NaN of one rank is
also in the sum of all ranks.

Source: Micikevicius et al., "Mixed precision training", ICLR 2018, arXiv 1710.03740.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from multiring._arguments import require_number, require_whole
from multiring.errors import ArgumentError


@dataclass(slots=True)
class LossScale:
    """A loss scale. If all arguments are powers of two, scaling never rounds.

    Args:
        scale: the current scale.
        growth: the factor by which the scale grows.
        backoff: the factor by which it shrinks, below 1.
        patience: number of steps without overflow after which it grows.
        least: lower limit; below it, gradients are useless.
        most: upper limit.

    Raises:
        ArgumentError: a number is out of range.
    """

    scale: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    patience: int = 2000
    least: float = 1.0
    most: float = 2.0**32
    clean: int = 0  # steps since the last overflow or growth
    steps: int = 0
    skipped: int = 0

    def __post_init__(self) -> None:
        require_number("scale", self.scale)
        require_number("growth", self.growth, least=1.0)
        require_number("backoff", self.backoff, below=1.0)
        for name in ("least", "most"):
            require_number(name, getattr(self, name))
        require_whole("patience", self.patience, 1)
        if not (self.backoff > 0 and self.scale > 0 and 0 < self.least <= self.most):
            raise ArgumentError(f"{self}: want scales above 0, the least below the most, and a patience of 1 or more")

    @property
    def is_exhausted(self) -> bool:
        """Whether the scale is below its lower limit."""
        return self.scale < self.least

    def update(self, *, overflows: bool) -> float:
        """Count a step; return the factor by which the scale has changed."""
        before = self.scale
        self.steps += 1
        if overflows:
            self.skipped += 1
            self.clean = 0
            self.scale *= self.backoff
        else:
            self.clean += 1
            if self.clean >= self.patience:
                self.clean = 0
                self.scale = min(self.scale * self.growth, max(self.most, before))
        return self.scale / before

    def state_dict(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the fields from `state`."""
        for name, value in state.items():
            setattr(self, name, value)
