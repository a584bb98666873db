"""One network, the same digits and first weights in every framework: one loss curve, on any number of ranks.

The curve is NumPy's, computed here on one rank without any collective; frameworks have to follow it, too.
"""

from functools import cache

import pytest
from tests.frameworks.conforming import jobs
from tests.frameworks.conforming.homes import FRAMEWORKS
from tests.wire.ranks import run_ranks

STEPS = 50
TRAINED = 112  # steps: 8 epochs
PATIENCE_S = 100


def digits(name: str, ranks: int, steps: int) -> list[tuple[list[float], float]]:
    framework = FRAMEWORKS[name]
    arguments = (framework.module, framework.example, steps)
    found: list[tuple[list[float], float]] = run_ranks(
        jobs.digits, ranks, *arguments, home=framework.digits_home, deadline_s=PATIENCE_S
    )
    return found


@cache
def alone() -> list[float]:
    """Return the losses of NumPy's network on one rank."""
    pytest.importorskip("sklearn")
    return digits("toy", 1, STEPS)[0][0]


@pytest.mark.timeout(4 * PATIENCE_S)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_digits_are_learnt_alike_on_any_number_of_ranks(name: str) -> None:
    framework = FRAMEWORKS[name]
    if framework.missing():
        pytest.skip(framework.missing())
    if framework.digits_home.environment_value("DEV") == "PYTHON":
        pytest.skip("tinygrad interprets where there is neither clang nor an x86-64 processor: a step takes seconds")
    wanted = alone()
    assert len(wanted) == STEPS
    assert wanted[-1] < wanted[0] / 2
    for ranks, steps in ((2, TRAINED), (3, STEPS), (4, STEPS)):
        for losses, accuracy in digits(name, ranks, steps):
            assert losses[:STEPS] == pytest.approx(wanted, rel=1e-4)
            assert steps == STEPS or accuracy >= 0.97
