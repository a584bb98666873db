"""A training loop for PyTorch: options, evaluation over all ranks, checkpoints and a report."""

from multiring.training.evaluation import EvaluationResult as EvaluationResult
from multiring.training.evaluation import evaluate as evaluate
from multiring.training.loop import TrainingRun as TrainingRun
from multiring.training.loop import TrainingTask as TrainingTask
from multiring.training.options import TrainingOptions as TrainingOptions
from multiring.training.options import parse_options as parse_options

__all__ = [
    "EvaluationResult",
    "TrainingOptions",
    "TrainingRun",
    "TrainingTask",
    "evaluate",
    "parse_options",
]
