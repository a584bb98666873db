"""Failures in Keras' `fit` and in tf.function: all ranks get an error in time.

benchmarks/evidence/jobs/fit.py measures the times.
"""

import importlib
from pathlib import Path

import pytest
from tests.support.conforming.homes import FRAMEWORKS
from tests.support.faults import kill
from tests.support.ranks import Here, report_of

PATIENCE_S = 60.0  # the documented limit is 5 s; a loaded machine needs more
BACKENDS = ("keras-tensorflow", "keras-torch", "keras-jax")


def in_fit(here: Here, kind: str, over: str) -> float:
    module = importlib.import_module("tests.support.conforming.in_fit")
    told_s: float = module.KINDS[kind](here, over)
    return told_s


def told(name: str, kind: str, folder: Path, ranks: int = 2, fails: int | None = 1) -> list[float]:
    """Return the seconds until each other rank detected the failure.

    Rank `fails` raises its own error, or is killed.
    """
    framework = FRAMEWORKS[name]
    if framework.missing():
        pytest.skip(framework.missing())
    faults = [kill(1).at("at work").after(0.1)] if kind == "with_a_lost_rank" else []
    report = report_of(in_fit, ranks, kind, str(folder / kind), home=framework.home, faults=faults, deadline_s=240)
    own = report.outcomes[1]
    assert faults or "an error of one rank's own" in str(own.error), own
    others = [each for rank, each in enumerate(report.outcomes) if rank != fails]
    assert [each.error for each in others] == [None] * len(others), others[0].output
    return [each.value for each in others]


@pytest.mark.parametrize("name", BACKENDS)
def test_failures_in_fit_are_told(name: str, tmp_path: Path) -> None:
    others = 3 if name == "keras-torch" else 2  # one backend with two survivors; TensorFlow and JAX start slowly
    for kind, ranks in (("with_an_exception", others), ("with_a_lost_rank", others), ("interrupted", 2)):
        assert all(0 <= each < PATIENCE_S for each in told(name, kind, tmp_path, ranks)), kind


def test_an_exception_in_a_function_is_told(tmp_path: Path) -> None:
    assert all(each < PATIENCE_S for each in told("keras-tensorflow", "in_a_function", tmp_path))
