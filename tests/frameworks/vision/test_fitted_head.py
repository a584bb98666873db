"""The head of a classifier, fitted to pretrained features: it is the optimum, on any number of ranks, in every part."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.ranks import Here, Process, run_ranks
from tests.support.shape_pictures import classified_shapes

from multiring.errors import ArgumentError
from multiring.vision import VisionProject, make_split, read_picture
from multiring.vision.exporting.runs import export_run
from multiring.vision.fitting import fitted_head
from multiring.vision.fitting.train_command import train_model
from multiring.vision.models.preprocessing import normalise, prepare_picture
from multiring.vision.models.residual import PictureClassifier, ResidualEncoder
from multiring.vision.models.vision_model import load_model
from multiring.vision.predicting.predictors import Predictor
from multiring.vision.scoring.scored_runs import samples_of, score_run

torch_files = pytest.importorskip("safetensors.torch")

TORCH = Process(nursery="torch", beforehand=("multiring.training", "multiring.vision.fitting.train_command"))
OPTIONS: dict[str, Any] = {"fit_head": True, "epochs": 0, "levels": 2, "size": 32, "turns": True, "peak": False}
_DECAY = 3e-2  # of a training without validation


def project_with_base(folder: Path, each: int, **parts: float) -> tuple[Path, str]:
    """Make a project of shapes with a split, and a file of random weights as a base."""
    torch.manual_seed(3)
    base = folder.parent / "base.safetensors"
    torch_files.save_file(PictureClassifier(ResidualEncoder(8, 1), 2).state_dict(), base)
    classified_shapes(folder, each)
    with VisionProject.open(folder) as project:
        make_split(project, parts)
    return folder, str(base)


def test_the_head_is_the_optimum_over_all_symmetric_pictures(tmp_path: Path) -> None:
    """Its gradient is zero. The symmetric pictures are made here by NumPy."""
    folder, base = project_with_base(tmp_path / "shapes", 12, train=1.0)
    run = train_model(folder, base=base, val="", **OPTIONS)
    assert run is not None
    model = load_model(run)
    network: Any = model.network
    rows, classes = [], []
    for sample in samples_of(folder, model.description, "train").parts["train"]:
        square = prepare_picture(read_picture(folder / sample.path).pixels, 32, "stretch")
        views = [np.rot90(each, turns) for each in (square, square[:, ::-1]) for turns in range(4)]
        pixels = torch.from_numpy(np.stack(views)).permute(0, 3, 1, 2).float()
        with torch.no_grad():
            rows.extend(network.features(normalise(pixels, model.mean, model.std)).double().numpy())
        classes.extend([model.description.classes.index(sample.class_name)] * 8)
    x, truth = np.stack(rows), np.eye(2)[classes]
    weight, bias = (each.detach().double().numpy() for each in network.head.parameters())
    logits = x @ weight.T + bias
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    surplus = shares - (0.95 * truth + 0.025)  # labels are smoothed by 5 %
    spread = np.maximum(x.std(0), 1e-3 * x.std(0).max())
    standardised = (x - x.mean(0)) / spread
    slope = standardised.T @ surplus / len(x) + 2 * _DECAY * (weight * spread).T
    at_zero = standardised.T @ (0.5 - truth) / len(x)
    assert np.abs(slope).max() < 2e-3 * np.abs(at_zero).max()
    assert np.abs(surplus.mean(0)).max() < 1e-4
    assert (logits.argmax(1) == classes).mean() > 0.75


def test_every_part_has_the_same_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, base = project_with_base(tmp_path / "shapes", 16, train=0.5, val=0.5)
    run = train_model(folder, base=base, symmetries=8, **OPTIONS)
    assert run is not None
    described = load_model(run).description
    assert (described.symmetries, described.arguments["levels"]) == (8, 2)
    scores = score_run(folder, "classify")
    assert scores.figures["accuracy"] == pytest.approx(described.scores["accuracy"])
    with VisionProject.open(folder) as project:
        parity = export_run(project, "classify").parity
    assert parity["equal_answers"] == 1
    assert parity["metric_of_training"] == pytest.approx(parity["metric_of_export"])
    pixels = read_picture(folder / "000.png").pixels[None]
    [one], [other] = (Predictor.open(path).predict(pixels) for path in (run, run / "model.onnx"))
    assert one.labels == other.labels
    assert one.scores == pytest.approx(other.scores, abs=1e-5)
    # Epochs train on from the fitted head. An interrupted training does not fit it again.
    report = json.loads((run / "result.json").read_text(encoding="utf-8"))
    assert report["step"]["steps"] == 0
    calls = []

    def counted(*rest: Any) -> float:
        calls.append(1)
        return fitted_head.fit_head(*rest)

    monkeypatch.setattr("multiring.vision.fitting.kinds.fit_head", counted)
    options = {
        **OPTIONS,
        "epochs": 1,
        "symmetries": 8,
        "name": "on",
        "rate": 1e-12,
        "weight_decay": 0.0,
        "fixed_norms": True,
    }
    trained = train_model(folder, base=base, **options)
    assert trained is not None
    found, wanted = (load_model(each).network.state_dict()["head.weight"] for each in (trained, run))
    torch.testing.assert_close(found, wanted)
    (trained / "model.json").unlink()
    assert train_model(folder, base=base, name="on") == trained
    assert len(calls) == 1


def head_of(_: Here, folder: str, base: str, name: str) -> list[list[float]]:
    run = train_model(folder, base=base, name=name, **OPTIONS)
    if run is None:
        return []
    found: list[list[float]] = load_model(run).network.state_dict()["head.weight"].tolist()
    return found


def test_any_number_of_ranks_fits_the_same_head(tmp_path: Path) -> None:
    folder, base = project_with_base(tmp_path / "shapes", 14, train=0.7, val=0.3)
    found = [
        run_ranks(head_of, ranks, str(folder), base, f"on-{ranks}", process=TORCH, deadline_s=300.0)[0]
        for ranks in (1, 2, 3)
    ]
    assert np.abs(found[0]).max() > 1e-3
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-4, atol=1e-6)


def test_what_makes_no_sense_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, base = project_with_base(tmp_path / "shapes", 4, train=1.0)
    for options, told in (
        ({"fit_head": True}, "fit_head=True, but no base"),
        ({"epochs": 0}, "epochs=0: want a number of 1 or more"),
        ({"fit_head": True, "base": base, "kind": "detect"}, "fit_head=True for the kind 'detect': want classify"),
        ({"symmetries": 8, "kind": "segment"}, "symmetries=8 for the kind 'segment': want classify"),
        ({"symmetries": 3}, "symmetries=3: want 1, 2, 4, 8"),
        ({"levels": 5}, "levels=5: want 1, 2, 3, 4"),
    ):
        with pytest.raises(ArgumentError, match=told):
            train_model(folder, val="", **options)
    monkeypatch.setattr(fitted_head, "_MOST_NUMBERS", 7 * 192)
    with pytest.raises(ArgumentError, match=r"with 8 training pictures of 192 features: want at most 7 pictures"):
        train_model(folder, val="", base=base, **OPTIONS)
