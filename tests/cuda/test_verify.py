"""Parts of `multiring verify gpu` pass on the stand-ins."""

import sys
from pathlib import Path

import pytest

from multiring._verify.behaviours.table import BEHAVIOURS, VARYING, recorded, results_here
from multiring._verify.results import PASSED
from multiring._verify.running import chosen, machine_here, run_all

PYTHON = (sys.executable, "-m", "tests.standin")


@pytest.mark.parametrize("name", ["collectives", "wire", "death", "nccl"])
def test_a_part_passes(name: str, tmp_path: Path) -> None:
    machine = machine_here(PYTHON)
    assert machine["devices"] == ["stand-in", "stand-in"]
    (result,) = run_all(chosen([name]), tmp_path, {}, machine, python=PYTHON)
    assert result.status == PASSED, result
    assert result.checks
    assert f"## {name}: " in (tmp_path / "gpu.md").read_text(encoding="utf-8")


def test_experiments_run_alone_and_beside_the_record() -> None:
    record = recorded()
    assert record.keys() == BEHAVIOURS.keys() > VARYING
    names = ["a_wait_means_the_record_before_it", "sticky_error", "torch_errors_that_stay"]
    assert results_here(names, PYTHON) == {name: record[name] for name in names}
