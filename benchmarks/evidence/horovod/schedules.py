"""Run all schedules of Horovod's elastic tests with torch, TensorFlow and Keras, on two virtual hosts with sshd.

    python benchmarks/evidence/horovod/schedules.py [--frameworks torch,tensorflow,keras] [--only PATTERN]

docs/horovod.md says where the results differ from Horovod's on purpose. The exit code is 1 if a schedule ends
otherwise. It needs root and sshd.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.support.claims import commit, machine
from tests.support.horovod_schedules import PROGRAMS, SCHEDULES
from tests.support.ssh_hosts import ssh_hosts


def main() -> int:
    """Print a row for each schedule, and what the failed ones said; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--frameworks", default=",".join(PROGRAMS), help="frameworks, separated by commas")
    parser.add_argument("--only", default="", help="regular expression that selects schedules by their name")
    arguments = parser.parse_args()
    print(
        f"# Horovod's elastic schedules, {time.strftime('%Y-%m-%d %H:%M')}\n\n"
        f"`{' '.join(sys.argv)}` at commit {commit()}, {machine()}\n\n"
        "| schedule | framework | result | time | load |\n|---|---|---|---|---|"
    )
    faults = []
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        with ssh_hosts(2, Path(name)) as hosts:
            for framework in arguments.frameworks.split(","):
                for schedule in (each for each in SCHEDULES if re.search(arguments.only, each)):
                    start_s, result = time.monotonic(), "as on the page"
                    try:
                        SCHEDULES[schedule](hosts, framework)
                    except AssertionError as error:
                        result = "FAILED"
                        faults.append(f"## {schedule}, {framework}\n\n{error}\n")
                        print(faults[-1], file=sys.stderr, flush=True)  # it is there also if this run is ended
                    took = f"{time.monotonic() - start_s:.0f} s"
                    print(f"| {schedule} | {framework} | {result} | {took} | {os.getloadavg()[0]:.0f} |", flush=True)
    print("\n".join(["", *faults]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
