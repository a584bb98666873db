"""Run the tests of the torch adapter with their tensors on the stand-ins of CUDA, and count them.

    python benchmarks/evidence/torch/tests_on_devices.py [--engine ENGINE] [--folder FOLDER] [FILE ...]

FILE is a file of tests/frameworks/torch, or test_conformance.py; by default, all of them run, in pieces of some files.
The results of a piece lie in FOLDER (default: build/tests_on_devices). A piece that passed at this commit is not run
again, so the program may be interrupted and started again. It needs a checkout and the environment of `make test-cuda`.
It takes 10 minutes on two idle cores. With --engine tcp, each rank of a test that names no engine has a host of its
own, and with shm+tcp, two ranks share one.

tests/support/host_only_tests.toml names the tests that cannot have device tensors. Any other test whose ranks have no
device tensor fails.

Exit code 1: a test fails, or more than a fifth of the tests is host only.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests" / "frameworks"
CONFORMANCE = "test_conformance.py::test_conforms[torch]"
PIECE = 9  # files
LIMIT_S = 590.0
MOST_HOST_ONLY = 0.2
HOST_ONLY = "host only, by name"
ELSEWHERE = "host only, in files that need packages of the other environment"
_MISSING = re.compile(r"No module named '(h5py|jax)'")  # packages that the environment does not have
_COUNT = re.compile(r"^ *(\d+) (\D.*)$", re.MULTILINE)


def commit() -> str:
    """Return the commit of the checkout, and a mark if files are changed."""
    git = ["git", "-C", str(ROOT)]
    name = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()  # noqa: S603
    changed = subprocess.run([*git, "diff", "HEAD"], check=True, capture_output=True, text=True).stdout  # noqa: S603
    return f"{name} changed" if changed else name


def pytest(words: Sequence[str], files: Sequence[str], *, engine: str = "") -> subprocess.CompletedProcess[str]:
    """Run pytest on files of tests/frameworks."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}  # noqa: TID251 -- includes the tests' variables
    before = [str(ROOT / ".ci" / "with-cuda"), "python"] if engine else [sys.executable]
    if engine:
        environment.update(MULTIRING_TEST_DEVICE="cuda", MULTIRING_TEST_ENGINE=engine)
    paths = [str(TESTS / each) for each in files]
    command = [*before, "-m", "pytest", "-p", "no:cacheprovider", *words, *paths]
    return subprocess.run(  # noqa: S603
        command, check=False, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=LIMIT_S
    )


def number_of_tests(files: Sequence[str]) -> int:
    """Return how many tests the files have in this environment."""
    done = pytest(["-q", "--collect-only"], files)
    assert done.returncode == 0, done.stdout
    return sum("::" in line for line in done.stdout.splitlines())


def run_piece(files: Sequence[str], engine: str) -> dict[str, Any]:
    """Run the tests of some files, and return the counts by kind and the names of those that failed."""
    done = pytest(["-n", "2", "--dist", "worksteal", "--tb=short"], files, engine=engine)
    _, _, behind = done.stdout.partition(" tests with device tensors ")
    summary = behind.partition("\n")[2].partition("\n=")[0]
    counts = {kind: int(number) for number, kind in _COUNT.findall(summary)}
    elsewhere = {
        text.split()[0] for text in done.stdout.split("ERROR collecting ")[1:] if _MISSING.search(text.split("\n__")[0])
    }
    failed = [
        each for each in re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE) if each not in elsewhere
    ]
    if not counts or done.returncode not in {0, 1, 5}:  # 5: no tests are left
        failed.append(f"pytest ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return {"counts": counts, "failed": failed, "output": done.stdout if failed else ""}


def main() -> int:
    """Run the pieces and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="shm", choices=["shm", "tcp", "shm+tcp"])
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "tests_on_devices")
    parser.add_argument("files", nargs="*", metavar="FILE")
    arguments = parser.parse_args()
    found = [CONFORMANCE, *(f"torch/{each.name}" for each in sorted((TESTS / "torch").glob("test_*.py")))]
    files = [each for each in found if not arguments.files or Path(each.partition("::")[0]).name in arguments.files]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    total, now = number_of_tests(files), commit()
    counts, failed = Counter({ELSEWHERE: total}), list[str]()
    for first in range(0, len(files), PIECE):
        piece = files[first : first + PIECE]
        path = arguments.folder / f"{arguments.engine}-{Path(piece[0]).stem}-{len(piece)}.json"
        kept = json.loads(path.read_text("utf-8")) if path.exists() else {}
        if kept.get("commit") != now or kept["files"] != piece or kept["failed"]:
            kept = {"commit": now, "files": piece, **run_piece(piece, arguments.engine)}
            path.write_text(json.dumps(kept), encoding="utf-8")
        print(f"{piece[0]} to {piece[-1]}: {kept['counts']}, {len(kept['failed'])} failed", file=sys.stderr, flush=True)
        failed += kept["failed"]
        counts.update(kept["counts"])
        counts[ELSEWHERE] -= sum(kept["counts"].values())
    counts[ELSEWHERE] -= len(failed)
    print(f"{total:5} tests")
    for kind, number in counts.items():
        print(f"{number:5} {kind}")
    host_only = (counts[HOST_ONLY] + counts[ELSEWHERE]) / total
    print(f"{len(failed):5} failed; {host_only:.1%} host only")
    for each in failed:
        print(f"FAILS {each}")
    return 1 if failed or host_only > MOST_HOST_ONLY else 0


if __name__ == "__main__":
    sys.exit(main())
