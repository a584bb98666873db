"""Run Horovod's own tests of its TensorFlow interface with multiring.

    git clone --branch v0.28.1 https://github.com/horovod/horovod
    python benchmarks/evidence/horovod/tensorflow_suite.py horovod [--ranks 2] [--only EXPRESSION]

The test files are Horovod's and stay in its checkout. The exit code is 1 if a test fails that is not listed here. The
reasons for the listed tests are in benchmarks/results/.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from multiring._settings import inherited_environment

FILES = ("parallel/test_tensorflow.py", "parallel/base_test_tensorflow.py", "utils/common.py")
# These tests fail before they call Horovod, because they use removed interfaces.
LISTED = {
    "test_horovod_syncbn_cpu": "calls tf.keras.layers.BatchNormalization(fused=...), which Keras 3 does not have",
    "test_partial_distributed_gradient_tape": "calls ref() of a variable of Keras 3, which has none",
}
MOCK = (
    "from unittest.mock import *\nfrom unittest.mock import patch\n"  # the package `mock` is part of Python since 3.3
)
DEADLINE_S = 1800.0


def main() -> int:
    """Run the tests and print the numbers of results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("horovod", type=Path, help="a checkout of Horovod 0.28.1")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", help="expression for pytest -k")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for each in FILES:
            shutil.copy(arguments.horovod / "test" / each, folder)
        (folder / "mock.py").write_text(MOCK, encoding="utf-8")
        launch = ["-m", "multiring", "run", "--horovod", "-n", str(arguments.ranks), "--", sys.executable]
        tests = ["-m", "pytest", "-v", "-p", "no:xdist", "-p", "no:cacheprovider", "test_tensorflow.py"]
        done = subprocess.run(  # noqa: S603 -- our own
            [sys.executable, *launch, *tests, *(["-k", arguments.only] if arguments.only else [])],
            cwd=folder,
            env={**inherited_environment(), "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    outcomes = outcomes_of(done.stdout)
    if not outcomes:
        print(done.stdout[-2000:], done.stderr[-2000:])
        return 1
    print(", ".join(f"{count} {outcome}" for outcome, count in Counter(outcomes.values()).most_common()))
    failed = sorted(name for name, outcome in outcomes.items() if outcome == "failed")
    for each in failed:
        print(f"failed: {each}: {LISTED.get(each, 'NOT LISTED')}")
    return 1 if set(failed) - set(LISTED) else 0


def outcomes_of(output: str) -> dict[str, str]:
    """Return the worst result of each test over the ranks.

    The results are "passed", "skipped" and "failed".
    """
    found: dict[str, str] = {}
    worst = ("passed", "skipped", "failed")
    for word, name, again, late in re.findall(
        r"(SUBFAILED|SUBSKIPPED)\S* \S+::(test_\w+)|::(test_\w+) (PASSED|SKIPPED|FAILED|ERROR)", output
    ):
        told = word or late
        outcome = "failed" if "FAIL" in told or told == "ERROR" else "skipped" if "SKIP" in told else "passed"
        test = name or again
        found[test] = max(found.get(test, "passed"), outcome, key=worst.index)
    return found


if __name__ == "__main__":
    sys.exit(main())
