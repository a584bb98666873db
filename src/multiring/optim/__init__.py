"""Framework-free parts of distributed optimizers: formulas, and how ranks work them out together."""

from multiring.optim.adasum import adasum as adasum
from multiring.optim.adasum_reduction import start_adasum as start_adasum
from multiring.optim.critical_batch import advise as advise
from multiring.optim.critical_batch import fit_law as fit_law
from multiring.optim.loss_scale import LossScale as LossScale
from multiring.optim.noise_scale import NoiseScale as NoiseScale
from multiring.optim.rate_schedules import Constant as Constant
from multiring.optim.rate_schedules import Cosine as Cosine
from multiring.optim.rate_schedules import GrowingBatch as GrowingBatch
from multiring.optim.rate_schedules import Polynomial as Polynomial
from multiring.optim.rate_schedules import Steps as Steps
from multiring.optim.rate_schedules import Warmup as Warmup
from multiring.optim.rate_schedules import scaled_rate as scaled_rate
