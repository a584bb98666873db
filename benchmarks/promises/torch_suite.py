"""Run torch's own tests of its backends and print a line of JSON for each test.

    python benchmarks/promises/torch_suite.py READING BACKEND [NAME ...]

conformance_torch.py runs this program. The tests decide by a backend's name what to check. READING is the name that
they see: "gloo", or "mpi", the only one that tests all_to_all on CPU. BACKEND is the backend that runs them.
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
REFUSED = "monitored_barrier is only implemented for GLOO backend"  # torch raises this before it calls any backend


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
        importlib.import_module("multiring.torch")  # imported once here, not in every forked rank
    # Tests that demand eight ranks also work with three. torch runs them with fewer ranks only for the backend "mpi".
    os.environ["BACKEND"] = "mpi"  # noqa: TID251
    case = case_of(suite)
    for name in names or unittest.TestLoader().getTestCaseNames(case):
        outcome = unittest.TestResult()
        start = time.monotonic()
        case(name).run(outcome)
        print(json.dumps({"name": name, "seconds": time.monotonic() - start, **told(outcome)}), flush=True)


class TwoNames(str):
    """A backend's name that is also equal to the name whose tests run.

    The tests also compare names in their bodies.
    """

    __slots__ = ("_also",)
    _also: str
    __hash__ = str.__hash__

    def __new__(cls, name: str, also: str) -> "TwoNames":  # noqa: PYI034 -- typing has no Self before Python 3.11
        """Return `name` as a string that is also equal to `also`."""
        both = super().__new__(cls, name)
        both._also = also
        return both

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other == self._also

    def __ne__(self, other: object) -> bool:
        return not self == other


def case_of(suite: Any) -> type[unittest.TestCase]:
    """Return the test class with forked ranks.

    torch spawns its ranks, and each of them would import torch for seconds.
    """
    multiprocessing = importlib.import_module("torch.multiprocessing")

    class Forked(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc] # noqa: SLF001
        def setUp(self) -> None:
            super().setUp()
            vars(suite)["INIT_METHOD"] = os.environ["INIT_METHOD"]  # noqa: TID251
            self._start_processes(multiprocessing.get_context("fork").Process)

    return Forked


def told(outcome: unittest.TestResult) -> dict[str, str]:
    """Return the result of a test, and the reason."""
    if wrong := outcome.errors + outcome.failures:
        if REFUSED in wrong[0][1]:
            return {"how": "not applicable", "why": "torch itself refuses: " + REFUSED}
        return {"how": "fail", "why": wrong[0][1]}
    if outcome.skipped:
        return {"how": "not applicable", "why": outcome.skipped[0][1]}
    return {"how": "pass", "why": ""}


if __name__ == "__main__":
    main()
