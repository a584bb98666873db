"""Large-batch training: noise scale, critical batch and learning-rate schedules."""

from multiring.convergence.critical_batch import Advice as Advice
from multiring.convergence.critical_batch import Law as Law
from multiring.convergence.critical_batch import advise as advise
from multiring.convergence.critical_batch import fit_law as fit_law
from multiring.convergence.noise_scale import NoiseScale as NoiseScale
from multiring.convergence.rate_schedules import Constant as Constant
from multiring.convergence.rate_schedules import Cosine as Cosine
from multiring.convergence.rate_schedules import GrowingBatch as GrowingBatch
from multiring.convergence.rate_schedules import Polynomial as Polynomial
from multiring.convergence.rate_schedules import Schedule as Schedule
from multiring.convergence.rate_schedules import Steps as Steps
from multiring.convergence.rate_schedules import Warmup as Warmup
from multiring.convergence.rate_schedules import scaled_rate as scaled_rate

__all__ = [
    "Advice",
    "Constant",
    "Cosine",
    "GrowingBatch",
    "Law",
    "NoiseScale",
    "Polynomial",
    "Schedule",
    "Steps",
    "Warmup",
    "advise",
    "fit_law",
    "scaled_rate",
]


def __dir__() -> list[str]:
    """Return the public names only."""
    return __all__
