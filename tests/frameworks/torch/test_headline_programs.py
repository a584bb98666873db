"""The headline programs: networks, generators, schedules and resumed trainings."""

import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from examples.climate import generate as climate_generator
from examples.climate.deeplab import DeepLabV3Plus
from examples.climate.fields import Fields
from examples.climate.tiramisu import Tiramisu
from examples.climate.train import FieldOptions
from examples.imagenet import generate as image_generator
from examples.imagenet.resnet import LAYERS, ResNet
from examples.imagenet.train import ImageOptions
from safetensors.torch import load_file
from tests.support.ranks import Process
from tests.support.scripts import run_script
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from multiring.errors import DataError
from multiring.training import (
    TrainingOptions,
    learning_rate_schedule,
    parse_options,
    read_options,
    steps_per_epoch,
)
from multiring.training import options as options_file
from multiring.training import run_folder as report
from multiring.training.run_folder import discard_metrics_after

ROOT = Path(__file__).resolve().parents[3]
RECIPES = ROOT / "examples" / "imagenet" / "recipes"
IMAGES = (
    "--batch=12",
    "--epochs=2",
    "--log-every=1",
    "--save-every=2",
    "--evaluate-every=10",
    "--workers=1",
    "--no-peak",
)
SMALL = ("--model=resnet26", "--width=4", "--size=32", "--small", "--least-area=0.5", "--rate=0.05")


def flops(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> float:
    """Return the TFLOP of a forward and backward pass by torch's counter.

    Nothing is computed.
    """
    with torch.device("meta"):
        model, inputs = make(), torch.empty(shape)
    counter = FlopCounterMode(display=False)
    with counter:
        model(inputs).sum().backward()
    return counter.get_total_flops() / 1e12


@pytest.mark.parametrize(
    ("make", "low", "high"),
    [(DeepLabV3Plus, 13.0, 14.5), (Tiramisu, 4.1, 4.3)],
    ids=["deeplabv3+", "tiramisu"],
)
def test_climate_networks_have_the_published_arithmetic(make: Callable[[], nn.Module], low: float, high: float) -> None:
    assert low <= flops(make, (1, 16, 768, 1152)) <= high


@pytest.mark.parametrize(("name", "parameters"), [("resnet50", 25_557_032), ("resnet101", 44_549_160)])
def test_resnets_have_torchvisions_parameters(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = ResNet(LAYERS[name], 1000)
    assert sum(each.numel() for each in model.parameters()) == parameters
    names = set(model.state_dict())
    assert {"conv1.weight", "bn1.running_mean", "layer1.0.downsample.0.weight", "layer4.2.bn3.bias"} < names


def test_fields_of_a_wrong_size_are_refused() -> None:
    with torch.device("meta"):
        deeplab, tiramisu = DeepLabV3Plus(width=4), Tiramisu(growth=4, first=8)
        fields = torch.empty(2, 16, 100, 96)
    with pytest.raises(ValueError, match="multiples of 8"):
        deeplab(fields)
    with pytest.raises(ValueError, match="multiples of 16"):
        tiramisu(fields)


def test_generators_draw_the_same_each_time_and_other_splits_otherwise() -> None:
    one, again = (image_generator.draw(7, "train", 3, 32) for _ in range(2))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, image_generator.draw(7, "val", 3, 32))
    data, labels = climate_generator.draw("train", 1, 48, 72)
    assert data.shape == (48, 72, 16)
    assert set(np.unique(labels)) == {0, 1, 2}
    assert np.array_equal(labels, climate_generator.draw("train", 1, 48, 72)[1])


@pytest.mark.parametrize(
    ("file", "rate", "warm", "epochs"),
    [
        ("lars_3264", 10.5, 2, 37),
        ("lars_32256", 21.2, 16, 58),
        ("lars_35840", 21.9, 17, 60),
        ("lars_40448", 19.4, 24, 70),
        ("lars_57344", 23.0, 32, 78),
    ],
)
def test_schedules_are_the_logged_ones(file: str, rate: float, warm: int, epochs: int) -> None:
    said = ImageOptions(**read_options(RECIPES / f"{file}.toml", ImageOptions))
    steps = steps_per_epoch(1_281_167, said.batch)
    schedule = learning_rate_schedule(said, steps)
    begin, end = warm * steps, epochs * steps
    middle = (begin + end) // 2
    assert said.rate * schedule(0) == 0
    assert said.rate * schedule(begin) == pytest.approx(rate)
    assert said.rate * schedule(middle) == pytest.approx(rate * (1 - (middle - begin) / (end - begin)) ** 2)
    assert said.rate * schedule(end) == pytest.approx(0, abs=1e-12)


def test_options_come_from_a_file_and_flags_and_unknown_ones_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.toml"
    path.write_text('epochs = 3\nrate = 1\noptimizer = "lars"\n', encoding="utf-8")
    found = parse_options(TrainingOptions, ["--options", str(path), "--epochs", "4"])
    assert (found.epochs, found.rate, found.optimizer) == (4, 1.0, "lars")
    options_file.write(found, tmp_path)
    assert TrainingOptions(**read_options(tmp_path / report.OPTIONS, TrainingOptions)) == found
    for text, told in (
        ("epoch = 3", "'epoch' is not an option"),
        ('epochs = "x"', "epochs='x': want a value of type int"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(SystemExit):
            parse_options(TrainingOptions, ["--options", str(path)])
        assert told in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_options(TrainingOptions, ["--lag", "2"])
    assert "lag=2: want 0 or 1 steps" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [ImageOptions, FieldOptions])
def test_every_option_says_what_it_means(kind: type[TrainingOptions], capsys: pytest.CaptureFixture[str]) -> None:
    assert set(options_file.meanings(kind)) == {field.name for field in dataclasses.fields(kind)}
    with pytest.raises(SystemExit):
        parse_options(kind, ["--help"])
    assert "threads per rank that read and decode" in capsys.readouterr().out


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    image_generator.generate(folder, 3, {"train": 16, "val": 5, "shifted": 0}, size=32, processes=1)
    return folder


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fields")
    climate_generator.generate(folder, {"train": 6, "val": 3}, 32, 48, processes=1)
    return folder


def launched(ranks: int, program: str, data: Path, run: Path, *words: str) -> str:
    """Run a program on `ranks` ranks with the launcher, which one test uses; return its output."""
    command = [sys.executable, "-m", "multiring", "run", "-n", str(ranks), "--", sys.executable, "-m", program]
    command += [f"--data={data}", f"--run={run}", *words]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def forked(ranks: int, program: str, data: Path, run: Path, *words: str) -> str:
    """Run like `launched`, but on ranks that are forked after the imports."""
    script = ROOT.joinpath(*program.split(".")).with_suffix(".py")
    process = Process(nursery="torch", beforehand=(program,))
    ended = run_script(script, ranks, f"--data={data}", f"--run={run}", *words, process=process)
    assert all(code == 0 for code, _ in ended), ended
    return "".join(told for _, told in ended)


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / report.METRICS).read_text(encoding="utf-8").splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


def weights_digest(checkpoint: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(checkpoint.rglob("shared.safetensors")):
        for name, value in sorted(load_file(path).items()):
            digest.update(name.encode() + value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def test_a_training_that_was_stopped_ends_with_the_weights_of_one_that_was_not(images: Path, tmp_path: Path) -> None:
    words = (*IMAGES, *SMALL, "--optimizer=larc", "--trust=0.02", "--lag=1", "--micro-batch=4", "--ema=0.9")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    forked(2, "examples.imagenet.train", images, whole, *words)
    # The copy looks like a run that was killed after step 6, before step 8 was saved.
    shutil.copytree(whole, stopped)
    shutil.rmtree(stopped / "checkpoints" / "step-00000008")
    told = forked(2, "examples.imagenet.train", images, stopped, *words)
    assert "going on from" in told
    assert "step-00000006" in told
    last = [weights_digest(run / "checkpoints" / "step-00000008") for run in (whole, stopped)]
    assert last[0] == last[1] != hashlib.sha256().hexdigest()
    assert "top-1" in (stopped / report.PAGE).read_text(encoding="utf-8")


def test_two_ranks_follow_one_and_evaluate_alike(fields: Path, tmp_path: Path) -> None:
    words = ("--width=4", "--batch=6", "--epochs=6", "--log-every=1", "--sync-norm", "--no-noise")
    scores = []
    for ranks in (1, 2):
        run = tmp_path / str(ranks)
        forked(ranks, "examples.climate.train", fields, run, *words, "--rate=0.01", "--precision=float64")
        scores.append(json.loads((run / report.RESULT).read_text(encoding="utf-8"))["headline"])
    one, two = (losses(tmp_path / str(ranks)) for ranks in (1, 2))
    assert len(one) == 6
    np.testing.assert_allclose(one, two, rtol=0, atol=1e-8)
    assert scores[0]["val, mean IoU, %"] == scores[1]["val, mean IoU, %"]


def test_a_loss_that_is_no_number_is_named_before_its_step_is_saved(images: Path, tmp_path: Path) -> None:
    words = (
        *IMAGES,
        *SMALL,
        "--rate=1e30",
        "--warmup=0",
    )  # the first step ruins all weights with gradients
    with pytest.raises(AssertionError, match=r"step 1: the loss is nan on rank 0, nan on rank 1"):
        launched(2, "examples.imagenet.train", images, tmp_path, *words)
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_metrics_that_are_written_again_are_left_out(tmp_path: Path) -> None:
    metrics = tmp_path / report.METRICS
    discard_metrics_after(3, metrics)
    assert not metrics.exists()
    lines = [json.dumps({"kind": "step", "step": step}) + "\n" for step in range(1, 6)]
    metrics.write_text("".join(lines) + '{"kind": "st', encoding="utf-8")
    discard_metrics_after(3, metrics)
    assert metrics.read_text(encoding="utf-8") == "".join(lines[:3])


def test_fields_that_are_wrong_are_named(fields: Path, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "data-0.h5", "w") as file:
        file["climate/data"] = np.zeros((32, 48, 16), np.float32)
    with pytest.raises(DataError, match=r"no variable climate/labels_0; it has climate/data"):
        Fields(tmp_path, fields / "stats.h5")
    with h5py.File(tmp_path / "data-0.h5", "a") as file:
        file["climate/labels_0"] = np.zeros((32, 48), np.int32)
    found = Fields(tmp_path, fields / "stats.h5")
    with pytest.raises(DataError, match="class 'cyclone' has no pixel"):
        found.frequencies()
    with h5py.File(tmp_path / "data-1.h5", "w") as file:
        file["climate/data"] = np.zeros((32, 40, 16), np.float32)
        file["climate/labels_0"] = np.zeros((32, 40), np.int32)
    found = Fields(tmp_path, fields / "stats.h5", shuffle=False)
    with pytest.raises(DataError, match=r"data-1.h5: fields of shape \(32, 40, 16\)"):
        found.sample(1)
    (tmp_path / "data-2.h5").write_bytes(b"nothing")
    with pytest.raises(DataError, match="cannot be read as HDF5"):
        Fields(tmp_path, fields / "stats.h5", shuffle=False).sample(2)
