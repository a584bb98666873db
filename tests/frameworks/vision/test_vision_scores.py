"""Scores of trained models: the figures, the report file, comparison, production, and pictures of every format."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.shape_pictures import classified_shapes, located_shapes

from multiring._cli import main
from multiring.errors import ArgumentError, DataError
from multiring.vision import (
    Box,
    Label,
    Mask,
    Polygon,
    VisionProject,
    make_split,
    read_picture,
    read_split,
    run_lengths_of,
)
from multiring.vision.exporting.runs import export_run
from multiring.vision.fitting.augmentation import UNCHANGED
from multiring.vision.fitting.detect_task import BINS, average_precision, overlaps
from multiring.vision.fitting.samples import PictureSamples, SampleOptions, read_sample
from multiring.vision.fitting.segment_task import UNKNOWN, classes_of_pixels, overlap_scores
from multiring.vision.fitting.targets import labelled_parts
from multiring.vision.models.description import ModelDescription
from multiring.vision.models.vision_model import VisionModel, load_model, save_model
from multiring.vision.scoring import production
from multiring.vision.scoring.figures import calibration, precision_recall, sign_test
from multiring.vision.scoring.production import production_runs, set_production
from multiring.vision.scoring.score_page import heat_map, write_score_page
from multiring.vision.scoring.scored_runs import score_run


def with_model(folder: Path, kind: str, run: str = "one", seed: int = 0, **values: Any) -> Path:
    """Put a model without training into a project, whose pictures are split, and return the run's folder."""
    with VisionProject.open(folder) as project:
        split = make_split(project, {"train": 0.5, "val": 0.5})
        classes = project.classes()
    described = ModelDescription(
        kind=kind,
        classes=classes,
        size=64,
        architecture="resnet",
        arguments={"width": 8, "blocks": 1, **({} if kind == "classify" else {"head": 8})},
        digests={"split": split.digest},
        split=split.name,
        **values,
    )
    place = folder / "runs" / run
    place.mkdir()
    torch.manual_seed(seed)
    model = VisionModel(described)
    for each in model.network.modules():
        if isinstance(each, torch.nn.Linear | torch.nn.Conv2d) and each.bias is not None:
            torch.nn.init.normal_(each.weight)
    save_model(place, model.eval(), described)
    return place


def test_each_sample_counts_once_in_every_figure(tmp_path: Path) -> None:
    folder = classified_shapes(tmp_path / "shapes", 8, empty=4)
    with VisionProject.open(folder) as project:
        for number in range(20):
            project.set_group(f"{number:03}.png", f"day {number % 3}")
    place = with_model(folder, "classify", has_nothing=True)
    model = load_model(place)
    scores = score_run(folder, "one")
    with VisionProject.open(folder) as project:
        paths, labels = read_split(project).parts["val"], project.labellings()
    assert [each.path for each in scores.samples] == list(paths)
    assert np.sum(scores.confusion) == len(paths)
    names = ["disc", "block", "nothing"]
    right = 0
    for sample in scores.samples:
        pixels = read_picture(folder / sample.path).pixels
        with torch.no_grad():
            row = model(torch.from_numpy(pixels)[None])["probabilities"][0].tolist()
        row.append(1 - sum(row))
        truth = labels[sample.path].labels
        assert truth is not None
        number = names.index(truth[0].class_name if truth else "nothing")
        assert sample.score == pytest.approx(row[number], abs=1e-6)
        assert sample.is_right == (int(np.argmax(row)) == number)
        right += sample.is_right
    assert scores.figures["accuracy"] == pytest.approx(100 * right / len(paths))
    assert sum(count for count, _, _ in scores.calibration) == len(paths)
    assert {name: count for name, count, _ in scores.groups} == {
        name: sum(each.group == name for each in scores.samples) for name in {each.group for each in scores.samples}
    }
    assert json.loads((place / "eval-val.json").read_text(encoding="utf-8"))["figures"] == scores.figures


@pytest.mark.parametrize("kind", ["classify", "detect", "segment"])
def test_the_report_is_one_file_with_pictures(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "shapes"
    if kind == "classify":
        classified_shapes(folder, 5)
    else:
        located_shapes(folder, 9, masks=kind == "segment")
    place = with_model(folder, kind)
    with_model(folder, kind, "two", seed=1)
    assert main(["vision", "eval", str(folder), "one", "--compare", "two", "--production"]) == 0
    with VisionProject.open(folder) as project:
        count = len(read_split(project).parts["val"])
    assert f"one, {count} samples of val: " in capsys.readouterr().out
    page = (place / "eval-val.html").read_text(encoding="utf-8")
    assert page.count("<img") == count
    assert not re.search(r"(?:src|href)='(?!data:)", page)
    assert "a difference as large would have a probability of" in page
    assert production_runs(folder) == {kind: "one"}
    assert set_production(folder, "two") == kind
    assert production_runs(folder) == {kind: "two"}
    if kind != "segment":
        heat = heat_map(load_model(place), read_picture(folder / "000.png").pixels)
        assert heat.shape == read_picture(folder / "000.png").pixels.shape[:2]
        assert 0 <= heat.min() < heat.max() <= 1
    if kind != "classify":  # an export is compared by the metric of the scores
        with VisionProject.open(folder) as project:
            parity = export_run(project, "one").parity
        figures = json.loads((place / "eval-val.json").read_text(encoding="utf-8"))["figures"]
        assert parity["metric"] == {"detect": "mAP", "segment": "mean IoU"}[kind]
        assert parity["metric_of_model"] == pytest.approx(figures[parity["metric"]])
        assert parity["metric_of_export"] == pytest.approx(figures[parity["metric"]], abs=0.1)


def test_kinds_that_are_set_at_once_are_both_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = located_shapes(tmp_path / "shapes", 8)
    with_model(folder, "detect", "one")
    with_model(folder, "classify", "two")
    read = production._read
    has_read, goes_on = threading.Event(), threading.Event()

    def slow(path: Path) -> Any:
        found = read(path)
        has_read.set()
        goes_on.wait(0.5)  # the other one has the time to write if it is not kept out
        return found

    monkeypatch.setattr(production, "_read", slow)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(set_production, folder, "one")
        assert has_read.wait(240)
        monkeypatch.setattr(production, "_read", read)
        set_production(folder, "two")
        goes_on.set()
        first.result(240)
    assert production_runs(folder) == {"detect": "one", "classify": "two"}


def test_boxes_that_are_right_score_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """COCO's figures of the true boxes as answers are 100 %; half of the objects missed give half the recall."""
    folder = located_shapes(tmp_path / "shapes", 8)
    with_model(folder, "detect")
    share = 1

    def truth(model: VisionModel, _folder: Path, sample: Any) -> dict[str, Any]:
        labels = sample.labels[: len(sample.labels) // share] if share > 1 else sample.labels
        classes = [model.description.classes.index(each.class_name) for each in labels]
        boxes = np.array([each.bounds() for each in labels], np.float32).reshape(1, -1, 4)
        return {"boxes": boxes, "scores": np.full((1, len(labels)), 0.9, np.float32), "classes": np.array([classes])}

    monkeypatch.setattr("multiring.vision.scoring.scored_runs.answers_for", truth)
    found = score_run(folder, "one")
    assert found.figures == pytest.approx({"mAP50": 100, "mAP": 100, "mAP75": 100})
    assert [each.score for each in found.samples] == [1.0] * len(found.samples)
    share = 2
    assert 0 < score_run(folder, "one").figures["mAP50"] < 100


def test_scores_of_another_split_or_class_are_refused(tmp_path: Path) -> None:
    folder = classified_shapes(tmp_path / "shapes", 5)
    place = with_model(folder, "classify")
    with pytest.raises(DataError, match="has no part 'test'"):
        score_run(folder, "one", "test")
    with VisionProject.open(folder) as project:
        project.add_class("ring")
        path = read_split(project).parts["val"][0]
        project.set_labels(path, (Label(class_name="ring"),), "ann")
    with pytest.raises(DataError, match="class 'ring' is in part 'val', but the model was not trained on it"):
        score_run(folder, "one")
    scores = score_run(folder, "one", "train")
    other = score_run(folder, "one", "train")
    object.__setattr__(other, "labels", "0" * 64)
    with pytest.raises(ArgumentError, match="cannot be compared: their labels differ"):
        write_score_page(folder, scores, other)
    (folder / "runs" / "splits" / "split.json").unlink()
    with VisionProject.open(folder) as project:
        make_split(project, {"train": 0.5, "val": 0.5}, seed=7)
    with pytest.raises(DataError, match="is not the one that the model was trained with"):
        score_run(folder, "one")
    assert not (place / "eval-val.json").exists()


def test_the_figures_are_those_of_their_definitions() -> None:
    scores, is_true = np.array([0.9, 0.8, 0.8, 0.1]), np.array([True, False, True, True])
    recall, precision, average = precision_recall(scores, is_true)
    np.testing.assert_allclose(recall, [1 / 3, 2 / 3, 1])
    np.testing.assert_allclose(precision, [1, 2 / 3, 3 / 4])
    assert average == pytest.approx((1 + 2 / 3 + 3 / 4) / 3)
    found = calibration(np.array([0.95, 0.95, 0.55]), np.array([True, False, True]))
    assert [row[0] for row in found.rows] == [1, 2]
    assert found.error == pytest.approx((0.45 + 2 * 0.45) / 3)
    assert sign_test(0, 0) == 1.0
    assert sign_test(8, 2) == pytest.approx(2 * (1 + 10 + 45) / 1024)
    counts = np.zeros(2 * BINS + 1, np.int64)
    counts[[90, BINS + 80, 50, -1]] = [1, 1, 1, 2]  # right, wrong, right, of 2 objects
    assert average_precision(counts) == pytest.approx((1 + 2 / 3) / 2)
    boxes = np.array([[0, 0, 2, 2]], np.float64)
    np.testing.assert_allclose(overlaps(boxes, np.array([[1, 0, 3, 2], [5, 5, 6, 6]], np.float64)), [[1 / 3, 0]])
    assert overlap_scores(np.array([[6, 2], [0, 2]]), ["a"]) == pytest.approx(
        {"mean IoU": (75 + 50) / 2, "nothing": 75, "class a": 50}
    )


def test_pixels_of_masks_polygons_and_boxes_become_classes() -> None:
    mask = np.zeros((4, 6), bool)
    mask[0, :2] = True
    square = Polygon(class_name="b", outlines=(((2, 1), (5, 1), (5, 4), (2, 4)),))
    labels = (Mask(class_name="a", pixels=run_lengths_of(mask)), square)
    wanted = np.zeros((4, 6), np.uint8)
    wanted[0, :2], wanted[1:4, 2:5] = 1, 2
    np.testing.assert_array_equal(classes_of_pixels(labels, ["a", "b"], 6, 4), wanted)
    boxed = classes_of_pixels((Box(class_name="a", left=4, top=0, width=2, height=4),), ["a"], 6, 4)
    assert (boxed[:, 4:] == UNKNOWN).all()
    assert not boxed[:, :4].any()


def saved_alike(folder: Path) -> list[str]:
    """Write one turned picture of two colours in files that store it differently, and return their names."""
    folder.mkdir()
    upright = np.full((24, 40, 3), 255, np.uint8)
    upright[:, :20] = (0, 0, 0)
    image = Image.fromarray(upright)
    image.save(folder / "plain.png")
    image.convert("P").save(folder / "palette.png")
    image.convert("L").save(folder / "grey.png")
    image.convert("1").save(folder / "bit.png")
    image.convert("CMYK").save(folder / "cmyk.tif")
    Image.fromarray(upright[:, :, 0].astype(np.uint16) * 257).save(folder / "deep.png")
    rgba = np.dstack([np.zeros_like(upright), 255 - upright[:, :, 0]])
    Image.fromarray(rgba).save(folder / "alpha.png")
    exif = Image.Exif()
    exif[274] = 6  # turn clockwise to see it upright
    Image.fromarray(np.rot90(upright, 1)).save(folder / "turned.png", exif=exif)
    return sorted(each.name for each in folder.iterdir())


def test_every_file_format_means_the_same_in_training_and_scoring(tmp_path: Path) -> None:
    folder = tmp_path / "alike"
    names = saved_alike(folder)
    with VisionProject.create(folder) as project:
        project.scan()
        project.add_class("a")
        for name in names:
            project.set_labels(name, (Label(class_name="a"),), "ann")
        other = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8))
        other.save(folder / "other.png")
        project.scan()
        project.set_labels("other.png", (), "ann")
        split = make_split(project, {"train": 0.9, "val": 0.1})
        [part] = [part for part, paths in split.parts.items() if "plain.png" in paths]
        data = labelled_parts(project, split, "classify", [part])
    assert [each.path for each in data.parts[part]] == names
    samples = PictureSamples(
        folder,
        data.parts[part],
        lambda _sample, change: {"same": change is UNCHANGED},
        SampleOptions(size=32, fit="stretch"),
    )
    seen = [samples.sample(number) for number in range(len(names))]
    whole = [read_sample(folder, each, 1) for each in data.parts[part]]
    for name, one, other_one in zip(names, seen, whole, strict=True):
        np.testing.assert_array_equal(one["pixels"], seen[names.index("plain.png")]["pixels"], err_msg=name)
        np.testing.assert_array_equal(other_one, whole[names.index("plain.png")], err_msg=name)
        assert one["same"]
