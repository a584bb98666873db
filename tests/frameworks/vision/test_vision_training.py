"""Training on a project's pictures: what is learnt, which pictures count, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.shape_pictures import classified_shapes, located_shapes, moving_discs

from multiring._cli import main
from multiring.errors import ArgumentError, DataError
from multiring.vision import Box, Label, VisionProject, make_split, read_picture, read_split
from multiring.vision.exporting.runs import export_run
from multiring.vision.fitting import train_command
from multiring.vision.fitting.fit_options import recipe_by_size
from multiring.vision.fitting.targets import labelled_parts
from multiring.vision.fitting.train_command import train_model
from multiring.vision.models.answers import predictions_of
from multiring.vision.models.vision_model import load_model
from multiring.vision.scoring.scored_runs import score_run

# A network that learns shapes in seconds.
SMALL: dict[str, Any] = {"width": 8, "blocks": 1, "size": 64, "noise": False, "rate": 3e-3}


def labels_of(run: Path, folder: Path, paths: tuple[str, ...]) -> list[str]:
    """Return the class that a model gives to each picture, "" for nothing."""
    model = load_model(run)
    found = []
    for path in paths:
        with torch.no_grad():
            answers = model(torch.from_numpy(read_picture(folder / path).pixels[None]))
        [prediction] = predictions_of(model.description, answers)
        found.append(prediction.labels[0].class_name if prediction.labels else "")
    return found


def test_classes_and_nothing_are_learnt(tmp_path: Path) -> None:
    folder = classified_shapes(tmp_path / "shapes", 20, empty=12, unlabelled=3)
    words = [f"--{name}={value}" for name, value in SMALL.items() if name != "noise"]
    assert main(["vision", "train", str(folder), "--kind", "classify", "--no-noise", "--epochs=40", *words]) == 0
    run = folder / "runs" / "classify"
    with VisionProject.open(folder) as project:
        split = read_split(project)
        truth = {path: each.labels for path, each in project.labellings().items()}
    assert sum(map(len, split.parts.values())) == 52  # without those that nobody labelled
    wanted = [each[0].class_name if (each := truth[path]) else "" for path in split.parts["val"]]
    assert set(wanted) == {"disc", "block", ""}
    found = labels_of(run, folder, split.parts["val"])
    assert np.mean([one == other for one, other in zip(found, wanted, strict=True)]) >= 0.9
    described = load_model(run).description
    assert described.classes == ("disc", "block")
    assert described.has_nothing
    assert described.digests["split"] == split.digest
    assert described.digests["labels"] == split.labels_digest
    # The scores are those of the model that was written, not of the last step.
    right = 100 * np.mean([one == other for one, other in zip(found, wanted, strict=True)])
    assert described.scores["accuracy"] == pytest.approx(right)
    with pytest.raises(ArgumentError, match=r"run 'classify' in .* is finished: give another --name"):
        train_model(folder)


@pytest.mark.parametrize(
    ("kind", "score", "least", "options"),
    [
        ("detect", "mAP50", 60, {"epochs": 40, "head": 16, "rate": 5e-3}),
        ("segment", "mean IoU", 60, {"epochs": 20, "head": 16, "rate": 5e-3}),
        ("act", "accuracy", 90, {"epochs": 15, "head": 16, "size": 32, "crop": 0.0}),
    ],
)
def test_boxes_pixels_and_motions_are_learnt(
    tmp_path: Path, kind: str, score: str, least: float, options: dict[str, Any]
) -> None:
    folder = tmp_path / "shapes"
    if kind == "act":
        moving_discs(folder, 12)
    else:
        located_shapes(folder, 48, masks=kind == "segment")
    run = train_model(folder, kind=kind, **{**SMALL, **options})
    assert run is not None
    described = load_model(run).description
    assert described.scores[score] >= least
    assert described.fit == ("stretch" if kind == "act" else "letterbox")
    # The score of the report, on pictures as they are, agrees with the score in training, on squares.
    found = score_run(folder, kind)
    assert found.figures[score] == pytest.approx(described.scores[score], abs=4)
    with VisionProject.open(folder) as project:
        parity = export_run(project, kind).parity
    assert parity["metric_of_export"] == pytest.approx(found.figures[parity["metric"]], abs=0.1)
    assert parity["equal_answers"] >= 0.999
    assert bool(described.threshold) == (kind == "detect")


def small_project(folder: Path, labels: dict[str, tuple[Label, ...] | None], **parts: float) -> Path:
    """Make a project of noise with these labels, and a split of it."""
    folder.mkdir()
    for number, path in enumerate(labels):
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(folder / path)
    with VisionProject.create(folder) as project:
        project.scan()
        for name in ("a", "b"):
            project.add_class(name)
        for path, some in labels.items():
            project.set_labels(path, some, "ann")
        make_split(project, parts or {"train": 1.0})
    return folder


A, B = (Label(class_name="a"),), (Label(class_name="b"),)
BOX = (Box(class_name="b", left=1, top=1, width=9, height=9),)


@pytest.mark.parametrize(
    ("labels", "options", "told"),
    [
        ({"0.png": A, "1.png": A, "2.png": B}, {}, "class 'b' has 1 picture in part 'train' .* want at least 2"),
        ({"0.png": A, "1.png": A, "2.png": A + B}, {}, "picture '2.png' has the classes 'a', 'b': want one class"),
        ({"0.png": A, "1.png": A}, {}, "all pictures are of the one class 'a'"),
        ({"0.png": BOX, "1.png": BOX}, {}, "has no picture with labels for the kind 'classify'"),
        ({"0.png": A, "1.png": B}, {"val": "val"}, "split 'split' has no part 'val': want one of train"),
        ({"0.png": A, "1.png": B}, {"split": "other"}, "the project has no split 'other'"),
        (
            {"0.png": A, "1.png": B, "2.png": A, "3.png": B, "4.png": ()},
            {},
            "part 'train' .* has 1 picture with nothing in them: want at least 2",
        ),
    ],
)
def test_data_that_cannot_be_trained_on_are_refused(
    tmp_path: Path, labels: dict[str, tuple[Label, ...] | None], options: dict[str, str], told: str
) -> None:
    folder = small_project(tmp_path / "project", labels)
    with pytest.raises(DataError, match=told):
        train_model(folder, **{"val": "", **options})
    assert not (folder / "runs" / "classify").exists()


def test_files_that_are_missing_damaged_or_changed_are_named(tmp_path: Path) -> None:
    folder = small_project(tmp_path / "project", {f"{number}.png": A if number % 2 else B for number in range(6)})
    (folder / "3.png").rename(folder / "away")
    with pytest.raises(DataError, match=r"picture '3.png' is gone since the last scan\. Put"):
        train_model(folder, val="", epochs=1, **SMALL)
    (folder / "5.png").rename(folder / "away as well")
    with pytest.raises(DataError, match=r"picture '3.png' is gone since the last scan, and 1 more is changed or gone"):
        train_model(folder, val="", epochs=1, **SMALL)
    (folder / "away as well").rename(folder / "5.png")
    (folder / "3.png").write_bytes((folder / "2.png").read_bytes())
    with pytest.raises(DataError, match=r"picture '3.png' was changed since the last scan\. Put"):
        train_model(folder, val="", epochs=1, **SMALL)
    assert not (folder / "runs" / "classify").exists()  # that was before the first step
    (folder / "3.png").write_bytes((folder / "away").read_bytes())  # the same content at another time is no change
    assert train_model(folder, val="", epochs=1, **SMALL) is not None
    (folder / "3.png").write_bytes(b"no picture")
    with VisionProject.open(folder) as project:
        project.scan()
    with pytest.raises(DataError, match=r"picture '3.png' of part 'train' cannot be used: .* no picture"):
        train_model(folder, val="", epochs=1, name="again", **SMALL)
    (folder / "3.png").write_bytes((folder / "2.png").read_bytes())
    with VisionProject.open(folder) as project:
        project.scan()
    with pytest.raises(
        DataError, match=r"pictures '2.png' and '3.png' are equal, but their classes differ: 'b' and 'a'"
    ):
        train_model(folder, val="", epochs=1, name="again", **SMALL)


def test_pictures_of_another_kind_of_label_are_left_out_and_counted(tmp_path: Path) -> None:
    labels: dict[str, tuple[Label, ...] | None] = {f"{number}.png": A if number % 2 else B for number in range(8)}
    folder = small_project(tmp_path / "project", {**labels, "8.png": BOX})
    with VisionProject.open(folder) as project:
        project.set_labels("0.png", None, "ann")
    run = train_model(folder, val="", epochs=1, **SMALL)
    assert run is not None
    about = json.loads((run / "result.json").read_text(encoding="utf-8"))["about"]
    assert (
        about
        == "7 training pictures of project, split 'split'; left out: 1 no label for the kind classify, 1 not labelled."
    )
    assert load_model(run).description.scores == {}
    assert not load_model(run).description.has_nothing


def test_frames_without_a_neighbour_are_counted_and_clips_are_called_clips(tmp_path: Path) -> None:
    folder = moving_discs(tmp_path / "discs", 2)
    with VisionProject.open(folder) as project:
        make_split(project, {"train": 1.0})
        for frame in range(1, 8, 2):
            project.set_labels(f"000-{frame}.png", None, "ann")
    with pytest.raises(DataError, match=r"class 'clockwise' has 1 clip in part .* Label more clips of it"):
        train_model(folder, kind="act", val="", epochs=1, head=16, **{**SMALL, "size": 32})
    with VisionProject.open(folder) as project:
        data = labelled_parts(project, read_split(project), "act", ["train"])
    assert data.left_out == {"frames without a neighbour of their class": 4, "not labelled": 4}


def test_wrong_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = small_project(tmp_path / "project", {f"{number}.png": A if number % 2 else B for number in range(6)})
    with pytest.raises(ArgumentError, match="'depth' is not an option"):
        train_model(folder, depth=3)
    with pytest.raises(ArgumentError, match="run 'a/b': want a name of letters"):
        train_model(folder, name="a/b")
    with pytest.raises(ArgumentError, match="run 'splits': the folder 'splits' in runs has other files"):
        train_model(folder, name="splits")
    with pytest.raises(ArgumentError, match="batch=64, but there are 6 training samples"):
        train_model(folder, val="", batch=64)
    assert main(["vision", "train", str(folder), "--split", "other"]) == 2
    assert "no split 'other'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["vision", "train", str(folder), "--val=", "--size", "33"])
    told = capsys.readouterr().err
    assert "size=33: want 0, or a multiple of 32" in told
    assert told.startswith(f"usage: multiring vision train {folder}")


def test_a_file_of_options_decides_which_data_are_read(tmp_path: Path) -> None:
    folder = small_project(tmp_path / "project", {f"{number}.png": A if number % 2 else B for number in range(6)})
    with VisionProject.open(folder) as project:
        make_split(project, {"train": 0.7, "held": 0.3}, name="other")
    given = tmp_path / "given.toml"
    given.write_text('split = "other"\nval = ""\nbatch = 3\nepochs = 1\nwidth = 8\nblocks = 1\n', encoding="utf-8")
    assert main(["vision", "train", str(folder), "--options", str(given), "--size=32", "--batch=2"]) == 0
    run = folder / "runs" / "classify"
    assert load_model(run).description.split == "other"
    assert json.loads((run / "result.json").read_text(encoding="utf-8"))["about"].startswith("4 training pictures")
    told = (run / "options.toml").read_text(encoding="utf-8")
    assert all(each in told for each in ('split = "other"', "batch = 2\n", "epochs = 1\n", "size = 32\n"))
    with pytest.raises(ArgumentError, match=r"run='.*elsewhere': this training's is '.*runs/again'; leave the option"):
        train_model(folder, name="again", val="", run=str(tmp_path / "elsewhere"))


def test_the_recipe_gives_each_rank_a_sample() -> None:
    assert [recipe_by_size("classify", 60, 32, ranks=ranks)["batch"] for ranks in (1, 8, 16, 99)] == [8, 8, 16, 60]
    assert recipe_by_size("classify", 60, 32, batch=4, ranks=16)["batch"] == 4


def test_damaged_options_of_an_interrupted_run_are_refused(tmp_path: Path) -> None:
    folder = small_project(tmp_path / "project", {f"{number}.png": A if number % 2 else B for number in range(6)})
    (folder / "runs" / "classify").mkdir(parents=True)
    path = folder / "runs" / "classify" / "options.toml"
    for text, told in (
        ("epochs = 7\n", "lacks the option 'architecture', so it is damaged"),
        ("epo", "cannot be read"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(DataError, match=f"{told}.*remove the folder"):
            train_model(folder, val="")
        assert path.read_text(encoding="utf-8") == text


def test_the_part_to_train_on_is_not_the_one_that_chooses(tmp_path: Path) -> None:
    folder = small_project(tmp_path / "project", {"0.png": A, "1.png": B})
    with pytest.raises(ArgumentError, match="val='train' is the part to train on"):
        train_model(folder, val="train")


def test_pictures_that_were_labelled_after_the_split_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels: dict[str, tuple[Label, ...] | None] = {f"{number}.png": A if number % 2 else B for number in range(6)}
    folder = small_project(tmp_path / "project", {**labels, "6.png": None, "7.png": None})
    with VisionProject.open(folder) as project:
        project.set_labels("6.png", A, "ann")
    assert train_model(folder, val="", epochs=1, **SMALL) is not None
    assert "1 labelled picture in no part of split 'split', which was made before: not" in capsys.readouterr().out


def test_a_group_in_two_parts_is_refused(tmp_path: Path) -> None:
    labels: dict[str, tuple[Label, ...] | None] = {f"{number}.png": A if number % 2 else B for number in range(8)}
    folder = small_project(tmp_path / "project", labels, train=0.5, val=0.5)
    with VisionProject.open(folder) as project:
        split = read_split(project)
        for part in ("train", "val"):
            project.set_group(split.parts[part][0], "twins")
    with pytest.raises(DataError, match=r"have the same group, but are in the parts '\w+' and '\w+' of split 'split'"):
        train_model(folder)


def test_a_split_that_another_rank_has_written_meanwhile_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small_project(tmp_path / "project", {f"{number}.png": A if number % 2 else B for number in range(6)})
    calls = []

    def late(project: VisionProject, name: str = "split") -> Any:
        calls.append(name)
        if len(calls) == 1:
            raise DataError("the project has no split 'split'")
        return read_split(project, name)

    monkeypatch.setattr(train_command, "read_split", late)
    assert train_model(folder, val="", epochs=1, **SMALL) is not None
    assert calls == ["split", "split"]
