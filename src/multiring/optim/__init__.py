"""Framework-free parts of distributed optimizers: formulas, and how ranks work them out together."""

from multiring.optim.adasum import adasum as adasum
from multiring.optim.adasum_reduction import start_adasum as start_adasum
