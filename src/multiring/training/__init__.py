"""A training loop for PyTorch: options, evaluation over all ranks, checkpoints and a report.

    class Digits(TrainingTask): ...  # the data, the model, the loss

    options = parse_options(TrainingOptions)
    run = TrainingRun(Digits(), options)
    run.train()
    run.write_report()

docs/training.md has a complete program.
"""

# ruff: noqa: E402 -- this check comes before the imports below, because their errors would not say how to install torch
from multiring._frontend.requirements import require_framework

require_framework("torch", "PyTorch")

from multiring.training.evaluation import EvaluationResult, combine_batch_norm_statistics, evaluate
from multiring.training.intervals import jackknife_intervals, wilson_interval
from multiring.training.loop import TrainingRun
from multiring.training.options import TrainingOptions, parse_options, read_options
from multiring.training.progress import TrainingProgress
from multiring.training.recipe import TrainingRecipe, build_recipe, learning_rate_schedule, steps_per_epoch
from multiring.training.run_folder import read_baselines, write_baselines, write_report
from multiring.training.task import TrainingTask, model_dtype

__all__ = [
    "EvaluationResult",
    "TrainingOptions",
    "TrainingProgress",
    "TrainingRecipe",
    "TrainingRun",
    "TrainingTask",
    "build_recipe",
    "combine_batch_norm_statistics",
    "evaluate",
    "jackknife_intervals",
    "learning_rate_schedule",
    "model_dtype",
    "parse_options",
    "read_baselines",
    "read_options",
    "steps_per_epoch",
    "wilson_interval",
    "write_baselines",
    "write_report",
]
