"""Measure the CPU seconds of the tests, including all processes that they start.

    python benchmarks/tools/tests_cpu.py [--by test] [--workers N] [PYTEST_ARGUMENT ...]

The program runs pytest in this checkout and prints the total and the seconds by file or by test. Each pytest worker is
in its own control group, which accounts for all descendants, however they end. So the program needs Linux and the right
to create control groups (root). To compare two commits, run it in two checkouts that are set up and built, one after
the other on a quiet machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

RECORDS = "TESTS_CPU"
V1, V2 = Path("/sys/fs/cgroup/cpuacct"), Path("/sys/fs/cgroup")
START = "(start, imports, collection)"


class Account:
    """A control group that this process joins."""

    def __init__(self, name: str) -> None:
        self.folder = (V1 if V1.is_dir() else V2) / f"multiring-tests-{name}"
        self.folder.mkdir()
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def cpu_s(self) -> float:
        """Return the CPU seconds that the process and its children have used."""
        if V1.is_dir():
            return int((self.folder / "cpuacct.usage").read_text()) / 1e9
        lines = (self.folder / "cpu.stat").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("usage_usec")) / 1e6


class Meter:
    """A pytest plugin that records CPU seconds, one in every process of pytest."""

    def __init__(self, folder: Path) -> None:
        self._account = Account(f"{folder.name}-{os.getpid()}")
        self._records = (folder / f"{os.getpid()}.jsonl").open("w", buffering=1)
        self._last_s = 0.0

    def _record(self, name: str) -> None:
        now_s = self._account.cpu_s()
        self._records.write(json.dumps([name, now_s - self._last_s]) + "\n")
        self._last_s = now_s

    def pytest_collection_finish(self) -> None:
        """Record the time of start, imports and collection."""
        self._record(START)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Record a test's time, including the fixtures that it sets up or tears down."""
        result = yield
        self._record(item.nodeid)
        return result

    def pytest_unconfigure(self) -> None:
        """Record the remaining time."""
        self._record("(end)")


def pytest_configure(config: pytest.Config) -> None:
    """Register the meter; pytest calls this because it loads this file with `-p`."""
    config.pluginmanager.register(Meter(Path(os.environ[RECORDS])))  # noqa: TID251 -- pytest's, not the library's


def main() -> int:
    """Run the tests and print the CPU seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", choices=["room", "file", "test"], default="file")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the seconds of each test")
    options, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        begun = time.monotonic()
        command = f"{sys.executable} -m pytest -p tests_cpu -n {options.workers} --dist worksteal".split()
        known = dict(os.environ)  # noqa: TID251 -- the child gets all variables
        places = os.pathsep.join(filter(None, [str(Path(__file__).parent), known.get("PYTHONPATH")]))
        environment = {**known, RECORDS: name, "PYTHONPATH": places}
        with subprocess.Popen([*command, *arguments], env=environment) as process:  # noqa: S603 -- pytest
            try:
                code = process.wait()
            except KeyboardInterrupt:  # pytest got the interrupt as well; the account up to now is still printed
                code = process.wait()
        wall_s = time.monotonic() - begun
        spent = [json.loads(line) for path in Path(name).glob("*.jsonl") for line in path.read_text().splitlines()]
        for folder in (V1 if V1.is_dir() else V2).glob(f"multiring-tests-{Path(name).name}-*"):
            folder.rmdir()
    total: Counter[str] = Counter()
    for test, cpu_s in spent:
        file = test.partition("::")[0]
        total[{"room": str(Path(file).parent), "file": file, "test": test}[options.by]] += cpu_s
    for test, cpu_s in total.most_common():
        print(f"{cpu_s:8.2f}  {test}")
    print(f"{sum(total.values()):8.2f}  in all; {wall_s:.0f} s; pytest's exit code {code}")
    if options.json:
        options.json.write_text(json.dumps(spent, indent=0))
    return code


if __name__ == "__main__":
    sys.exit(main())
