"""Export of a run's model: what answers otherwise than the trained model is refused."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.vision_models import make_run

from multiring._cli import main
from multiring.errors import DataError
from multiring.vision import Box, Label, Mask, VisionProject, read_split, run_lengths_of
from multiring.vision.exporting import exported_files, graphs, runs
from multiring.vision.exporting.exported_files import description_of, read_exported
from multiring.vision.exporting.parity import AnswerComparison
from multiring.vision.exporting.runs import export_run
from multiring.vision.exporting.sessions import ExportedSession
from multiring.vision.fitting.targets import labelled_parts
from multiring.vision.models.answers import Prediction
from multiring.vision.models.preprocessing import resize_pictures
from multiring.vision.models.vision_model import VisionModel


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VisionProject]:
    """Return a project whose run "first" is exported."""
    made, run = make_run(tmp_path_factory.mktemp("project") / "pictures")
    with made:
        export_run(made, run)
        yield made


def test_a_run_is_exported_with_its_figures(project: VisionProject) -> None:
    path = project.runs / "first" / "model.onnx"
    graph, made = read_exported(path)
    assert made.kind == "classify"
    assert made.parity["pictures"] == 48
    assert made.parity["metric_of_model"] == made.parity["metric_of_export"] == 100
    assert made.parity["equal_answers"] == 1
    assert made.parity["largest_difference"] < 1e-5
    assert made.inputs[0].shape == (None, None, None, 3)
    described = description_of(made, "the file")
    assert described.classes == made.classes == ("disc", "block", "stripe")
    assert described.digests["split"] == json.loads((project.runs / "splits" / "split.json").read_text())["digest"]
    assert str(project.folder).encode() not in graph


class Faulty(torch.nn.Module):
    """A model with a fault in its preprocessing or its outputs."""

    def __init__(self, model: VisionModel, fault: str) -> None:
        super().__init__()
        self.model, self.fault = copy.deepcopy(model), fault
        if fault == "mean":
            self.model.mean = torch.full_like(self.model.mean, 0.5)

    def forward(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the answers with the fault."""
        if self.fault == "BGR":
            pixels = pixels.flip(3)
        size, fit = self.model.description.size, self.model.description.fit
        squares = resize_pictures(pixels, size, fit)
        if self.fault == "resize":  # the nearest pixels instead of the triangle filter
            squares = torch.nn.functional.interpolate(pixels.permute(0, 3, 1, 2).float(), size=(size, size))
        return self.model.answers(self.model.outputs(squares), (pixels.shape[1], pixels.shape[2]))


def _files(project: VisionProject) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (project.runs / "first").iterdir()}


@pytest.mark.parametrize("fault", ["BGR", "mean", "resize"])
def test_a_planted_fault_is_refused(fault: str, project: VisionProject, monkeypatch: pytest.MonkeyPatch) -> None:
    real, before = graphs.exported_graph, _files(project)
    monkeypatch.setattr(runs, "exported_graph", lambda model, *rest: real(Faulty(model, fault), *rest))
    with pytest.raises(DataError, match=r"does not answer as the trained one on 48 pictures: .* no file was written"):
        export_run(project, "first")
    assert _files(project) == before


def test_a_swapped_class_order_is_refused(project: VisionProject, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _files(project)
    graph, _ = read_exported(project.runs / "first" / "model.onnx")
    monkeypatch.setattr(runs, "exported_graph", lambda *_: graph)  # the good one, so that the test is short
    real = exported_files.ExportedModel

    def swapped(**values: Any) -> Any:
        classes = list(values["classes"])
        classes[0], classes[1] = classes[1], classes[0]
        description = {**values["description"], "classes": classes}
        return real(**{**values, "classes": tuple(classes), "description": description})

    monkeypatch.setattr(runs, "ExportedModel", swapped)
    with pytest.raises(DataError, match=r"of the answers are equal, the first that is not: .*in place of"):
        export_run(project, "first")
    monkeypatch.setattr(runs, "ExportedModel", lambda **values: real(**{**values, "classes": ("block", "disc", "x")}))
    with pytest.raises(DataError, match="contradicts itself"):
        export_run(project, "first")
    monkeypatch.setattr(runs, "ExportedModel", real)
    assert _files(project) == before
    export_run(project, "first")  # without the fault, the same graph passes


def test_what_cannot_be_compared_is_refused(project: VisionProject, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = read_exported(project.runs / "first" / "model.onnx")
    monkeypatch.setattr(runs, "exported_graph", lambda *_: graph)
    with pytest.raises(DataError, match=r"has no pictures in the part 'test', only in train, val"):
        export_run(project, "first", part="test")
    with pytest.raises(DataError, match=r"has no model\.json"):
        export_run(project, "second")
    for path in (each.path for each in project.images()):
        project.set_labels(path, None, author="ann")
    with pytest.raises(DataError, match="part 'val' of split 'split' has no picture with labels for the kind 'class"):
        export_run(project, "first")
    for _ in project.images():
        project.undo("ann")
    description = project.runs / "first" / "model.json"
    text = description.read_text()
    told = json.loads(text)
    description.write_text(json.dumps({**told, "digests": {**told["digests"], "split": "0" * 64}}))
    with pytest.raises(DataError, match="the model was trained with 0000000000000000: want the same split"):
        export_run(project, "first")
    description.write_text(text)
    picture = project.folder / read_split(project).parts["val"][0]
    data = picture.read_bytes()
    picture.write_bytes(data[:60])
    with pytest.raises(DataError, match="was changed since the last scan"):
        export_run(project, "first")
    picture.write_bytes(data)


def test_pictures_count_as_in_the_training(project: VisionProject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels of another kind say nothing, and a picture without a label is left out, which is told."""
    graph, _ = read_exported(project.runs / "first" / "model.onnx")
    monkeypatch.setattr(runs, "exported_graph", lambda *_: graph)
    first, second, third = read_split(project).parts["val"][:3]
    labelling = project.labellings()[first].labels
    assert labelling is not None
    box = Box(class_name="disc", left=1, top=1, width=3, height=3)
    project.set_labels(first, (*labelling, box), author="ann")
    project.set_labels(second, None, author="ann")
    project.set_labels(third, (box,), author="ann")
    parity = export_run(project, "first").parity
    assert (parity["pictures"], parity["metric_of_model"]) == (46, 100)
    assert parity["left_out"] == {"no label for the kind classify": 1, "not labelled": 1}
    for _ in range(3):
        project.undo("ann")


def test_a_description_changed_since_the_training_is_refused(
    project: VisionProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, _ = read_exported(project.runs / "first" / "model.onnx")
    monkeypatch.setattr(runs, "exported_graph", lambda *_: graph)
    description, split = project.runs / "first" / "model.json", read_split(project)
    text = description.read_text()
    assert export_run(project, "first").parity["labels_as_trained"] is None
    labels = labelled_parts(project, split, "classify", ["train", "val"]).labels_digest
    told = json.loads(text)
    told = {**told, "digests": {**told["digests"], "labels": labels}, "scores": {"accuracy": 100.0}}
    description.write_text(json.dumps(told))
    parity = export_run(project, "first").parity
    assert (parity["labels_as_trained"], parity["metric_of_training"]) == (True, 100)
    assert parity["labels"] == labelled_parts(project, split, "classify", ["val"]).labels_digest
    before = _files(project)
    description.write_text(json.dumps({**told, "scores": {"accuracy": 90.0}}))
    with pytest.raises(DataError, match=r"of its training: want at most 4\.2 points between them; model\.json was"):
        export_run(project, "first")
    description.write_text(json.dumps({**told, "classes": told["classes"][::-1]}))
    with pytest.raises(DataError, match="classes"):
        export_run(project, "first")
    description.write_text(json.dumps({**told, "digests": {**told["digests"], "labels": "0" * 64}}))
    assert export_run(project, "first").parity["labels_as_trained"] is False
    description.write_text(text)
    export_run(project, "first")
    assert set(_files(project)) == set(before)


@pytest.mark.parametrize("of", ["export", "model"])
def test_answers_that_are_not_finite_are_refused(
    of: str, project: VisionProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, _ = read_exported(project.runs / "first" / "model.onnx")
    before = _files(project)
    monkeypatch.setattr(runs, "exported_graph", lambda *_: graph)
    run, forward = ExportedSession.run, VisionModel.forward
    if of == "export":
        monkeypatch.setattr(
            ExportedSession, "run", lambda *all_: {name: each * np.nan for name, each in run(*all_).items()}
        )
    else:
        monkeypatch.setattr(
            VisionModel, "forward", lambda *all_: {name: each * np.nan for name, each in forward(*all_).items()}
        )
    with pytest.raises(DataError, match="probabilities that are not finite numbers"):
        export_run(project, "first")
    assert _files(project) == before


def test_pictures_that_wait_are_bounded(project: VisionProject, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = read_exported(project.runs / "first" / "model.onnx")
    monkeypatch.setattr(runs, "exported_graph", lambda *_: graph)
    batches: list[tuple[int, ...]] = []
    run = ExportedSession.run

    def counted(session: ExportedSession, inputs: Any) -> Any:
        batches.append(inputs["pixels"].shape)
        return run(session, inputs)

    monkeypatch.setattr(ExportedSession, "run", counted)
    first = export_run(project, "first").parity
    assert [each[0] for each in batches[:4]] == [1] * 4
    assert max(each[0] for each in batches) == 8
    batches.clear()
    monkeypatch.setattr(runs, "_WAITING_PIXELS", 4000)  # a picture has 576 to 1881
    assert export_run(project, "first").parity == first
    assert sum(each[0] for each in batches) == 48
    assert 4000 - 1881 < max(each[0] * each[1] * each[2] for each in batches) <= 4000 + 1881


def test_the_command(
    project: VisionProject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, _ = read_exported(project.runs / "first" / "model.onnx")
    monkeypatch.setattr(runs, "exported_graph", lambda *_: graph)
    words = ["vision", "export-model", str(project.folder), "first", "--out", str(tmp_path / "m.onnx")]
    assert main(words) == 0
    said = "48 pictures of the part val: 100.00% of the answers equal, accuracy 100.00 %, of the model 100.00 %"
    assert capsys.readouterr().out == f"{said}: {tmp_path}/m.onnx\n"
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parity"]["pictures"] == 48
    assert main([*words, "--part", "test"]) == 2
    assert "has no pictures in the part 'test'" in capsys.readouterr().err


def _of(*labels: Label) -> Prediction:
    return Prediction(labels=labels, scores=(1.0,) * len(labels), confidence=1.0)


def _mask(left: int) -> Mask:
    pixels = np.zeros((50, 100), bool)
    pixels[:, left:60] = True
    return Mask(class_name="disc", pixels=run_lengths_of(pixels))


@pytest.mark.parametrize(
    ("expected", "found", "share"),
    [
        (_of(Label(class_name="a")), _of(Label(class_name="a")), 1.0),
        (_of(Label(class_name="a")), _of(), 0.0),
        (_of(), _of(), 1.0),
        (_of(Box(class_name="a", left=0, top=0, width=10, height=10)),
         _of(Box(class_name="a", left=0.1, top=0, width=10, height=10)), 1.0),
        (_of(Box(class_name="a", left=0, top=0, width=10, height=10)),
         _of(Box(class_name="b", left=0, top=0, width=10, height=10)), 0.0),
        (_of(Box(class_name="a", left=0, top=0, width=10, height=10)),
         _of(Box(class_name="a", left=0, top=0, width=10, height=10),
             Box(class_name="a", left=0, top=0, width=10, height=10)), 2 / 3),
        (_of(_mask(10)), _of(_mask(11)), 0.99),
        (_of(_mask(10)), _of(), 0.5),
    ],
)  # fmt: skip
def test_equal_answers_are_counted(expected: Prediction, found: Prediction, share: float) -> None:
    comparison = AnswerComparison()
    comparison.add("a.png", expected, found)
    if share == 1:
        assert comparison.figures(1.0, 1.0)["equal_answers"] == 1
    else:
        with pytest.raises(DataError, match=rf"{share:.2%} of the answers are equal, the first that is not: a\.png"):
            comparison.figures(1.0, 1.0)


def test_the_limits_of_parity() -> None:
    comparison = AnswerComparison()
    for number in range(1000):
        comparison.add(f"{number}", _of(Label(class_name="a")), _of(Label(class_name="a" if number else "b")))
    assert comparison.figures(90.0, 90.1)["equal_answers"] == 0.999
    with pytest.raises(DataError, match=r"the metric is 90\.11 % and the trained model's 90\.00 %"):
        comparison.figures(90.0, 90.11)
    with pytest.raises(DataError, match="the metric is nan"):
        comparison.figures(90.0, float("nan"))
    comparison.largest_difference = float("nan")
    with pytest.raises(DataError, match="a probability differs by nan"):
        comparison.figures(90.0, 90.0)
