"""A suite of checks that every framework's adapter must pass. An adapter is described by five small functions.

Run it on each of three ranks:

    results = conformance.run(adapter)

docs/adapters.md describes the functions. The suite imports no framework.
"""

from multiring.adapters.conformance.adapter import Adapter, Trainer
from multiring.adapters.conformance.checks import CHECKS
from multiring.adapters.conformance.ends import be_interrupted, lose_a_rank
from multiring.adapters.conformance.suite import ENDS, Outcome, Result, run

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
