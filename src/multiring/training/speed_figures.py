"""The report's figures on the speed of a training."""

from typing import Any

from multiring.torch.step.noise import NoiseWatch
from multiring.training.progress import TrainingProgress


def speed_figures(progress: TrainingProgress, noise: NoiseWatch | None, report: Any, balance: Any) -> dict[str, Any]:
    """Return the report's figures on speed, share of peak, and batch size; every rank calls it.

    Args:
        progress: the progress of the training.
        noise: measures the noise scale, if the recipe does.
        report: the open `report_share_of_peak`; None if it was not measured, or this process has not trained a step.
        balance: the open `measure_bottleneck`; None as of `report`.
    """
    seconds = max(progress.trained_s, 1e-9)
    found: dict[str, Any] = {
        "step": {
            "steps": progress.step,
            "seconds of training": progress.trained_s,
            "of that waiting for data, %": 100 * progress.waited_s / seconds,
        }
    }
    if report is not None:
        found["peak"] = str(report.finish()).splitlines()
    if balance is not None:
        measured = balance.finish()
        found["balance"] = [str(measured)]
        found["step"]["exposed communication, ms a step"] = 1e3 * measured.step_s * measured.shares["wire"]
    if noise is not None:
        found["advice"] = [noise.report()]
    return found
