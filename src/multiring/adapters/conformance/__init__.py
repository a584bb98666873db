"""A suite of checks that every framework's adapter must pass. An adapter is described by five small functions.

Run it on each of three ranks:

    results = conformance.run(adapter)

docs/adapters.md describes the functions. The suite imports no framework.
"""

from multiring.adapters.conformance.adapter import Adapter as Adapter
from multiring.adapters.conformance.adapter import Trainer as Trainer
from multiring.adapters.conformance.checks import CHECKS as CHECKS
from multiring.adapters.conformance.ends import be_interrupted as be_interrupted
from multiring.adapters.conformance.ends import lose_a_rank as lose_a_rank
from multiring.adapters.conformance.suite import ENDS as ENDS
from multiring.adapters.conformance.suite import Outcome as Outcome
from multiring.adapters.conformance.suite import Result as Result
from multiring.adapters.conformance.suite import run as run

__all__ = [
    "CHECKS",
    "ENDS",
    "Adapter",
    "Outcome",
    "Result",
    "Trainer",
    "be_interrupted",
    "lose_a_rank",
    "run",
]
