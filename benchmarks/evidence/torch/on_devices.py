"""Run the tests of CUDA tensors on the stand-ins, in all shapes and with all seeds.

    python benchmarks/evidence/torch/on_devices.py [PYTEST ARGUMENT ...]

`make test-cuda` trains in three shapes of hosts and devices, and leaves orderings out with one seed of the devices'
delays. This program runs the same tests in six shapes of up to four ranks, and with five seeds. By default, it runs all
of tests/cuda. It needs a checkout and the environment of `make test-cuda`. It takes 20 minutes.

    python benchmarks/evidence/torch/on_devices.py tests/cuda/test_gradient_losses.py

shows that the losses of 20 steps are those of one process within 1e-6, for two models and each way to train. The result
of each test is recorded in build/evidence/on_devices.json, with the commit.

Exit code: pytest's, 0 if all tests pass.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
RECORD = ROOT / "build" / "evidence" / "on_devices.json"
SETTINGS = {"MULTIRING_TEST_ALL_SHAPES": "1", "MULTIRING_TEST_ALL_SEEDS": "1"}


def results_of(report: Path) -> dict[str, dict[str, Any]]:
    """Return the outcome and the seconds of each test in pytest's report, by file and name."""
    found: dict[str, dict[str, Any]] = {}
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 -- pytest wrote it
        problems = {each.tag for each in case} & {"failure", "error", "skipped"}
        outcome = "passed" if not problems else min(problems)
        file = case.get("classname", "").replace(".", "/")
        found[f"{file}.py::{case.get('name')}"] = {"outcome": outcome, "seconds": float(case.get("time", 0))}
    return found


def save(results: dict[str, dict[str, Any]], seconds: float) -> None:
    """Write the record, and print how many tests had each outcome."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S607
    changes = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S607
    record = {"commit": commit.stdout.strip(), "changed files": len(changes.stdout.splitlines()), "seconds": seconds}
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps({**record, "tests": results}, indent=1), encoding="utf-8")
    outcomes = [each["outcome"] for each in results.values()]
    print(", ".join(f"{outcomes.count(each)} {each}" for each in sorted(set(outcomes))), f"in {seconds:.0f} s")


def main() -> int:
    """Run the tests and return pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _, chosen = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        pytest = ["python", "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", f"--junitxml={report}"]
        environment = {**os.environ, **SETTINGS}  # noqa: TID251 -- includes the tests' variables
        command = [str(ROOT / ".ci" / "with-cuda"), *pytest, *(chosen or ["tests/cuda"])]
        began_s = time.monotonic()
        code = subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode  # noqa: S603
        if report.exists():
            save(results_of(report), time.monotonic() - began_s)
    return code


if __name__ == "__main__":
    sys.exit(main())
