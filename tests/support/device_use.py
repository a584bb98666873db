"""What the ranks and programs of a test did with device tensors, for tests/support/device_suite.py.

With MULTIRING_TEST_DEVICE=cuda, each rank tells the rig when it first has a device tensor, and when multiring first
copies one. The rig takes these stages out of its reports, because tests compare stages.
"""

import os
from dataclasses import dataclass, replace

from tests.support.nursery import Report

is_on = os.environ.get("MULTIRING_TEST_DEVICE") == "cuda"
"""Whether ranks have their tensors on devices. device_suite.py removes the variable, which programs do not know."""

HELD, COPIED = "has a device tensor", "multiring copies a device tensor"


@dataclass(frozen=True, slots=True)
class Use:
    """What the ranks of one job did: how many there were, had device tensors, and gave some to multiring."""

    ranks: int
    held: int
    copied: int


seen: list[Use] = []
"""The jobs of this process, in order. Whoever counts them empties the list."""


def noted(report: Report) -> Report:
    """Add what the report says to `seen`, and return the report without it."""
    stages = [set(each.stages) for each in report.outcomes]
    seen.append(Use(len(stages), sum(HELD in each for each in stages), sum(COPIED in each for each in stages)))
    outcomes = tuple(
        replace(each, stages=tuple(stage for stage in each.stages if stage not in (HELD, COPIED)))
        for each in report.outcomes
    )
    return replace(report, outcomes=outcomes)
