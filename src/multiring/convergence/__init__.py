"""Large-batch training: noise scale, critical batch, learning-rate schedules, and rates for other widths."""

from multiring._former_names import keep_to_public_names
from multiring.convergence.critical_batch import Advice, Law, fit_critical_batch_size, recommend_batch_size
from multiring.convergence.noise_scale import NoiseScale
from multiring.convergence.rate_schedules import (
    Constant,
    Cosine,
    GrowingBatch,
    LearningRateSchedule,
    Polynomial,
    Steps,
    Warmup,
    scaled_rate,
)
from multiring.convergence.width_rules import WidthRule, WidthRules, width_rules

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
    "WidthRule",
    "WidthRules",
    "fit_critical_batch_size",
    "recommend_batch_size",
    "scaled_rate",
    "width_rules",
]

keep_to_public_names(__name__)
