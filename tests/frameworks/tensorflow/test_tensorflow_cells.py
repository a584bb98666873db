"""A random sample of TensorFlow's table of cells; benchmarks/evidence/horovod/cells.py runs all."""

import sys
from importlib import import_module
from importlib.util import find_spec

import pytest
from tests.support.ranks import Here, Process, run_ranks

pytestmark = pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")
CELLS, SEED = 60, 20261124
# The table imports TensorFlow, so only ranks import it.
TABLE = "tests.support.tensorflow_cells"


def run_sample(here: Here) -> tuple[int, int, list[str]]:
    """Return the numbers of chosen cells and of all cells, and what is wrong in the chosen ones."""
    cells = import_module(TABLE)
    chosen = cells.sample(here.size, CELLS, SEED + here.size)
    return len(chosen), len(cells.cells_of(here.size)), cells.run_cells(here, chosen)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_cells(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_ranks(run_sample, ranks, process=Process(nursery="tf", beforehand=(TABLE,)), deadline_s=240.0)
    chosen, known, _ = found[0]
    wrong = [each for *_, each in found]
    failed = {text.partition(": ")[0] for each in wrong for text in each}
    with capsys.disabled():
        sys.stdout.write(f" {chosen - len(failed)} of {chosen} cells of {known} at {ranks} ranks ")
    assert chosen >= CELLS
    assert wrong == [[]] * ranks
