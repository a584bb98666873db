"""The options of `distribute`, and the check that they are consistent."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from multiring.errors import ArgumentError, StateError

_CHOICES = {
    "batch": ("global", "per_rank"),
    "learning_rate": (None, "keep", "linear", "sqrt"),
    "reduction": ("mean", "sum"),
    "sharded": (False, True),
    "check": (False, True),
    "shares": ("equal", "speed"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The options of `distribute`.

    Raises:
        ArgumentError: an option has an unknown value, or two options contradict each other.
    """

    batch: str
    learning_rate: str | None
    reduction: str
    sharded: bool
    check: bool
    shares: str = "equal"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
                raise ArgumentError(f"{name}={value!r}: want {' or '.join(map(repr, choices))}")
        if self.batch == "global" and self.learning_rate in {"linear", "sqrt"}:
            raise ArgumentError(
                f"learning_rate={self.learning_rate!r} with batch='global': the samples of a step do not depend on the "
                "number of ranks, which leaves nothing to scale by; want batch='per_rank', or learning_rate='keep'"
            )
        if self.sharded and self.batch == "global":
            raise ArgumentError(
                "sharded=True with batch='global': if each rank's loader gives its own batches, the global batch "
                "consists of all of them; want batch='per_rank'"
            )
        if self.batch == "per_rank" and self.learning_rate is None:
            raise ArgumentError(
                "batch='per_rank' without learning_rate: the global batch grows with the number of ranks; choose how "
                "the learning rate changes: 'linear', 'sqrt' or 'keep'"
            )

        if self.sharded and self.shares == "speed":
            raise ArgumentError(
                "shares='speed' with sharded=True: each rank's loader already gives the rank's own samples, of which "
                "other ranks can take none; want sharded=False, or shares='equal'"
            )

    @property
    def op(self) -> str:
        """The reduction that gives the global batch's gradients: "sum" or "average"."""
        return "sum" if self.reduction == "sum" else "average"

    def batches_together(self, ranks: int) -> int:
        """Return the number of the loader's batches that form one global batch."""
        return ranks if self.batch == "per_rank" and not self.sharded else 1

    def require_no_scheduler(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise StateError if a scheduler has recorded the unscaled learning rate."""
        if self.learning_rate in {"linear", "sqrt"} and any("initial_lr" in each for each in optimizer.param_groups):
            raise StateError(
                f"learning_rate={self.learning_rate!r}, but the optimizer already has a scheduler, which would "
                "restore the unscaled learning rate: make the scheduler after `distribute`"
            )

    def scale(self, optimizer: torch.optim.Optimizer, ranks: int) -> None:
        """Scale the learning rates for a global batch of `ranks` loader batches."""
        factor: Any = {"linear": ranks, "sqrt": math.sqrt(ranks)}.get(self.learning_rate or "keep", 1)
        if factor == 1:
            return
        for param_group in optimizer.param_groups:
            param_group["lr"] = param_group["lr"] * factor
