"""Parts of `multiring verify gpu` pass on the stand-ins."""

import sys
from pathlib import Path

import pytest

from multiring._verify.results import PASSED
from multiring._verify.running import chosen, machine_here, run_all

PYTHON = (sys.executable, "-m", "tests.standin")


@pytest.mark.parametrize("name", ["collectives", "death", "nccl"])
def test_a_part_passes(name: str, tmp_path: Path) -> None:
    machine = machine_here(PYTHON)
    assert machine["devices"] == ["stand-in", "stand-in"]
    (result,) = run_all(chosen([name]), tmp_path, {}, machine, python=PYTHON)
    assert result.status == PASSED, result
    assert result.checks
    assert f"## {name}: " in (tmp_path / "gpu.md").read_text(encoding="utf-8")
