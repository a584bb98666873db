"""Trained models of pictures: their description, their preprocessing, and their export to ONNX."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from multiring.errors import DataError
from multiring.vision import Label
from multiring.vision.models.answers import predictions_of
from multiring.vision.models.description import DESCRIPTION, WEIGHTS, ModelDescription, read_description
from multiring.vision.models.detector import best_boxes
from multiring.vision.models.preprocessing import prepare_picture
from multiring.vision.models.vision_model import VisionModel, load_model, save_model

CLASSIFIER = ModelDescription(
    kind="classify",
    classes=("cat", "dog"),
    size=32,
    architecture="resnet",
    arguments={"width": 8, "blocks": 1},
    has_nothing=True,
    scores={"accuracy": 90.5},
)
SIZES = ((32, 32), (50, 97), (120, 33), (1, 1), (7, 400))


def noise(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def lively(description: ModelDescription) -> VisionModel:
    """Return a model whose answers depend on its input; a new one's blocks are the identity."""
    torch.manual_seed(1)
    model = VisionModel(description)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            module.running_mean.uniform_(-0.2, 0.2)  # type: ignore[union-attr]
        if isinstance(module, torch.nn.Conv2d) and module.kernel_size == (1, 1) and module.bias is not None:
            torch.nn.init.normal_(module.weight)  # of the last layer: new ones give nearly equal scores
    return model.eval()


def test_a_saved_model_gives_the_same_answers(tmp_path: Path) -> None:
    model = lively(CLASSIFIER)
    written = save_model(tmp_path, model, CLASSIFIER)
    assert written == dataclasses.replace(CLASSIFIER, digests=written.digests)
    loaded = load_model(tmp_path)
    assert loaded.description == written
    pixels = torch.from_numpy(noise(3, 40, 50, 3))
    assert torch.equal(loaded(pixels)["probabilities"], model(pixels)["probabilities"])
    assert not loaded.training


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"kind": "paint"}, "kind='paint': want one of"),
        ({"classes": []}, r"classes=\(\): want at least one"),
        ({"classes": ["a", "a"]}, "each name once"),
        ({"size": "32"}, "size='32'"),
        ({"std": [0.1, 0.2]}, "std="),
        ({"std": [0, 1, 1]}, "numbers above 0"),
        ({"mean": [float("nan"), 0.5, 0.5]}, "mean="),
        ({"frames": 4}, "frames=4"),
        ({"symmetries": 3}, "symmetries=3: want 1, 2, 4 or 8 for the kind classify"),
        (
            {"symmetries": 2, "kind": "act", "frames": 2},
            "symmetries=2: want 1, 2, 4 or 8 for the kind classify, else 1",
        ),
        ({"symmetries": 2}, "trained with other classes, another preprocessing"),
        ({"arguments": {"levels": 5}}, "levels=5: want a whole number from 1 to 4"),
        ({"threshold": 2}, "threshold=2.0: want 0 to 1"),
        ({"digests": {"weights": "abc"}}, "64 hexadecimal digits"),
        ({"colour": 1}, "'colour' is unknown"),
        ({"multiring_model": 99}, "a newer multiring wrote it"),
        ({"multiring_model": 1, "kind": "act"}, "format 1: models of the kind 'act' were different then; train it"),
        ({"architecture": "vgg"}, "architecture 'vgg': want one of resnet"),
        ({"arguments": {"depth": 3}}, "resnet has no argument 'depth'"),
        ({"arguments": {"width": 0}}, "width=0: want a whole number"),
        ({"arguments": {"width": 16}}, "does not fit its model.json"),
        ({"classes": [*CLASSIFIER.classes[::-1]]}, "trained with other classes, another preprocessing"),
        ({"mean": [0.4, 0.5, 0.5]}, "trained with other classes, another preprocessing"),
        ({"fit": "letterbox"}, "trained with other classes, another preprocessing"),
    ],
)
def test_a_description_with_a_wrong_value_is_refused(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    save_model(tmp_path, VisionModel(CLASSIFIER), CLASSIFIER)
    values = json.loads((tmp_path / DESCRIPTION).read_text(encoding="utf-8"))
    (tmp_path / DESCRIPTION).write_text(json.dumps(values | change), encoding="utf-8")
    with pytest.raises(DataError, match=told):
        load_model(tmp_path)
    (tmp_path / DESCRIPTION).write_text(json.dumps(values | {"multiring_model": 1}), encoding="utf-8")
    assert load_model(tmp_path).description.classes == CLASSIFIER.classes  # other kinds are as they were


def test_files_from_before_there_were_symmetries_load(tmp_path: Path) -> None:
    """Their header has a digest of these values alone, which the version of that time wrote."""
    assert CLASSIFIER.function_digest.startswith("b5bf0aa5a2a392b8")
    save_model(tmp_path, VisionModel(CLASSIFIER), CLASSIFIER)
    values = json.loads((tmp_path / DESCRIPTION).read_text(encoding="utf-8"))
    del values["symmetries"]
    for version in (1, 2):
        (tmp_path / DESCRIPTION).write_text(json.dumps(values | {"multiring_model": version}), encoding="utf-8")
        assert load_model(tmp_path).description.symmetries == 1


def in_all_ways(picture: Any, count: int) -> list[Any]:
    """Return a picture's symmetric pictures, (height, width, 3), as NumPy makes them."""
    turned = [np.rot90(picture, turns) for turns in range(4 if count >= 4 else 1)]
    return turned + ([each[:, ::-1] for each in turned] if count in {2, 8} else [])


@pytest.mark.parametrize("count", [2, 4, 8])
def test_an_answer_is_the_mean_over_symmetric_pictures(count: int) -> None:
    plain = lively(CLASSIFIER)
    with torch.no_grad():
        plain.network.state_dict()["head.weight"].mul_(100)  # of a new network, it gives nearly equal answers
    model = VisionModel(dataclasses.replace(CLASSIFIER, symmetries=count)).eval()
    model.load_state_dict(plain.state_dict())
    pixels = noise(2, 32, 32, 3)
    with torch.no_grad():
        found = model(torch.from_numpy(pixels))["probabilities"].numpy()
        for row, picture in zip(found, pixels, strict=True):
            views = np.ascontiguousarray(np.stack(in_all_ways(picture, count)))
            each = plain(torch.from_numpy(views))["probabilities"].numpy()
            assert np.ptp(each, axis=0).max() > 1e-3  # the symmetric pictures get other answers
            np.testing.assert_allclose(row, each.mean(0), atol=1e-6)
            again = model(torch.from_numpy(views))["probabilities"].numpy()  # all of them get the same answer
            np.testing.assert_allclose(again, np.broadcast_to(row, again.shape), atol=1e-6)
        # A training sees the pictures alone.
        squares = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        torch.testing.assert_close(model.train().outputs(squares), plain.train().outputs(squares))


@pytest.mark.parametrize("levels", [2, 4])
def test_a_head_takes_means_and_maxima_of_several_resolutions(levels: int) -> None:
    model = lively(dataclasses.replace(CLASSIFIER, arguments={"width": 8, "blocks": 1, "levels": levels}))
    network: Any = model.network
    inputs = torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        maps = [each.numpy() for each in network.encoder(inputs)]
        wanted = [kind(each, axis=(2, 3)) for each in maps[::-1][:levels] for kind in (np.mean, np.max)]
        np.testing.assert_allclose(network.features(inputs).numpy(), np.concatenate(wanted, 1), atol=1e-5)


def test_equal_weights_are_equal_files(tmp_path: Path) -> None:
    model = VisionModel(CLASSIFIER)
    found = set()
    for _ in range(20):
        save_model(tmp_path, model, CLASSIFIER)
        found.add((tmp_path / WEIGHTS).read_bytes())
    assert len(found) == 1


def test_missing_and_exchanged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no model\.json: want the folder of a run"):
        read_description(tmp_path)
    save_model(tmp_path, VisionModel(CLASSIFIER), CLASSIFIER)
    data = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(data[:-1])
    with pytest.raises(DataError, match="the files are not of one training"):
        load_model(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(DataError, match=r"cannot be read: No such file"):
        load_model(tmp_path)
    (tmp_path / DESCRIPTION).write_text("[]", encoding="utf-8")
    with pytest.raises(DataError, match="does not describe a model"):
        read_description(tmp_path)


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_pictures_are_resized_as_by_pillow(height: int, width: int) -> None:
    pixels = noise(height, width, 3)
    found = prepare_picture(pixels, 32, "stretch").astype(int)
    wanted = np.asarray(Image.fromarray(pixels).resize((32, 32), Image.Resampling.BILINEAR)).astype(int)
    # Pillow rounds between the two axes, and its weights have 22 bits.
    assert np.abs(found - wanted).max() <= 1


def test_a_letterbox_keeps_the_proportions() -> None:
    square = prepare_picture(np.full((20, 80, 3), 200, np.uint8), 32, "letterbox")
    assert (square[:8] == 200).all()
    assert (square[8:] == 0).all()
    assert (prepare_picture(np.full((80, 80, 3), 77, np.uint8), 32, "letterbox") == 77).all()


def exported(model: VisionModel, file: Path) -> Any:
    """Return a session of onnxruntime with the model."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    is_clip = model.description.kind == "act"
    example = (torch.from_numpy(noise(2, *((3,) if is_clip else ()), 40, 50, 3)),)
    names = list(model(*example))
    program = torch.onnx.export(
        model,
        example,
        dynamo=True,
        dynamic_shapes=({0: "n", 1 + is_clip: "h", 2 + is_clip: "w"},),
        input_names=["pixels"],
        output_names=names,
        verbose=False,
    )
    assert program is not None
    program.save(file)
    return onnxruntime.InferenceSession(file)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch's exporter about itself
@pytest.mark.parametrize(
    ("kind", "fit"),
    [
        ("classify", "letterbox"),
        ("detect", "letterbox"),
        ("segment", "stretch"),
        ("act", "stretch"),
    ],
)
def test_the_model_exports_with_its_preprocessing_for_any_size(tmp_path: Path, kind: str, fit: str) -> None:
    model = lively(described(kind, fit))
    session = exported(model, tmp_path / "model.onnx")
    spread = 0.0
    for number, (height, width) in enumerate(SIZES):
        pixels = noise(number + 1, *((3,) if kind == "act" else ()), height, width, 3, seed=number)
        with torch.no_grad():
            wanted = {name: each.numpy() for name, each in model(torch.from_numpy(pixels)).items()}
        found = dict(zip(wanted, session.run(list(wanted), {"pixels": pixels}), strict=True))
        for name, values in wanted.items():
            assert found[name].shape == values.shape
            assert found[name].dtype == values.dtype
            assert len(values) == number + 1
            if kind == "detect":
                continue  # compared below
            if name == "classes":
                assert np.mean(found[name] == values) > 0.999
            else:
                np.testing.assert_allclose(found[name], values, atol=1e-4)
        spread = max(spread, *(float(np.ptp(values)) for values in wanted.values()))
        if kind == "detect":
            one, other = told_boxes(found), told_boxes(wanted)
            assert min(shared(one, other), shared(other, one)) >= 0.95
    assert spread > 0.01  # the answers depend on the pictures


def told_boxes(answers: dict[str, Any]) -> list[Any]:
    """Return the boxes of each picture as rows: four sides, score and class."""
    rows = np.concatenate([answers["boxes"], answers["scores"][..., None], answers["classes"][..., None]], axis=2)
    return [each[each[:, 4] > 1e-6] for each in rows]


def shared(boxes: list[Any], others: list[Any]) -> float:
    """Return the share of boxes that others have too. Boxes of nearly equal scores may change places.

    Of neighbouring cells with equal scores, rounding decides which are peaks; a letterbox's black end has such cells.
    """
    near = [
        (np.abs(one[:, None] - other[None]) <= [0.01, 0.01, 0.01, 0.01, 1e-4, 0]).all(2).any(1)
        for one, other in zip(boxes, others, strict=True)
    ]
    assert sum(map(len, near)) >= len(near)
    return float(np.concatenate(near).mean())


def described(kind: str, fit: str) -> ModelDescription:
    arguments = {"width": 8, "blocks": 1, **({} if kind == "classify" else {"head": 8})}
    return dataclasses.replace(
        CLASSIFIER,
        kind=kind,
        fit=fit,
        arguments=arguments,
        frames=3 if kind == "act" else 1,
        has_nothing=kind in {"classify", "act"},
    )


def test_answers_become_labels() -> None:
    found = predictions_of(CLASSIFIER, {"probabilities": torch.tensor([[0.7, 0.2], [0.1, 0.3], [0.2, 0.5]])})
    assert [each.labels for each in found] == [(Label(class_name="cat"),), (), (Label(class_name="dog"),)]
    assert [round(each.confidence, 3) for each in found] == [0.7, 0.6, 0.5]
    careful = dataclasses.replace(CLASSIFIER, threshold=0.6)
    assert predictions_of(careful, {"probabilities": np.array([[0.2, 0.5]])})[0].labels == ()


def test_another_sigmoid_chooses_the_same_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(4)
    maps = torch.randn(20, 2 + 4, 24, 24, generator=generator) * 1e-3 - 4.0  # as a network has after one step
    boxes, scores, classes = best_boxes(maps, 2)
    exact = torch.Tensor.sigmoid

    def rounded(self: torch.Tensor) -> torch.Tensor:
        """Return the sigmoid, wrong by up to 3e-6 of itself, as onnxruntime's is."""
        found = exact(self)
        return found * (1 + 3e-6 * torch.sin(torch.arange(found.numel(), dtype=found.dtype)).reshape(found.shape))

    monkeypatch.setattr(torch.Tensor, "sigmoid", rounded)
    other_boxes, other_scores, other_classes = best_boxes(maps, 2)
    assert not torch.equal(scores, other_scores)
    torch.testing.assert_close(other_scores, scores, rtol=1e-5, atol=0)
    assert torch.equal(boxes, other_boxes)
    assert torch.equal(classes, other_classes)


def test_cells_that_are_no_peaks_are_no_boxes() -> None:
    maps = torch.full((1, 1 + 4, 8, 8), -30.0)
    maps[0, 0, 2, 3] = maps[0, 0, 6, 6] = 2.0
    maps[0, 0, 2, 4] = 1.0  # beside a peak
    maps[0, 0, 0, :] = torch.arange(8.0) - 40  # a slope
    boxes, scores, _ = best_boxes(maps, 1)
    assert scores[0, :2].tolist() == pytest.approx([0.8808, 0.8808], abs=1e-4)
    assert float(scores[0, 2]) < 1e-12
    near = (maps[0, 0] == -30).sum()
    assert int((scores[0] > 0).sum()) <= 2 + int(near)
    assert not boxes[0, scores[0] == 0].any()
