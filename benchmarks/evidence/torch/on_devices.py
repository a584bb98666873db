"""Run the tests of CUDA tensors on the stand-ins, in all shapes and with all seeds.

    python benchmarks/evidence/torch/on_devices.py [PYTEST ARGUMENT ...]

`make test-cuda` trains in three shapes of hosts and devices, and leaves orderings out with one seed of the devices'
delays. This program runs the same tests in six shapes of up to four ranks, and with five seeds. By default, it runs all
of tests/cuda. It needs a checkout and the environment of `make test-cuda`. It takes 20 minutes.

Exit code: pytest's, 0 if all tests pass.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SETTINGS = {"MULTIRING_TEST_ALL_SHAPES": "1", "MULTIRING_TEST_ALL_SEEDS": "1"}


def main() -> int:
    """Run the tests and return pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _, chosen = parser.parse_known_args()
    pytest = ["python", "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal"]
    environment = {**os.environ, **SETTINGS}  # noqa: TID251 -- includes the tests' variables
    command = [str(ROOT / ".ci" / "with-cuda"), *pytest, *(chosen or ["tests/cuda"])]
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode  # noqa: S603


if __name__ == "__main__":
    sys.exit(main())
