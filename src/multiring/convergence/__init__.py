"""Large-batch training: noise scale, critical batch and learning-rate schedules."""

from typing import TYPE_CHECKING, NoReturn

from multiring._former_names import refuse
from multiring.convergence.critical_batch import Advice as Advice
from multiring.convergence.critical_batch import Law as Law
from multiring.convergence.critical_batch import fit_critical_batch_size as fit_critical_batch_size
from multiring.convergence.critical_batch import recommend_batch_size as recommend_batch_size
from multiring.convergence.noise_scale import NoiseScale as NoiseScale
from multiring.convergence.rate_schedules import Constant as Constant
from multiring.convergence.rate_schedules import Cosine as Cosine
from multiring.convergence.rate_schedules import GrowingBatch as GrowingBatch
from multiring.convergence.rate_schedules import LearningRateSchedule as LearningRateSchedule
from multiring.convergence.rate_schedules import Polynomial as Polynomial
from multiring.convergence.rate_schedules import Steps as Steps
from multiring.convergence.rate_schedules import Warmup as Warmup
from multiring.convergence.rate_schedules import scaled_rate as scaled_rate

__all__ = [
    "Advice",
    "Constant",
    "Cosine",
    "GrowingBatch",
    "Law",
    "LearningRateSchedule",
    "NoiseScale",
    "Polynomial",
    "Steps",
    "Warmup",
    "fit_critical_batch_size",
    "recommend_batch_size",
    "scaled_rate",
]

if not TYPE_CHECKING:  # otherwise mypy would accept every name

    def __getattr__(name: str) -> NoReturn:
        """Raise an error with the current name if `name` is a former name."""
        refuse(__name__, name)


def __dir__() -> list[str]:
    """Return the public names only."""
    return __all__
