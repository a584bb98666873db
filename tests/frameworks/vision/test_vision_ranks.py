"""Training on pictures on several ranks, and after kills: the same losses, and the same bits."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.ranks import Here, Process, RanksFailed, run_ranks
from tests.support.shape_pictures import classified_shapes, located_shapes

from multiring.vision import Label, VisionProject, make_split
from multiring.vision.fitting.train_command import train_model
from multiring.vision.models.residual import PictureClassifier, ResidualEncoder

torch_files = pytest.importorskip("safetensors.torch")

TORCH = Process(nursery="torch", beforehand=("multiring.training", "multiring.vision.fitting.train_command"))
STEPS = 50
# In batches of 8, the last 5 of an epoch would not fill one, and could leave a rank without a sample.
PICTURES = 21
SMALL: dict[str, Any] = {"width": 8, "blocks": 1, "size": 32, "log_every": 1, "peak": False, "batch": 8}


def train(_: Here, folder: str, name: str, options: dict[str, Any]) -> float:
    run = train_model(folder, name=name, **{**SMALL, **options})
    return 0.0 if run is None else json.loads((run / "model.json").read_text(encoding="utf-8"))["seed"]


def train_on(here: Here, folders: list[str], options: dict[str, Any], bases: list[str] | None = None) -> float:
    own = {} if bases is None else {"base": bases[here.rank]}
    return train(here, folders[here.rank], "apart", {**options, **own})


def write_base(path: Path, seed: int) -> Path:
    """Write random weights of the small network as a file of pretrained weights."""
    torch.manual_seed(seed)
    torch_files.save_file(PictureClassifier(ResidualEncoder(8, 1), 2).state_dict(), path)
    return path


def test_ranks_with_other_labels_or_options_refuse_on_every_rank(tmp_path: Path) -> None:
    folders = [classified_shapes(tmp_path / name, 6) for name in ("first", "second")]
    for folder in folders:
        with VisionProject.open(folder) as project:
            make_split(project, {"train": 1.0})
    with VisionProject.open(folders[1]) as project:
        path = next(iter(project.labellings()))
        [label] = project.labellings()[path].labels or ()
        project.set_labels(path, (Label(class_name={"disc": "block", "block": "disc"}[label.class_name]),), "ann")

    def told(names: list[Path], bases: list[str] | None = None, **options: Any) -> str:
        with pytest.raises(RanksFailed) as caught:
            run_ranks(train_on, 2, [str(each) for each in names], {"val": "", **options}, bases, process=TORCH)
        assert "2 ranks failed" in str(caught.value)
        return str(caught.value)

    assert "rank 1 has labels" in told(folders)
    assert "rank 1 cannot train: " in told([folders[0], tmp_path / "none"])
    assert "batch=1 on 2 ranks: a batch of 1 samples gives" in told([folders[0]] * 2, batch=1)
    bases = [str(write_base(tmp_path / f"{seed}.safetensors", seed)) for seed in range(2)]
    assert "rank 1 has option base_digest" in told([folders[0]] * 2, bases)
    assert "cannot be read: No such file" in told([folders[0]] * 2, [bases[0], str(tmp_path / "none")])
    assert not any((folder / "runs" / "apart").exists() for folder in folders)


def losses(folder: Path, name: str) -> list[float]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line["loss"] for line in map(json.loads, lines) if line["kind"] == "step"]


@pytest.mark.parametrize(("kind", "numbers"), [("classify", (1, 2, 4)), ("detect", (1, 2))])
def test_any_number_of_ranks_has_the_same_losses(tmp_path: Path, kind: str, numbers: tuple[int, ...]) -> None:
    folder = tmp_path / "shapes"
    if kind == "classify":
        classified_shapes(folder, 9, empty=3)
    else:
        located_shapes(folder, PICTURES)
    with VisionProject.open(folder) as project:
        make_split(project, {"train": 1.0})
    options = {"kind": kind, "precision": "float64", "val": "", "epochs": STEPS // (PICTURES // 8), "noise": False}
    if kind == "detect":
        options["head"] = 8
    else:
        options["base"] = str(write_base(tmp_path / "base.safetensors", 1))
    for ranks in numbers:
        run_ranks(train, ranks, str(folder), f"on-{ranks}", options, process=TORCH, deadline_s=300.0)
    one, *others = (losses(folder, f"on-{ranks}") for ranks in numbers)
    assert len(one) == STEPS
    assert min(one) < 0.95 * one[0]  # it learns, so that the steps differ
    for other in others:
        np.testing.assert_allclose(other, one, atol=1e-6)


def command(folder: Path, name: str) -> list[str]:
    base = folder.parent / "base.safetensors"
    words = [f"--{key}={value}" for key, value in {**SMALL, "epochs": 30, "save_every": 7}.items() if key != "peak"]
    words = [each.replace("_", "-") for each in words]
    return [
        sys.executable,
        "-m",
        "multiring",
        "vision",
        "train",
        str(folder),
        "--name",
        name,
        "--no-noise",
        *words,
        f"--base={base}",
    ]


def test_a_killed_training_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    folder = classified_shapes(tmp_path / "shapes", 12)
    write_base(tmp_path / "base.safetensors", 1)
    subprocess.run(command(folder, "whole"), check=True, timeout=300, capture_output=True)
    kills = 0
    for step in (9, 25, 40):  # not where a checkpoint is
        process = subprocess.Popen(command(folder, "killed"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        metrics = folder / "runs" / "killed" / "metrics.jsonl"
        until = time.monotonic() + 240
        while process.poll() is None and time.monotonic() < until:
            if metrics.exists() and f'"step": {step},' in metrics.read_text(encoding="utf-8"):
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.005)
        process.communicate(timeout=240)
    assert kills == 3
    subprocess.run(command(folder, "killed"), check=True, timeout=300, capture_output=True)
    whole, killed = (folder / "runs" / name for name in ("whole", "killed"))
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert losses(folder, "killed") == losses(folder, "whole")
    told = [json.loads((each / "model.json").read_text(encoding="utf-8")) for each in (whole, killed)]
    assert [each.pop("when") is not None for each in told] == [True, True]
    assert told[0] == told[1]
