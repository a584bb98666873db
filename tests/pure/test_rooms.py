"""What import-linter cannot say: pure rooms import nothing but arithmetic, and importing multiring does nothing."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "multiring"
PURE_ROOMS = ("agreement", "topology", "schedule", "collectives", "planner")
# No file, clock, environment, thread or random number can be had from these.
PURE_MODULES = {
    "__future__",
    "abc",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "json",
    "math",
    "numpy",
    "operator",
    "re",
    "struct",
    "sys",
    "tomli",
    "tomllib",
    "types",
    "typing",
}


def imported_modules(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield node.module or ""


@pytest.mark.parametrize("room", PURE_ROOMS)
def test_a_pure_room_imports_only_arithmetic(room: str) -> None:
    files = sorted((SOURCE / room).rglob("*.py"))
    assert files, f"no room {room}"
    for file in files:
        foreign = {
            name
            for name in imported_modules(file)
            if name.split(".")[0] not in PURE_MODULES
            and not name.startswith(("multiring.errors", *(f"multiring.{pure}" for pure in PURE_ROOMS)))
        }
        assert not foreign, f"{file.relative_to(SOURCE)} imports {sorted(foreign)}"


def test_importing_multiring_touches_nothing() -> None:
    program = """
import os, sys
import numpy, ml_dtypes  # what multiring depends on may do as it likes
environment, descriptors, threads = dict(os.environ), os.listdir("/proc/self/fd"), os.listdir("/proc/self/task")
import multiring
foreign = {"torch", "mpi4py", "tensorflow", "jax"} & {name.partition(".")[0] for name in sys.modules}
assert not foreign, foreign
assert dict(os.environ) == environment
assert os.listdir("/proc/self/fd") == descriptors
assert os.listdir("/proc/self/task") == threads
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)
