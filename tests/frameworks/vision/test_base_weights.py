"""Pretrained weights: EfficientNet-Lite0 is the published network, files that do not fit are refused, and trainings."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.lite0_graph import logits_by_onnxruntime, random_weights
from tests.support.shape_pictures import classified_shapes, located_shapes

from multiring.errors import ArgumentError, DataError
from multiring.vision import VisionProject, make_split
from multiring.vision.exporting.runs import export_run
from multiring.vision.fitting import train_command
from multiring.vision.fitting.train_command import train_model
from multiring.vision.models import base_weights
from multiring.vision.models.architectures import build_network
from multiring.vision.models.base_weights import load_base, read_base
from multiring.vision.models.description import ModelDescription
from multiring.vision.models.efficientnet import EfficientNetLite0
from multiring.vision.models.residual import PictureClassifier, ResidualEncoder
from multiring.vision.models.vision_model import load_model

safetensors = pytest.importorskip("safetensors.numpy")
torch_files = pytest.importorskip("safetensors.torch")
SMALL: dict[str, Any] = {"size": 32, "noise": False, "epochs": 2, "batch": 8, "peak": False}


@pytest.fixture(scope="module")
def lite0(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of random weights with the names of the published ones."""
    path: Path = tmp_path_factory.mktemp("base") / "lite0.safetensors"
    safetensors.save_file(random_weights(), path)
    return path


@pytest.mark.parametrize("sides", [(64, 64), (33, 71)])
def test_lite0_is_the_published_network(lite0: Path, sides: tuple[int, int]) -> None:
    pixels = np.random.default_rng(3).standard_normal((2, 3, *sides)).astype(np.float32)
    base = read_base(lite0)
    network = PictureClassifier(EfficientNetLite0(has_top=True), 1000).eval()
    load_base(network, base)
    network.head.load_state_dict({name: base.tensors[f"head.{name}"] for name in ("weight", "bias")})
    with torch.no_grad():
        found = network(torch.from_numpy(pixels)).numpy()
    wanted = logits_by_onnxruntime(random_weights(), pixels)
    assert np.ptp(wanted) > 1
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())


def test_the_encoder_has_four_resolutions(lite0: Path) -> None:
    encoder = EfficientNetLite0(has_top=False).eval()
    found = encoder(torch.zeros(1, 3, 64, 96))
    assert [tuple(each.shape) for each in found] == [
        (1, channels, 64 // stride, 96 // stride)
        for channels, stride in zip(encoder.channels, (4, 8, 16, 32), strict=True)
    ]
    network = torch.nn.Module()
    network.encoder = encoder
    load_base(network, read_base(lite0))  # the top of a classifier is left out
    assert torch.equal(encoder.state_dict()["stem.0.weight"], torch.from_numpy(random_weights()["_conv_stem.weight"]))


def resnet(width: int = 8) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: each.clone() for name, each in PictureClassifier(ResidualEncoder(width, 1), 2).state_dict().items()}


STEM = "encoder.stem.0.0.weight"
VARIANCE = "encoder.stem.0.1.running_var"


def without(name: str) -> dict[str, torch.Tensor]:
    found = resnet()
    del found[name]
    return found


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        (lambda: {"conv1.weight": torch.zeros(1)}, "unknown architecture, with the tensor 'conv1.weight': want"),
        (dict, "unknown architecture, with the tensor ''"),
        (lambda: without(STEM), f"lacks the tensor '{STEM}' of resnet"),
        (lambda: without(VARIANCE), f"lacks the tensor '{VARIANCE}' of resnet"),
        (
            lambda: resnet() | {"encoder.odd": torch.zeros(1)},
            "has the tensor 'encoder.odd', which resnet does not have",
        ),
        (lambda: resnet() | {"odd": torch.zeros(1)}, "has the tensor 'odd', which resnet does not have"),
        (lambda: resnet() | {STEM: torch.zeros(4, 3, 3)}, rf"'{STEM}' has the shape \(4, 3, 3\): want \(4, 3, 3, 3\)"),
        (lambda: resnet() | {STEM: torch.full((4, 3, 3, 3), np.nan)}, f"'{STEM}' has NaN or infinity: want finite"),
        (
            lambda: resnet() | {STEM: torch.full((4, 3, 3, 3), 1e300, dtype=torch.float64)},
            f"'{STEM}' has NaN or infinity: want finite",
        ),
        (
            lambda: resnet() | {STEM: torch.zeros(4, 3, 3, 3, dtype=torch.int32)},
            "has the type torch.int32: want floats",
        ),
        (lambda: resnet() | {VARIANCE: torch.full((4,), -1.0)}, f"'{VARIANCE}' has the variance -1: want at least 0"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    tmp_path: Path, tensors: Callable[[], dict[str, torch.Tensor]], told: str
) -> None:
    path = tmp_path / "base.safetensors"
    torch_files.save_file(tensors(), path)
    folder = classified_shapes(tmp_path / "shapes", 4)
    with pytest.raises(DataError, match=f"base '.*base.safetensors'.*{told}"):
        train_model(folder, base=str(path), **SMALL)
    assert not (folder / "runs" / "classify").exists()


def test_tensors_that_lite0_has_not_are_named_as_in_the_file(tmp_path: Path) -> None:
    weights = random_weights()
    folder, path = classified_shapes(tmp_path / "shapes", 4), tmp_path / "base.safetensors"
    name = "_blocks.3._expand_conv.weight"
    for changed, told in (
        (
            {**weights, "_blocks.16._bn0.bias": np.zeros(1)},
            "'_blocks.16._bn0.bias', which is not of EfficientNet-Lite0",
        ),
        ({**weights, "_blocks.3._odd.bias": np.zeros(1)}, "'_blocks.3._odd.bias', which is not of EfficientNet-Lite0"),
        ({**weights, name: np.zeros((144, 24, 3, 3), np.float32)}, rf"'{name}' has the shape \(144, 24, 3, 3\): want"),
    ):
        safetensors.save_file(changed, path)
        with pytest.raises(DataError, match=told):
            train_model(folder, base=str(path), **SMALL)


def header(told: Any, rest: bytes = b"") -> bytes:
    text = json.dumps(told).encode()
    return struct.pack("<Q", len(text)) + text + rest


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.",  # a pickle, as torch.save writes it
        struct.pack("<Q", 1 << 60) + b"{}",
        header({STEM: {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}),
        header({STEM: {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, b"12345678"),
        header({STEM: {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, b"12345678"),
        header([1, 2]),
    ],
)
def test_damaged_and_hostile_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "base.safetensors"
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"is no file of safetensors, or damaged: .*only the .pth file of PyPI's"):
        read_base(path)


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "base.safetensors"
    torch_files.save_file(resnet(), path)
    data = path.read_bytes()
    for length in np.linspace(0, len(data) - 1, 60).astype(int):
        path.write_bytes(data[:length])
        with pytest.raises(DataError, match="or damaged"):
            read_base(path)


def test_files_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"base '.*none' cannot be read: No such file"):
        read_base(tmp_path / "none")
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        read_base(tmp_path)
    monkeypatch.setattr(base_weights, "_MOST_BYTES", 3)
    (tmp_path / "large").write_bytes(b"1234")
    with pytest.raises(DataError, match="has 4 bytes: want a file of at most 3"):
        read_base(tmp_path / "large")


def test_a_training_begins_with_the_weights_of_another_kind_of_run(tmp_path: Path) -> None:
    shapes = located_shapes(tmp_path / "boxes", 12)
    first = train_model(shapes, kind="detect", width=8, blocks=1, head=8, **SMALL)
    assert first is not None
    folder = classified_shapes(tmp_path / "shapes", 8)
    base = first / "model.safetensors"
    run = train_model(folder, base=str(base), rate=1e-12, weight_decay=0.0, **SMALL)
    assert run is not None
    found, wanted = load_model(run), load_model(first)
    assert found.description.arguments == {"width": 8, "blocks": 1, "levels": 1}
    assert found.description.base == "model.safetensors"
    assert found.description.digests["base"] == wanted.description.digests["weights"]
    for name, values in wanted.network.state_dict().items():
        if name.startswith("encoder.") and not name.endswith(("running_mean", "running_var", "tracked")):
            assert torch.allclose(found.network.state_dict()[name], values, atol=1e-6)
    with pytest.raises(
        DataError, match="of the architecture resnet, but the option architecture is 'efficientnet-lite0'"
    ):
        train_model(folder, name="other", base=str(base), architecture="efficientnet-lite0", **SMALL)
    with pytest.raises(DataError, match=r"has the shape \(4, 3, 3, 3\): want \(8, 3, 3, 3\) for resnet with these"):
        train_model(folder, name="other", base=str(base), width=16, **SMALL)
    with pytest.raises(ArgumentError, match="base_digest='00', but no base"):
        train_model(folder, name="other", base_digest="00", **SMALL)


def test_an_interrupted_training_refuses_another_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, path = classified_shapes(tmp_path / "shapes", 8), tmp_path / "base.safetensors"
    torch_files.save_file(resnet(), path)
    with monkeypatch.context() as patched:
        patched.setattr(train_command, "_is_finished", lambda *_: False)
        assert train_model(folder, base=str(path), **SMALL) is None
    torch_files.save_file(resnet() | {STEM: torch.zeros(4, 3, 3, 3)}, path)
    with pytest.raises(
        DataError, match=r"has the digest \w{16}: want \w{16}.*interrupted training. Put that file back"
    ):
        train_model(folder, base=str(path), **SMALL)
    torch_files.save_file(resnet(), path)
    assert train_model(folder, base=str(path), **SMALL) is not None


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_lite0_is_trained_and_exported(lite0: Path, tmp_path: Path) -> None:
    folder = classified_shapes(tmp_path / "shapes", 12)
    with VisionProject.open(folder) as project:
        make_split(project, {"train": 0.5, "val": 0.5})
        run = train_model(folder, base=str(lite0), **{**SMALL, "size": 64, "epochs": 1})
        assert run is not None
        described = load_model(run).description
        assert (described.architecture, described.std) == ("efficientnet-lite0", (0.5, 0.5, 0.5))
        assert export_run(project, run.name).parity["equal_answers"] == 1
        assert (run / "model.onnx").is_file()


def test_a_head_of_several_resolutions_has_no_top(lite0: Path, tmp_path: Path) -> None:
    """Its features are those before the convolution that ImageNet's classes had."""
    folder = classified_shapes(tmp_path / "shapes", 4)
    options = {**SMALL, "batch": 4, "epochs": 0, "val": "", "fit_head": True, "levels": 2}
    run = train_model(folder, base=str(lite0), **options)
    assert run is not None
    network = load_model(run).network
    assert network.state_dict()["head.weight"].shape[1] == 2 * (320 + 112)
    wanted = read_base(lite0).tensors
    compared = [name for name in wanted if name in network.state_dict() and not name.endswith("num_batches_tracked")]
    compared = [name for name in compared if name.startswith("encoder.")]
    assert len(compared) > 200
    assert [name for name in compared if not torch.equal(network.state_dict()[name], wanted[name])] == []


@pytest.mark.parametrize("kind", ["detect", "segment"])
def test_lite0_is_the_encoder_of_other_kinds(lite0: Path, tmp_path: Path, kind: str) -> None:
    folder = located_shapes(tmp_path / "shapes", 12, masks=kind == "segment")
    run = train_model(folder, kind=kind, base=str(lite0), **{**SMALL, "epochs": 1, "head": 8})
    assert run is not None
    found, wanted = load_model(run).network.state_dict(), read_base(lite0).tensors
    # The recipe keeps all statistics, and the weights up to a quarter of the resolution.
    kept = [name for name in found if name.startswith(("encoder.stem.", "encoder.stages.0.", "encoder.stages.1."))]
    statistics = [name for name in found if name.startswith("encoder.") and "running" in name]
    assert len(kept) > 20
    assert len(statistics) > 90
    for name in {*kept, *statistics}:
        assert name.endswith("tracked") or torch.equal(found[name], wanted[name]), name
    for name in ("encoder.stages.2.0.expand.0.weight", "encoder.stages.6.0.project.1.bias"):
        assert not torch.equal(found[name], wanted[name])
    if kind == "segment":
        with pytest.raises(ArgumentError, match="fixed=5: the network's encoder has 4 resolutions, so want 0 to that"):
            train_model(folder, name="other", kind=kind, base=str(lite0), **SMALL, fixed=5)
        with pytest.raises(ArgumentError, match="fixed_norms=True, but no base"):
            train_model(folder, name="other", kind=kind, **SMALL, fixed_norms=True)


def clip_network(architecture: str) -> torch.nn.Module:
    arguments = {"width": 8, "blocks": 1} if architecture == "resnet" else {}
    described = ModelDescription(
        kind="act", classes=("up", "down"), size=32, frames=2, architecture=architecture, arguments=arguments
    )
    return build_network(described)


def test_clips_need_the_first_three_resolutions(lite0: Path, tmp_path: Path) -> None:
    torch_files.save_file(resnet(), tmp_path / "resnet.safetensors")
    for path, stages in ((lite0, 5), (tmp_path / "resnet.safetensors", 3)):
        base = read_base(path)
        network = clip_network(base.architecture)
        load_base(network, base)
        found = network.state_dict()
        names = [name for name in found if name.startswith("encoder.") and not name.endswith("tracked")]
        assert all(torch.equal(found[name], base.tensors[name]) for name in names)
        assert {name.split(".")[2] for name in names if "stages" in name} == set(map(str, range(stages)))
        network(torch.zeros(2, 2, 3, 32, 32)).sum().backward()
        assert all(each.grad is not None for each in network.parameters())  # nothing is unused
    torch_files.save_file(clip_network("resnet").state_dict(), tmp_path / "clips.safetensors")
    with pytest.raises(DataError, match=r"lacks the tensor 'encoder\.stages\.3\..*' of resnet"):
        load_base(PictureClassifier(ResidualEncoder(8, 1), 2), read_base(tmp_path / "clips.safetensors"))
    later = resnet() | {"encoder.stages.4.0.first.0.weight": torch.zeros(1)}
    torch_files.save_file(later, tmp_path / "later.safetensors")
    with pytest.raises(DataError, match=r"has the tensor 'encoder\.stages\.4\..*', which resnet does not have"):
        load_base(clip_network("resnet"), read_base(tmp_path / "later.safetensors"))
