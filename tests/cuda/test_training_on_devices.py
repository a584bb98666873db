"""`multiring.training` on devices: a run has the losses and scores of the host's, and goes on on the other."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.standin.torch_devices import host_waits
from tests.support.cuda_torch_ranks import run_cuda
from tests.support.ranks import Here
from torch import Tensor, nn

from multiring.data import ArrayDataset
from multiring.errors import UnsupportedError
from multiring.training import TrainingOptions, TrainingRun, TrainingTask, model_dtype
from multiring.training.devices import device_of, placed
from multiring.training.task import Batch

COMMON: dict[str, Any] = {
    "batch": 6,
    "epochs": 3,
    "rate": 0.05,
    "log_every": 1,
    "warmup": 0.0,
    "ema": 0.9,
    "clip": 1.0,
    "micro_batch": 2,
    "optimizer": "larc",
    "peak": False,
}


class Images(TrainingTask):
    """Random images with a convolution and a batch norm; the last batch has fewer samples."""

    def __init__(self) -> None:
        draws = np.random.default_rng(3)
        fields = {
            "image": draws.normal(size=(20, 1, 6, 6)).astype(np.float32),
            "label": draws.integers(0, 3, 20),
            "name": np.array([f"image {number}" for number in range(20)]),
        }
        self.training = ArrayDataset(fields)
        self.evaluations = {"held": ArrayDataset(fields, shuffle=False)}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = model(torch.as_tensor(batch["image"]).to(model_dtype(model)))
        return nn.functional.cross_entropy(logits.float(), torch.as_tensor(batch["label"]), reduction="none")

    def measure(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        assert str(batch["name"][0]).startswith("image ")
        labels = torch.as_tensor(batch["label"])
        right = model(torch.as_tensor(batch["image"])).argmax(1) == labels
        return self.losses(model, batch), torch.stack([torch.full_like(labels[0], len(labels)), right.sum()])

    def scores(self, counts: Tensor) -> dict[str, float]:
        return {"right": 100 * counts[1].item() / counts[0].item()}


def train(_: Here, folder: str, options: dict[str, Any]) -> tuple[str, float, float]:
    run = TrainingRun(Images(), TrainingOptions(run=folder, **{**COMMON, **options}))
    progress = run.train()
    with suppress(UnsupportedError):  # matplotlib is not in this environment; result.json is written
        run.write_report()
    return str(run.device.type), progress.losses["held"], progress.scores["held"]["right"]


def losses_of(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_run_on_devices_has_the_losses_of_the_host(precision: str, tmp_path: Path) -> None:
    host, device, moved = (tmp_path / name for name in ("host", "device", "moved"))
    options = {"precision": precision}
    expected = run_cuda(train, str(host), {**options, "device": "cpu"})
    found = run_cuda(train, str(device), options)
    assert [each[0] for each in (*expected, *found)] == ["cpu", "cpu", "cuda", "cuda"]
    close: dict[str, Any] = {"rel": 1e-5} if precision == "float32" else {"rel": 2e-2}
    assert len(losses_of(host)) == 12
    assert losses_of(device) == pytest.approx(losses_of(host), **close)
    assert found[0][1:] == found[1][1:] == pytest.approx(expected[0][1:], **close)
    circumstances = json.loads((device / "result.json").read_text(encoding="utf-8"))["circumstances"]
    assert circumstances["device of rank 0"] == torch.cuda.get_device_name(0)
    if precision == "float32":  # half on devices, half on the host
        run_cuda(train, str(moved), {"minutes": 1e-9})
        assert 0 < len(losses_of(moved)) < 12
        run_cuda(train, str(moved), {"device": "cpu"})
        assert losses_of(moved) == pytest.approx(losses_of(host), **close)


def waits_of_steps(_: Here, folder: str) -> list[int]:
    run = TrainingRun(Images(), TrainingOptions(run=folder, **{**COMMON, "clip": 0.0, "optimizer": "sgd", "ema": 0.0}))
    own_step, waits = run._step, []

    def counted(batch: Batch) -> Tensor:
        before = host_waits()
        loss = own_step(batch)
        waits.append(host_waits() - before)
        return loss

    run._step = counted  # type: ignore[method-assign]
    run.train()
    return waits


def test_a_step_waits_for_the_device_only_where_its_gradients_are_checked(tmp_path: Path) -> None:
    for waits in run_cuda(waits_of_steps, str(tmp_path / "run")):
        assert len(waits) == 12
        assert [waits[number] for number in (1, 2, 5, 6, 9, 10)] == [1] * 6  # evaluations follow steps 4 and 8


def test_a_gpu_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("auto", plain=True).type == "cpu"
    with pytest.raises(UnsupportedError, match=r"device='cuda', but torch .* sees no GPU here"):
        device_of("cuda", plain=True)


def places(_: Here) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    batch = {"x": np.arange(3), "name": np.array(["a", "b", "c"]), "what": object(), "none": np.array([None] * 3)}
    found = placed(batch, device)
    assert found["x"].device == device
    assert found["x"].tolist() == [0, 1, 2]
    assert [found[name] is batch[name] for name in ("name", "what", "none")] == [True] * 3
    assert placed(batch, torch.device("cpu")) is batch


def test_numbers_are_moved_and_other_fields_stay() -> None:
    run_cuda(places, devices=1, hosts=1)
