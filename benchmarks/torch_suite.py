"""torch's own tests of its backends: run by conformance_torch.py, prints a line of JSON for each test.

    python benchmarks/torch_suite.py READING BACKEND [NAME ...]

The tests choose by a backend's name what they ask of it: READING is the name whose tests are taken ("gloo", or "mpi",
which alone gets to test all_to_all on CPU), BACKEND the one that they are run with.
"""

import importlib
import json
import os
import sys
import time
import unittest
from typing import Any

SUITE = "torch.testing._internal.distributed.distributed_test"
RANKS, DEADLINE_S = 4, 60
REFUSED = "monitored_barrier is only implemented for GLOO backend"  # what torch says before any backend is asked


def main() -> None:
    """Run the tests."""
    reading, backend, *names = sys.argv[1:]
    os.environ |= {  # noqa: TID251 -- torch's: what its runner sets
        "BACKEND": reading,
        "WORLD_SIZE": str(RANKS),
        "INIT_METHOD": "file:///set/by/setUp",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(DEADLINE_S),
    }
    suite = importlib.import_module(SUITE)
    vars(suite)["BACKEND"] = TwoNames(backend, reading)
    if backend == "multiring":
        importlib.import_module("multiring.torch")  # once, and not in every rank that is forked
    # Tests that say they need eight ranks do with three; torch runs them with fewer for this backend only.
    os.environ["BACKEND"] = "mpi"  # noqa: TID251
    case = case_of(suite)
    for name in names or unittest.TestLoader().getTestCaseNames(case):
        outcome = unittest.TestResult()
        start = time.monotonic()
        case(name).run(outcome)
        print(json.dumps({"name": name, "seconds": time.monotonic() - start, **told(outcome)}), flush=True)


class TwoNames(str):
    """A backend's name that is also equal to the one whose tests are run: they compare names in their bodies, too."""

    __slots__ = ("_also",)
    _also: str
    __hash__ = str.__hash__

    def __new__(cls, name: str, also: str) -> "TwoNames":  # noqa: PYI034 -- typing has no Self before Python 3.11
        """Return `name`, equal to `also` too."""
        both = super().__new__(cls, name)
        both._also = also
        return both

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other == self._also

    def __ne__(self, other: object) -> bool:
        return not self == other


def case_of(suite: Any) -> type[unittest.TestCase]:
    """Return the tests, whose ranks are forked: torch's are spawned, and each imports torch anew for seconds."""
    multiprocessing = importlib.import_module("torch.multiprocessing")

    class Forked(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc] # noqa: SLF001
        def setUp(self) -> None:
            super().setUp()
            vars(suite)["INIT_METHOD"] = os.environ["INIT_METHOD"]  # noqa: TID251
            self._start_processes(multiprocessing.get_context("fork").Process)

    return Forked


def told(outcome: unittest.TestResult) -> dict[str, str]:
    """Return how the test ended, and why."""
    if wrong := outcome.errors + outcome.failures:
        if REFUSED in wrong[0][1]:
            return {"how": "not applicable", "why": "torch itself refuses: " + REFUSED}
        return {"how": "fail", "why": wrong[0][1]}
    if outcome.skipped:
        return {"how": "not applicable", "why": outcome.skipped[0][1]}
    return {"how": "pass", "why": ""}


if __name__ == "__main__":
    main()
