"""A training loop for PyTorch: options, evaluation over all ranks, checkpoints and a report."""

from multiring.training.evaluation import EvaluationResult, evaluate
from multiring.training.loop import TrainingRun, TrainingTask
from multiring.training.options import TrainingOptions, parse_options

__all__ = [
    "EvaluationResult",
    "TrainingOptions",
    "TrainingRun",
    "TrainingTask",
    "evaluate",
    "parse_options",
]
