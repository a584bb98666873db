"""A random sample of TensorFlow's table of cells; benchmarks/evidence/horovod/cells.py runs all."""

import sys

import pytest
from tests.support.ranks import run_ranks

pytest.importorskip("tensorflow")
cells = pytest.importorskip("tests.support.tensorflow_cells")
CELLS, SEED = 60, 20261124


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_cells(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = cells.sample(ranks, CELLS, SEED + ranks)
    wrong = run_ranks(cells.run_cells, ranks, chosen, deadline_s=100.0)
    failed = {text.partition(": ")[0] for each in wrong for text in each}
    with capsys.disabled():
        done = len(chosen) - len(failed)
        sys.stdout.write(f" {done} of {len(chosen)} cells of {len(cells.cells_of(ranks))} at {ranks} ranks ")
    assert wrong == [[]] * ranks
