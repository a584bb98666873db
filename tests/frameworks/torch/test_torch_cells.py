"""A random sample of the table of cells; benchmarks/evidence/horovod/cells.py runs all."""

import sys

import pytest
from tests.support.cells import cells_of, run_cells, sample
from tests.support.ranks import run_ranks

CELLS, SEED = 160, 20261121


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_cells(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = sample(ranks, CELLS, SEED + ranks)
    wrong = run_ranks(run_cells, ranks, chosen)
    failed = {text.partition(": ")[0] for each in wrong for text in each}
    with capsys.disabled():
        done = len(chosen) - len(failed)
        sys.stdout.write(f" {done} of {len(chosen)} cells of {len(cells_of(ranks))} at {ranks} ranks ")
    assert wrong == [[]] * ranks
