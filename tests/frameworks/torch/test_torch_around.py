"""Around the training loop: metrics, outputs, seeds, first-rank work, checkpoints."""

import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.faults import kill
from tests.support.plain import enter
from tests.support.ranks import Here, report_of, run_ranks
from torch import Tensor, nn

import multiring.torch as mt
from multiring._frontend.first_rank import RankFilter
from multiring.errors import ArgumentError, MismatchError


def measure(here: Here) -> None:
    enter()
    # The ranks have 0, 1 and 2 samples; the mean is that of one process with all three samples.
    losses = torch.arange(1.0, here.rank + 1)
    found = mt.mean({"loss": losses.mean(), "by class": np.array([here.rank, 1.0])}, weight=len(losses))
    assert found["loss"] == (1 + 1 + 2) / 3
    assert found["by class"].tolist() == [(1 + 2 + 2) / 3, 1]
    outputs = mt.gather({"logits": losses.requires_grad_(), "names": [f"{here.rank}"] * here.rank, "two": (losses,)})
    assert outputs["logits"].tolist() == [1, 1, 2]
    assert not outputs["logits"].requires_grad
    assert outputs["names"] == ["1", "2", "2"]
    assert torch.equal(outputs["two"][0], outputs["logits"])
    with pytest.raises(ArgumentError, match="no rank has any samples"):
        mt.mean({"loss": 1.0}, weight=0)
    with pytest.raises(ArgumentError if here.rank == 1 else MismatchError, match="weight"):
        mt.mean({"loss": 1.0}, weight=-1 if here.rank == 1 else 1)
    assert mt.mean({"loss": torch.tensor(1.5).bfloat16(), "count": 2**65}) == {"loss": 1.5, "count": 2.0**65}
    for odd in (torch.tensor(1 + 2j).conj(), np.array(1 + 2j), "3.5", torch.ones(1, device="meta"), [None, 1]):
        with pytest.raises(ArgumentError if here.rank == 1 else MismatchError, match="want a real number"):
            mt.mean({"loss": odd if here.rank == 1 else 1.0})
    with pytest.raises(MismatchError, match=r"loss \(\)|accuracy \(\)"):
        mt.mean({"loss" if here.rank else "accuracy": 1.0})
    with pytest.raises(ArgumentError, match="gather: outputs is a float"):
        mt.gather(1.5)


def test_metrics_and_outputs_are_those_of_all_samples() -> None:
    run_ranks(measure, 3)


def fail() -> None:
    raise OSError("no space")


def take_turns(here: Here, folder: str) -> list[Any]:
    enter()
    prepared = Path(folder, "prepared")
    with mt.on_first_rank() as is_first:
        assert is_first is (here.rank == 0)
        assert prepared.exists() is not is_first
        if is_first:
            prepared.write_text("once")
    with mt.on_first_rank(each_host=True):
        pass
    failed = None
    try:
        with mt.on_first_rank() as is_first:
            assert is_first, "only the first rank may run this"
            fail()
    except (OSError, MismatchError) as error:
        failed = str(error)
    same = mt.seed_everything(7)
    numbers = [random.random(), np.random.rand(), torch.rand(1).item()]  # noqa: NPY002, S311 -- programs use these
    drawn = mt.seed_everything(None)
    own = mt.seed_everything(7, differs=True)
    with pytest.raises(MismatchError, match="different seeds"):
        mt.seed_everything(here.rank)
    record = logging.LogRecord("a", logging.INFO, "f", 1, "m", (), None)
    assert RankFilter().filter(record) is (here.rank == 0)
    assert vars(record)["rank"] == here.rank
    assert list(mt.progress([1, 2])) == [1, 2]
    return [failed, same, numbers, drawn, own]


def test_the_first_rank_goes_first(tmp_path: Path) -> None:
    failed, same, numbers, drawn, own = zip(*run_ranks(take_turns, 3, str(tmp_path)), strict=True)
    assert failed == ("no space", *["on_first_rank: rank 0 failed with OSError: no space"] * 2)
    assert same == (7, 7, 7)
    assert numbers[0] == numbers[1] == numbers[2]
    assert len(set(drawn)) == 1
    assert len(set(own)) == 3


def model_of(seed: int = 0, width: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1)).bfloat16().float()


def names_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


class Script:
    """A model in training, with all parts of a checkpoint."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        self.model = model_of(seed)
        plain = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.optimizer = mt.DistributedOptimizer(plain, self.model.named_parameters(), **options)
        self.scheduler = torch.optim.lr_scheduler.StepLR(plain, 2)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 3) + 0.1 * random.random()).square().mean().backward()  # noqa: S311 -- no secret
            self.optimizer.step()
            self.scheduler.step()

    LEARNED = 36  # the number of weights; statistics follow them

    def weights(self) -> list[float]:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return [value for tensor in tensors for value in tensor.double().reshape(-1).tolist()]

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}


LOSSY: dict[str, Any] = {"compression": mt.Compression.bf16, "error_feedback": True}


def save_and_go_on(here: Here, folder: str) -> list[float]:
    enter()
    mt.seed_everything(3, differs=True)
    script = Script(**LOSSY)
    script.train(3)
    odd = {"list": [1, None, True, float("inf")], 5: (torch.ones(2, dtype=torch.bfloat16), np.arange(3)), "empty": {}}
    mt.save(f"{folder}/last", **script.parts(), epoch=3, odd=odd, own={"cursor": here.rank})
    script.train(2)
    after = script.weights()
    mt.save(f"{folder}/last", **script.parts(), epoch=5)
    mt.save(f"{folder}/last", **script.parts(), epoch=3)  # replaces the previous checkpoint
    assert mt.load(f"{folder}/last")["epoch"] == 3
    return after


def resume(here: Here, folder: str, saved_by: int) -> list[float]:
    enter()
    script = Script(seed=99, **LOSSY)
    values = mt.load(f"{folder}/last", **script.parts())
    is_same = here.size == saved_by
    assert values["epoch"] == 3
    assert values["own"] == ({"cursor": here.rank} if is_same else None)
    odd = values["odd"]
    assert odd["list"] == [1, None, True, float("inf")]
    assert odd[5][0].dtype == torch.bfloat16
    assert odd[5][1].tolist() == [0, 1, 2]
    assert isinstance(odd[5], tuple)
    assert odd["empty"] == {}
    script.train(2)
    return script.weights()


def save_once(here: Here, folder: str) -> list[float]:
    enter()
    mt.seed_everything(3, differs=True)
    script = Script(**LOSSY)
    script.train(3)
    odd = {"list": [1, None, True, float("inf")], 5: (torch.ones(2, dtype=torch.bfloat16), np.arange(3)), "empty": {}}
    mt.save(f"{folder}/last", **script.parts(), epoch=3, odd=odd, own={"cursor": here.rank})
    script.train(2)
    return script.weights()


def test_training_goes_on_to_the_bit(tmp_path: Path) -> None:
    undisturbed = run_ranks(save_once, 2, str(tmp_path), engine="tcp")
    assert run_ranks(resume, 2, str(tmp_path), 2, engine="tcp") == undisturbed
    assert names_in(tmp_path) == ["last"]
    data, manifest = names_in(tmp_path / "last")
    assert manifest == "manifest.json"
    assert names_in(tmp_path / "last" / data) == [
        *("rank-00000.json", "rank-00000.safetensors", "rank-00001.json", "rank-00001.safetensors"),
        *("save.json", "shared.json", "shared.safetensors"),
    ]
    # On other numbers of ranks, too, all ranks have the same weights.
    for ranks in (1, 3):
        weights = run_ranks(resume, ranks, str(tmp_path), 2)
        learned = [each[: Script.LEARNED] for each in weights]  # each rank has its own BatchNorm statistics
        assert all(each == learned[0] for each in learned)


def test_a_checkpoint_replaces_another(tmp_path: Path) -> None:
    run_ranks(save_and_go_on, 2, str(tmp_path))
    assert names_in(tmp_path) == ["last"]


def misuse(here: Here, folder: str) -> None:
    enter()
    path = f"{folder}/last"
    script = Script()
    with pytest.raises(ArgumentError, match="no finished checkpoint at"):
        mt.load(path)
    with pytest.raises(ArgumentError if here.rank == 0 else MismatchError, match=r"odd is a set|rank 0 failed with"):
        mt.save(path, odd={1, 2})
    with pytest.raises(ArgumentError if here.rank == 1 else MismatchError, match=r"own.own is a object|rank 1 failed"):
        mt.save(path, epoch=1, own=object() if here.rank == 1 else None)
    assert names_in(Path(folder)) == []
    mt.save(path, model=script.model, optimizer=script.optimizer, epoch=1)
    with pytest.raises(ArgumentError, match=r"scheduler is not in the checkpoint .* which has model, optimizer, epoch"):
        mt.load(path, scheduler=script.scheduler)
    with pytest.raises(ArgumentError, match="epoch is a int, which has no load_state_dict"):
        mt.load(path, epoch=1)
    with pytest.raises(ArgumentError, match=r"another model's: model.0.weight is of shape \(5, 3\) in the checkpoint"):
        mt.load(path, model=model_of(width=6))
    with pytest.raises(ArgumentError, match=r"model.2.weight is in the checkpoint, but not in this model"):
        mt.load(path, model=nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)))
    with pytest.raises(ArgumentError, match=r"model.0.0.weight is not in the checkpoint"):
        mt.load(path, model=nn.Sequential(script.model))
    with pytest.raises(ArgumentError, match="optimizer does not accept its state in the checkpoint"):
        mt.load(path, optimizer=torch.optim.Adam([nn.Parameter(torch.ones(1))]))
    mt.barrier()
    if here.rank == 0:  # takes the shared part from another save
        (shared,) = Path(path).rglob("shared.json")
        shared.write_text(json.dumps({**json.loads(shared.read_text()), "token": "another"}))
    mt.barrier()
    with pytest.raises(ArgumentError, match="shared belongs to another save"):
        mt.load(path)
    mt.barrier()
    if here.rank == 0:
        next(Path(path).rglob("shared.json")).write_text("{")
    mt.barrier()
    with pytest.raises(ArgumentError, match="shared cannot be read"):
        mt.load(path)


def test_misuse_is_told(tmp_path: Path) -> None:
    run_ranks(misuse, 2, str(tmp_path))


def save_again_and_again(here: Here, folder: str) -> None:
    enter()
    value = torch.zeros(200_000)
    for number in range(10_000):
        value.fill_(number)
        mt.save(f"{folder}/last", value=value, number=number, own=number)
        if number == 2:
            here.reach("saving")


def look(_here: Here, folder: str) -> int:
    enter()
    found = mt.load(f"{folder}/last")
    tensor: Tensor = found["value"]
    assert (tensor == found["number"]).all()
    assert found["own"] == found["number"]
    return int(found["number"])


@pytest.mark.parametrize("delay_s", [0.0, 0.003, 0.011, 0.02])
def test_a_kill_inside_a_save_leaves_a_complete_one(tmp_path: Path, delay_s: float) -> None:
    report_of(save_again_and_again, 2, str(tmp_path), faults=[kill(0).at("saving").after(delay_s)])
    assert min(run_ranks(look, 2, str(tmp_path))) >= 2


def hand_on(here: Here) -> list[Any]:
    enter()
    written: list[Any] = []
    starts = []

    def start() -> Any:
        starts.append(here.rank)
        return lambda metrics, step: written.append((step, metrics))

    log = mt.metrics_hook(start, every=2)
    weight = torch.ones(1, requires_grad=True)
    for step in range(3):
        # The ranks have 1 and 2 samples in the first step, and 0 and 1 in the other steps.
        count = here.rank + (step == 0)
        found = log(step, {"loss": (weight * (step + here.rank)).sum(), "two": np.full(2, step)}, weight=count)
        assert (found is None) is (step != 1)
    assert log.flush(2) == {"loss": 3.0, "two": pytest.approx([2.0, 2.0])}
    assert log.flush(3) is None
    log(4, {"a": 1.0})
    with pytest.raises(ArgumentError, match="want the same metrics as in the previous step: a"):
        log(5, {"b": 1.0})
    with pytest.raises(ArgumentError, match="every=0"):
        mt.metrics_hook(start, every=0)
    assert starts == ([0] if here.rank == 0 else [])
    return written


def test_a_hook_hands_on_what_one_process_would() -> None:
    first, other = run_ranks(hand_on, 2)
    assert other == []
    [(step, metrics), (last, _)] = first
    assert (step, last) == (1, 2)
    # The losses are 0 once and 1 twice in the first step, and 2 once in the second.
    assert metrics["loss"] == (0 + 1 + 1 + 2) / 4
    assert metrics["two"].tolist() == [1 / 4, 1 / 4]


def scale(here: Here, distributes: bool) -> list[list[float]]:  # noqa: FBT001 -- an option of the test
    enter()
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.arange(12.0).reshape(4, 3) / 12)
    loader: Any = torch.utils.data.DataLoader(data, 2)
    if distributes:
        model, optimizer, loader = mt.distribute(model, optimizer, loader)
    else:
        mt.DistributedOptimizer(optimizer, model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    seen = []
    for number, (inputs,) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(inputs).float().square().mean()
        # Only one rank overflows, in the first step.
        factor = float("inf") if (number, here.rank) == (0, 1) else 1.0
        scaler.scale(loss * factor).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = model.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        seen.append([scaler.get_scale(), float((model.weight.detach() - before).abs().sum())])
    return seen


@pytest.mark.parametrize("distributes", [False, True])
def test_a_scaler_leaves_a_step_out_on_all_ranks_or_on_none(distributes: bool) -> None:  # noqa: FBT001
    first, other = run_ranks(scale, 2, distributes)
    assert first == other
    assert first[0] == [2.0, 0.0]
    assert first[1][0] == 2.0
    assert first[1][1] > 0


def test_the_module_lists_its_interface_only() -> None:
    assert dir(mt) == sorted(mt.__all__)
    assert all(hasattr(mt, name) for name in dir(mt))
