"""Framework-free parts of distributed optimizers: formulas, and how ranks work them out together."""

from multiring.convergence.critical_batch import advise as advise
from multiring.convergence.critical_batch import fit_law as fit_law
from multiring.convergence.noise_scale import NoiseScale as NoiseScale
from multiring.convergence.rate_schedules import Constant as Constant
from multiring.convergence.rate_schedules import Cosine as Cosine
from multiring.convergence.rate_schedules import GrowingBatch as GrowingBatch
from multiring.convergence.rate_schedules import Polynomial as Polynomial
from multiring.convergence.rate_schedules import Steps as Steps
from multiring.convergence.rate_schedules import Warmup as Warmup
from multiring.convergence.rate_schedules import scaled_rate as scaled_rate
