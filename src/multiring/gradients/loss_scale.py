"""Dynamic loss scaling: how large 16-bit gradients may be made without overflow.

Half precision has nothing below 6e-8. The loss is multiplied by a scale, and gradients are divided by it when they are
float32 again. One that overflowed is dropped, and the scale is made smaller; after some steps without, larger.

All ranks come to the same decision without asking each other where they see the same gradients: an infinity or NaN of
one rank is one in the sum of all ranks.

Source: Micikevicius et al., "Mixed precision training", ICLR 2018, arXiv 1710.03740.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from multiring.convergence.arguments import require_number
from multiring.errors import ArgumentError


@dataclass(slots=True)
class LossScale:
    """A scale, a power of two as long as all its arguments are, so that it rounds nothing.

    Args:
        scale: now.
        growth: by how much it grows.
        backoff: by how much it shrinks, below 1.
        patience: after how many steps without overflow it grows.
        least: below it no gradient is worth having.
        most: it does not grow beyond.

    Raises:
        ArgumentError: a number that makes no sense.
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
        if not (self.backoff > 0 and self.scale > 0 and self.patience >= 1 and 0 < self.least <= self.most):
            raise ArgumentError(f"{self}: want scales above 0, the least below the most, and a patience of 1 or more")

    @property
    def is_exhausted(self) -> bool:
        """Whether it has become too small to go on."""
        return self.scale < self.least

    def update(self, *, overflows: bool) -> float:
        """Take note of a step; return by how much the scale has changed."""
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
        """Return all of it."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Be as `state_dict` was returned."""
        for name, value in state.items():
            setattr(self, name, value)
