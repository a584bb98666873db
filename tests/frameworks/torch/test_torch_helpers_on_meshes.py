"""Each public helper on each mesh gives one process's result or an error.

The error names the reason. The helpers are those of docs/loop.md and docs/convergence.md.
"""

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from benchmarks.evidence.parallel.helpers import (
    AXES,
    LOSS,
    ROWS,
    WITHOUT_ROW,
    batches,
    cells,
    expected,
    fault_of,
    meshes_without,
    network,
    prospect,
)
from tests.support.plain import join
from tests.support.ranks import Here, run_ranks
from torch import Tensor, nn

import multiring.torch as mt
from multiring.errors import ArgumentError, MismatchError
from multiring.planner.parallelism import parallelism_of
from multiring.torch.parallelizing.deciding import build, look

PAGES = [Path(__file__).parents[3] / "docs" / name for name in ("loop.md", "convergence.md", "parallelize.md")]


def public_names() -> set[str]:
    """Return multiring.torch's public names: `__all__` and other public attributes."""
    found = {name for name, each in vars(mt).items() if not name.startswith("_") and not isinstance(each, ModuleType)}
    return (found | set(mt.__all__)) - {"require_framework", "keep_untraced", "keep_to_public_names"}


def test_every_public_helper_has_a_row_or_a_reason() -> None:
    """A new helper without a row or a reason fails this test."""
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


class Remembering(nn.Module):
    """A module with counts in extra state and in a buffer outside the state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"batches": 0}
        self.weight = nn.Parameter(torch.ones(8).double())
        self.total: Tensor
        self.register_buffer("total", torch.zeros(()), persistent=False)

    def forward(self, given: Tensor) -> Tensor:
        """Return the input times the weight."""
        return given * self.weight

    def get_extra_state(self) -> dict[str, int]:
        """Return the counts, which are not tensors."""
        return dict(self.seen)

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Resume with the saved counts."""
        self.seen = dict(state)


def remembering() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8, 8).double(), nn.Tanh(), Remembering(), nn.Linear(8, 4).double())


def try_checkpoints(folder: Path) -> None:
    """Check that checkpoints of two meshes load on each mesh and in one process."""
    inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(3)).double()
    found = look(remembering(), (inputs,), None, 1, None)
    for axis in ("pipeline", "data"):
        made = build(remembering(), found.taken({axis: 2}), found)
        for layer in made.plain_module.modules():
            if isinstance(layer, Remembering):
                layer.seen["batches"] = 7
                layer.total.fill_(5.0)
        with torch.no_grad():
            for each in made.parameters():
                each.add_(0.5)
        average = torch.optim.swa_utils.AveragedModel(made.plain_module)
        mt.save(folder / axis, model=made.module, average=average)
        one = remembering()
        pair = build(remembering(), found.taken({"pipeline": 2}), found)
        other = build(remembering(), found.taken({"data": 2}), found)
        mean = torch.optim.swa_utils.AveragedModel(remembering())
        for module in (one, pair.module, other.module):
            mt.load(folder / axis, model=module)
        mt.load(folder / axis, average=mean)
        want = {name: each + 0.5 for name, each in remembering().named_parameters()}
        for module in (one, pair.plain_module, other.plain_module, mean.module):
            assert all(torch.equal(each, want[name]) for name, each in module.named_parameters())
            layers = [each for each in module.modules() if isinstance(each, Remembering)]
            assert all((each.seen["batches"], float(each.total)) == (7, 5.0) for each in layers)


def try_refusals(here: Here) -> None:
    inputs, targets = batches()[0]
    synchronised = nn.Sequential(nn.Linear(8, 8), mt.SyncBatchNorm(8), nn.Linear(8, 4)).double()
    with pytest.raises(ArgumentError, match="1 is a SyncBatchNorm, which communicates"):
        mt.parallelize(synchronised, inputs)
    made = build(network(), prospect().taken({"data": here.size}), prospect())
    made.module.requires_grad_(requires_grad=False)
    own, labels = made.share(inputs, targets)
    with pytest.raises(ArgumentError, match=r"requires_grad of 0\.bias was changed after parallelize"):
        made.step(own, labels, LOSS)
    for axis in ("tensor", "pipeline"):
        made = build(network(), prospect().taken({axis: here.size}), prospect())
        with pytest.raises(MismatchError, match=f"under {axis} 2.* ranks 0 and 1 .* inputs differ"):
            made.step(inputs + here.rank, targets, LOSS)


def try_others(here: Here, folder: str) -> None:
    join(here)
    torch.set_num_threads(1)
    dist.init_process_group("multiring", init_method=f"file://{folder}/store", rank=here.rank, world_size=here.size)
    try_refusals(here)
    try_checkpoints(Path(folder))
    dist.destroy_process_group()


def test_checkpoints_and_refusals_of_meshes(tmp_path: Path) -> None:
    run_ranks(try_others, 2, str(tmp_path), deadline_s=240.0)


def try_cells(here: Here, folder: str) -> list[str]:
    join(here)
    torch.set_num_threads(1)
    dist.init_process_group("multiring", init_method=f"file://{folder}/store", rank=here.rank, world_size=here.size)
    found = [fault_of(*each, Path(folder)) for each in cells(here.size, is_thinned=True)]
    dist.destroy_process_group()
    return [each for each in found if each]


def test_helpers_on_meshes(tmp_path: Path) -> None:
    """Try each helper in one kind of loop; the kinds take turns.

    benchmarks/evidence/parallel/main.py tries all kinds, and four ranks.
    """
    assert run_ranks(try_cells, 2, str(tmp_path), deadline_s=350.0) == [[], []]
