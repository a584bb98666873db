"""In every framework, one network on the same digits has one loss curve.

All frameworks start with the same weights. NumPy computes the reference curve here on one rank, without collectives;
it follows the curve on two and four ranks, and each framework on three.
"""

from functools import cache

import pytest
from tests.support.conforming import jobs
from tests.support.conforming.homes import FRAMEWORKS
from tests.support.ranks import Process, run_ranks

STEPS = 20
FEW = {"tinygrad": 3}  # compiles for half a second in each step; all steps from the third on are alike
TRAINED = 112  # steps, which are 8 epochs
PATIENCE_S = 240
IMAGE = 1 / 360  # one of the 360 test images
LOADED = Process(beforehand=("sklearn.datasets",))


def digits(name: str, ranks: int, steps: int) -> list[tuple[list[float], float]]:
    framework = FRAMEWORKS[name]
    arguments = (framework.module, framework.example, steps)
    found: list[tuple[list[float], float]] = run_ranks(
        jobs.digits, ranks, *arguments, home=framework.digits_home, process=LOADED, deadline_s=PATIENCE_S
    )
    return found


@cache
def alone(steps: int) -> tuple[list[float], float]:
    """Return the losses and the accuracy of NumPy's network on one rank."""
    pytest.importorskip("sklearn")
    return digits("toy", 1, steps)[0]


def test_what_is_followed_learns_on_any_number_of_ranks() -> None:
    """The reference learns on 2 and 4 ranks, too; all frameworks share its curve."""
    wanted, _ = alone(STEPS)
    assert len(wanted) == STEPS
    assert wanted[-1] < wanted[0] / 2
    for ranks in (2, 4):
        for losses, accuracy in digits("toy", ranks, TRAINED):
            assert losses[:STEPS] == pytest.approx(wanted, rel=1e-4)
            assert accuracy >= 0.97


@pytest.mark.timeout(4 * PATIENCE_S)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_digits_are_learnt_alike_on_any_number_of_ranks(name: str) -> None:
    framework = FRAMEWORKS[name]
    if framework.missing():
        pytest.skip(framework.missing())
    if framework.digits_home.environment_value("DEV") == "PYTHON":
        pytest.skip("without clang or an x86-64 processor, tinygrad interprets operations, and a step takes seconds")
    steps = FEW.get(name, STEPS)
    wanted, known = alone(steps)
    # An adapter that combines three ranks right does so for two, on which test_digits.py and other tests train.
    for losses, accuracy in digits(name, 3, steps):
        assert losses == pytest.approx(wanted, rel=1e-4)
        assert accuracy == pytest.approx(known, rel=0, abs=1.5 * IMAGE)
