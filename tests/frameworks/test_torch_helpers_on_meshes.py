"""Every helper of docs/loop.md and docs/convergence.md under every mesh: one process' result, or a refusal by name."""

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from benchmarks.evidence_parallel_helpers import (
    AXES,
    ROWS,
    WITHOUT_ROW,
    cells,
    expected,
    fault_of,
    meshes_without,
)
from tests.frameworks.plain import join
from tests.wire.ranks import Here, run_ranks

import multiring.torch as mt
from multiring.errors import ArgumentError
from multiring.planner.parallelism import parallelism_of

PAGES = [Path(__file__).parents[2] / "docs" / name for name in ("loop.md", "convergence.md", "parallelize.md")]


def public_names() -> set[str]:
    """Return what the module offers: what it lists, and what it imports under its own name to offer it."""
    found = {name for name, each in vars(mt).items() if not name.startswith("_") and not isinstance(each, ModuleType)}
    return (found | set(mt.__all__)) - {"require_framework", "keep_untraced"}


def test_every_public_helper_has_a_row_or_a_reason() -> None:
    """A helper that is added later, without either, fails here."""
    named = {each for row in ROWS.values() for each in row.names}
    assert named.isdisjoint(WITHOUT_ROW)
    assert named | set(WITHOUT_ROW) == public_names()


def test_every_helper_of_the_pages_has_a_row_or_a_reason() -> None:
    told = {each for page in PAGES for each in re.findall(r"\bmt\.(\w+)", page.read_text("utf-8"))}
    assert len(told) > 20
    assert told <= {each for row in ROWS.values() for each in row.names} | set(WITHOUT_ROW)


def test_the_page_has_every_row() -> None:
    text = PAGES[0].read_text("utf-8")
    rows = re.findall(r"^\| (.+?) \| (\w+) \| (\w+) \| (\w+) \| (\w+) \|$", text, re.MULTILINE)
    told = {name: found for name, *found in rows if name in ROWS}
    assert told == {name: [expected(row, {axis: 2}, "plain") for axis in AXES] for name, row in ROWS.items()}
    uneven = next(found for name, *found in rows if name == "a batch that ranks cannot divide")
    assert uneven == [expected(ROWS["`LAMB`"], {axis: 2}, "uneven") for axis in AXES]


@pytest.mark.parametrize("mesh", meshes_without(), ids=str)
def test_other_meshes_are_refused_by_name(mesh: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match="not built together; want one of"):
        parallelism_of(mesh)


def try_cells(here: Here, folder: str) -> list[str]:
    join(here)
    torch.set_num_threads(1)
    dist.init_process_group("multiring", init_method=f"file://{folder}/store", rank=here.rank, world_size=here.size)
    found = [fault_of(*each, Path(folder)) for each in cells(here.size, is_thinned=True)]
    dist.destroy_process_group()
    return [each for each in found if each]


@pytest.mark.timeout(400)
def test_helpers_on_meshes(tmp_path: Path) -> None:
    """In one kind of loop each, by turns; benchmarks/evidence_parallel.py has all kinds, and four ranks."""
    assert run_ranks(try_cells, 2, str(tmp_path), deadline_s=350.0) == [[], []]
