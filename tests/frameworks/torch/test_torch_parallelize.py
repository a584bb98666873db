"""On every mix of axes a model trains alike, and ranks hold the forecast memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
from tests.support.plain import backward
from tests.support.ranks import Here, run_ranks
from torch import Tensor, nn

import multiring.torch as mt
from multiring._topology import TCP, Topology
from multiring.errors import ArgumentError, StateError, UnsupportedError
from multiring.planner.parallelism import Compute
from multiring.torch.parallelizing.anatomy import Split, anatomy_of
from multiring.torch.parallelizing.building import equalise
from multiring.torch.parallelizing.deciding import build, look
from multiring.torch.parallelizing.held import local
from multiring.torch.parallelizing.measuring import ascending, calls_of, cost_of

RANKS, BATCH, WORDS, CLASSES, STEPS = 4, 16, 4096, 5, 3
TWO_BY_TWO = Topology(((0, 1), (2, 3)), rails=(TCP,))
MESHES: tuple[dict[str, int], ...] = (
    {"data": 4},
    {"shard": 4},
    {"data": 2, "shard": 2},
    {"tensor": 4},
    {"data": 2, "tensor": 2},
    {"pipeline": 4},
    {"data": 2, "pipeline": 2},
)
Model = Callable[[], nn.Sequential]


def network(seed: int = 0) -> nn.Sequential:
    """Return a model with every kind of layer that is divided, and small layers."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Embedding(WORDS, 64), nn.Flatten()),
        nn.Sequential(nn.Linear(3 * 64, 512), nn.Tanh(), nn.Linear(512, 64)),
        *(nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, CLASSES)),
    ).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(WORDS, (BATCH, 3), generator=generator)
    return words, words.sum(1) % CLASSES


def plain_losses() -> list[float]:
    model = network()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), []
    for step in range(STEPS):
        words, labels = batch(step)
        loss = nn.functional.cross_entropy(model(words), labels)
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def enter(here: Here, folder: str, backend: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=here.rank, world_size=here.size)


def train(here: Here, folder: str) -> dict[str, dict[str, Any]]:
    """Train on every mesh over multiring; return the results by mesh."""
    enter(here, folder, "multiring")
    found = {}
    prospect = look(network(), (batch(0)[0],), None, 1, TWO_BY_TWO)
    for mesh in MESHES:
        model = build(network(), prospect.taken(mesh), prospect)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), []
        for step in range(STEPS):
            words, labels = model.share(*batch(step))
            optimizer.zero_grad()
            losses.append(float(model.step(words, labels, nn.functional.cross_entropy)))
            optimizer.step()
        held = sum(local(each).nbytes for each in model.parameters())
        states = next(each.memory.states for each in model.forecasts if each.parallelism == model.parallelism)
        found[str(mesh)] = {
            "losses": losses,
            "held": 3 * held,
            "states": states,
            "mix": str(model.parallelism),
            "part": (model.data_rank, model.data_ranks),
            "mesh": {name: model.mesh.get_local_rank(name) for name in model.mesh.mesh_dim_names or ()},
            "offered": len(model.forecasts),
            "shown": repr(model),
        }
        if "pipeline" in mesh:
            with pytest.raises(ArgumentError, match="as in the sample that the pipeline was built for"):
                model.step(words[:1], labels[:1], nn.functional.cross_entropy)
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(train, RANKS, str(tmp_path_factory.mktemp("train")), deadline_s=240.0)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_losses_are_those_of_training_alone(trained: list[dict[str, dict[str, Any]]], mesh: dict[str, int]) -> None:
    wanted = plain_losses()
    for rank in trained:
        assert rank[str(mesh)]["losses"] == pytest.approx(wanted, rel=1e-10)
        assert rank[str(mesh)]["offered"] == len(MESHES)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_rank_holds_what_was_forecast(trained: list[dict[str, dict[str, Any]]], mesh: dict[str, int]) -> None:
    most = max(rank[str(mesh)]["held"] for rank in trained)
    # The last layer's parameter is padded, because the ranks do not divide its first dimension.
    assert most == pytest.approx(trained[0][str(mesh)]["states"], rel=2e-3)


def test_parts_of_the_batch_go_with_the_axes(trained: list[dict[str, dict[str, Any]]]) -> None:
    for mesh in MESHES:
        ranks = [rank[str(mesh)] for rank in trained]
        data_ranks = mesh.get("data", 1) * mesh.get("shard", 1)
        assert sorted(rank["part"] for rank in ranks) == sorted(
            (part, data_ranks) for part in list(range(data_ranks)) * (RANKS // data_ranks)
        )
        assert len({str(sorted(rank["mesh"].items())) for rank in ranks}) == RANKS
        near = ranks[0]["mix"].split(" x ")[-1].split(" ")[0]
        if len(mesh) == 2:  # ranks 0 and 1 share a host
            assert [rank["mesh"][near] for rank in ranks] == [0, 1, 0, 1]
    assert trained[0][str(MESHES[0])]["shown"] == "ParallelModel(data 4, rank 0 has part 0 of 4)"


def choose(here: Here, folder: str) -> dict[str, Any]:
    """Return the choices and errors of `parallelize`, over Gloo."""
    enter(here, folder, "gloo")
    torch.manual_seed(here.rank)
    striding = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch misses it
    equalise(striding)
    told = [torch.empty_like(striding.weight.detach().contiguous()) for _ in range(here.size)]
    dist.all_gather(told, striding.weight.detach().contiguous())
    shared = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4))
    shared.append(shared[0])
    words = batch(0)[0]
    memory = 9 << 20  # replicated states would need 12.6 MB
    short = mt.parallelize(network(here.rank), words, memory_bytes=memory)
    optimizer = torch.optim.SGD(short.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for step in range(STEPS):
        mine, labels = short.share(*batch(step))
        optimizer.zero_grad()
        losses.append(float(short.step(mine, labels, nn.functional.cross_entropy)))
        optimizer.step()
    before = [each.clone() for each in shared.buffers()]
    given = torch.randn(8, 4)
    drawn = torch.get_rng_state()
    alone = mt.parallelize(shared, given)
    same_draws = torch.equal(drawn, torch.get_rng_state())
    same_buffers = all(torch.equal(*pair) for pair in zip(before, shared.buffers(), strict=True))
    refusals = {}
    calls: dict[str, dict[str, Any]] = {
        "memory": {"memory_bytes": 1000.0},
        "word": {"mesh": "best"},
        "topology": {"topology": TWO_BY_TWO},
        "scalar": {"sample": torch.tensor(1.0)},
        "unlike": {"sample": (words, words[:3])},
        "pipeline": {"model": shared, "sample": torch.randn(8, 4), "mesh": {"pipeline": 2}},
    }
    for name, options in calls.items():
        arguments: dict[str, Any] = {"model": network(), "sample": words, **options}
        with pytest.raises(ArgumentError) as caught:
            mt.parallelize(**arguments)
        refusals[name] = str(caught.value)
    with pytest.raises(UnsupportedError, match="parameter weight is on meta: want all of them in host memory"):
        mt.parallelize(nn.Linear(4, 4, device="meta"), torch.randn(8, 4))
    with pytest.raises(ArgumentError, match=r"\[7\] samples: want a multiple of 2"):
        alone.share(torch.zeros(7))
    dist.destroy_process_group()
    return {
        "short": (short.parallelism.axes, short.forecasts[0].memory.total, [each.fits for each in short.forecasts]),
        "losses": losses,
        "alone": str(alone.parallelism),
        "equal": all(torch.equal(told[0], each) for each in told),
        "undone": (same_buffers, same_draws, all(each.grad is None for each in shared.parameters())),
        "refusals": refusals,
    }


def test_the_choice_fits_and_refusals_say_what_was_wanted(tmp_path: Path) -> None:
    ranks = run_ranks(choose, 2, str(tmp_path), deadline_s=240.0)
    assert ranks[0]["short"] == ranks[1]["short"]
    axes, total, fits = ranks[0]["short"]
    assert total <= 9 << 20
    assert fits[0]
    assert not all(fits)
    assert axes != (("data", 2),)
    assert ranks[0]["losses"] == ranks[1]["losses"] == pytest.approx(plain_losses(), rel=1e-10)
    assert ranks[0]["alone"] in {"data 2", "shard 2"}
    assert ranks[0]["undone"] == (True, True, True)
    assert ranks[0]["equal"]
    wanted = {
        "memory": "no mix fits into a rank's memory of 0 MiB",
        "word": "mesh='best': want \"auto\"",
        "topology": "topology of 4 ranks: want a topology of all 2 ranks",
        "scalar": "want the batch of all ranks",
        "unlike": "first dimensions ['16', '3']",
        "pipeline": "is used in more than one place",
    }
    for name, words in wanted.items():
        assert words in ranks[0]["refusals"][name]


def test_without_a_process_group_nothing_is_done() -> None:
    with pytest.raises(StateError, match="init_process_group"):
        mt.parallelize(network(), batch(0)[0])


def test_layers_are_divided_where_that_keeps_the_result() -> None:
    anatomy = anatomy_of(network(), 4)
    assert dict(anatomy.splits) == {"0": Split.GATHERED, "2.0": Split.COLUMN, "2.2": Split.ROW}
    assert anatomy.divisor == 64
    assert [part.name for part in anatomy.parts] == ["0", "1", "2.0", "2.1", "2.2", "3", "4", "5"]
    assert not anatomy.refused
    assert not anatomy_of(network(), 7).splits


def test_what_disturbed_a_measurement_is_cut() -> None:
    found = [Compute(4, 3.0, 1.0), Compute(1, 2.0, 5.0), Compute(2, 4.0, 0.5)]
    assert ascending(found) == (Compute(1, 2.0, 0.5), Compute(2, 3.0, 0.5), Compute(4, 3.0, 1.0))


def test_what_autograd_keeps_is_counted_once_and_without_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Sequential(nn.Tanh(), nn.Tanh()))
    calls = calls_of(model, (torch.randn(4, 8),), dict(model.named_children()))
    kept = [cost_of(module, calls[name]).saved_bytes for name, module in model.named_children()]
    assert kept == [4 * 8 * 4, 4 * 8 * 4, 2 * 4 * 8 * 4]
    assert cost_of(nn.Tanh(), []).seconds == 0
    assert all(each.grad is None for each in model.parameters())


class Branching(nn.Module):
    """A model that is not an nn.Sequential, with dropout and a list of layers.

    It has parameters of its own, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.layers = nn.ModuleList([nn.Linear(600, 600), nn.Linear(600, 600)])
        self.drop = nn.Dropout(0.1)

    def forward(self, given: Tensor) -> Tensor:
        made: Tensor = self.drop(self.layers[0](given) + self.layers[1](given)) * self.scale.sum()
        return made


def test_why_an_axis_cannot_be_had_is_said() -> None:
    anatomy = anatomy_of(Branching(), 2)
    assert [part.name for part in anatomy.parts] == ["", "layers.0", "layers.1", "drop"]
    assert dict(anatomy.splits) == {"layers.0": Split.GATHERED, "layers.1": Split.GATHERED}
    assert "not an nn.Sequential" in anatomy.refused["pipeline"]
    assert "drop draws random numbers" in anatomy.refused["tensor"]
    alone = anatomy_of(nn.Linear(4, 4), 2)
    assert [part.name for part in alone.parts] == [""]
    assert "large enough" in alone.refused["tensor"]
    normed = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert "1 would normalise over each microbatch" in anatomy_of(normed, 2).refused["pipeline"]
    assert "one part" in anatomy_of(nn.Sequential(nn.Linear(4, 4)), 2).refused["pipeline"]
