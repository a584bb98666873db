"""Prediction under faults: what interrupts, changes or differs meanwhile never becomes a wrong or short result."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.frameworks.vision.test_predicting import alone, boxes, lines, write_video
from tests.support.vision_models import draw_pictures

import multiring
from multiring.errors import ArgumentError, DataError
from multiring.vision import Label
from multiring.vision.models.answers import Prediction, predictions_of
from multiring.vision.models.description import ModelDescription
from multiring.vision.pictures import Pixels
from multiring.vision.predicting import part_files, predicting, shares
from multiring.vision.predicting.inputs import PredictionInput, Video, find_inputs
from multiring.vision.predicting.part_files import PartFolder
from multiring.vision.predicting.predicting import predict
from multiring.vision.predicting.predictors import Predictor
from multiring.vision.predicting.shares import END, finished


def _interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_an_interrupt_within_a_video_loses_no_frame(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_video(tmp_path / "clip.avi", 40)
    predictor, out = Predictor.open(exported / "model.onnx"), tmp_path / "out.jsonl"
    alone(predictor, [tmp_path / "clip.avi"], tmp_path / "whole.jsonl")
    real = Video.pixels
    with monkeypatch.context() as patch:
        patch.setattr(Video, "pixels", lambda self: _interrupted() if self.frames == 20 else real(self))
        with pytest.raises(KeyboardInterrupt):
            alone(predictor, [tmp_path / "clip.avi"], out)
    assert list(PartFolder(out).done()) == [(0, 0)]
    assert alone(predictor, [tmp_path / "clip.avi"], out).pictures == 40
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_chunks_that_do_not_fit_the_end_of_their_video_are_not_finished() -> None:
    video = [PredictionInput(name="clip.avi", is_video=True, size=1, changed=1)]

    def frames(first: int, after: int) -> list[dict[str, Any]]:
        return [{"video": "clip.avi", "frame": 2 * number} for number in range(first, after)]

    whole, cut = {(0, 0): frames(0, 16)}, {(0, 1): frames(16, 20)}
    good, damaged = [{"frames": 20}], [{"frames": 20, "error": "it is damaged"}]
    assert finished(video, 2, {**whole, **cut}) == whole
    assert finished(video, 2, {**whole, **cut, (0, END): damaged}) == whole
    assert finished(video, 2, {**whole, **cut, (0, END): good}) == {**whole, **cut, (0, END): good}
    assert finished(video, 2, {**whole, (0, 1): frames(16, 19), (0, END): good}) == {**whole, (0, END): good}
    assert finished(video, 1, whole) == {}


def test_a_short_chunk_is_refused_at_the_end(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_video(tmp_path / "clip.avi", 20)
    real = shares._Batch.records
    monkeypatch.setattr(shares._Batch, "records", lambda self: real(self)[:3])
    with pytest.raises(DataError, match=r"a part of '.*clip\.avi' has 3 frames, and not those that its end asks for"):
        alone(Predictor.open(exported / "model.onnx"), [tmp_path / "clip.avi"], tmp_path / "out.jsonl")
    monkeypatch.setattr(shares._Batch, "records", real)
    done = alone(Predictor.open(exported / "model.onnx"), [tmp_path / "clip.avi"], tmp_path / "out.jsonl")
    assert done.pictures == 20


def test_another_file_at_the_results_place_keeps_the_parts(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_pictures(tmp_path / "in", 5)
    predictor, out = Predictor.open(exported / "model.onnx"), tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(predicting, "publish", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            alone(predictor, [tmp_path / "in"], out)
    for other in (b"of somebody else", b""):
        out.write_bytes(other)
        with pytest.raises(ArgumentError, match="was made by something else: it was left as it is, and so were the an"):
            alone(predictor, [tmp_path / "in"], out)
        assert out.read_bytes() == other
        assert len(PartFolder(out).done()) == 1
    out.unlink()
    assert alone(predictor, [tmp_path / "in"], out).resumed == 1
    assert len(lines(out)) == 5


def _other_classes(predictor: Predictor, _: Path) -> Predictor:
    described = replace(predictor.description, classes=predictor.description.classes[::-1])
    return Predictor(described, predictor.digest, predictor._answer)


def _other_threads(predictor: Predictor, _: Path) -> Predictor:
    return Predictor(predictor.description, predictor.digest, predictor._answer, threads=2)


def _other_picture(predictor: Predictor, picture: Path) -> Predictor:
    os.utime(picture, ns=(0, 0))
    return predictor


@pytest.mark.parametrize("change", [_other_classes, _other_threads, _other_picture])
def test_a_job_does_not_go_on_with_other_answers(
    change: Callable[[Predictor, Path], Predictor], exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [picture] = draw_pictures(tmp_path / "in", 1)
    predictor, out = Predictor.open(exported / "model.onnx"), tmp_path / "out.jsonl"
    monkeypatch.setattr(predicting, "publish", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        alone(predictor, [picture], out)
    with pytest.raises(ArgumentError, match="has the parts of another job"):
        alone(change(predictor, picture), [picture], out)


def test_a_picture_that_changes_during_the_job_is_told(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = draw_pictures(tmp_path / "in", 3)
    write_video(tmp_path / "in" / "z.avi", 3)
    real = shares.PredictionShare.predict_pictures

    def changed(share: shares.PredictionShare) -> None:
        for path in (pictures[1], tmp_path / "in" / "z.avi"):
            os.utime(path, ns=(0, 0))
        real(share)

    monkeypatch.setattr(shares.PredictionShare, "predict_pictures", changed)
    done = alone(Predictor.open(exported / "model.onnx"), [tmp_path / "in"], tmp_path / "out.jsonl")
    assert done.pictures == 2 + 3
    assert [each.partition(":")[0] for each in done.problems] == [
        f"'{tmp_path}/in/{name}' was changed while the job ran" for name in ("001.png", "z.avi")
    ]


DESCRIBED = ModelDescription(kind="classify", classes=("a", "b"), size=16, architecture="resnet")


def test_answers_that_are_not_finite_are_refused() -> None:
    good = np.array([[0.25, 0.75]])
    assert predictions_of(DESCRIBED, {"probabilities": good})[0].labels == (Label(class_name="b"),)
    for bad in (np.nan, np.inf):
        with pytest.raises(DataError, match="the model's answer has probabilities that are not finite numbers"):
            predictions_of(DESCRIBED, {"probabilities": np.array([[0.25, 0.75], [bad, 0.5]])})


def test_a_picture_that_the_model_refuses_is_one_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a batch of eight, whose other pictures get their answers."""
    for path in draw_pictures(tmp_path / "in", 24):
        if int(path.stem) % 3:
            path.unlink()
    refused: list[bytes] = []

    def answers(_: ModelDescription, found: dict[str, Any]) -> list[Prediction]:
        return [Prediction(labels=(), scores=(), confidence=1.0) for _ in found["mean"]]

    def refusing(pixels: Pixels) -> dict[str, Any]:
        if len(pixels) == 8:
            refused.append(pixels[5].tobytes())
        if any(each.tobytes() in refused for each in pixels):
            raise DataError("the model cannot run on these inputs")
        return boxes(pixels)

    monkeypatch.setattr("multiring.vision.predicting.predictors.predictions_of", answers)
    done = alone(Predictor(DESCRIBED, "0" * 64, refusing), [tmp_path / "in"], tmp_path / "out.jsonl")
    assert done.pictures == 7
    assert done.problems == (f"picture '{tmp_path}/in/015.png': the model cannot run on these inputs",)
    assert [each["picture"][-7:] for each in lines(tmp_path / "out.jsonl")] == [f"{n:03}.png" for n in range(0, 24, 3)]


# Predicts on two ranks, with a fault on rank 1.
FAULTY = """
import sys
from pathlib import Path
import multiring
from multiring.errors import DataError
from multiring.vision.predicting import predicting, shares
from multiring.vision.predicting.predictors import Predictor

group, fault = multiring.init(), sys.argv[1]

def broken(*_, **__):
    raise DataError("rank 1 does not open it") if fault == "video" else RuntimeError("broken")

if group.rank == 1 and fault == "video":
    shares.Video.__init__ = broken
if group.rank == (fault == "share"):
    if fault == "share":
        shares.PredictionShare.predict_pictures = broken
    if fault == "begin":
        predicting.find_inputs = broken
try:
    predicting.predict(group, Predictor.open(Path(sys.argv[2])), [Path(sys.argv[3])], Path(sys.argv[4]))
    print("rank", group.rank, "did it")
except Exception as error:
    print("rank", group.rank, type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("fault", "texts"),
    [
        ("share", ("rank 0 DataError rank 1: RuntimeError: broken", "rank 1 RuntimeError broken")),
        ("begin", ("rank 0 RuntimeError broken", "rank 1 DataError rank 0: RuntimeError: broken")),
        ("video", ("rank 0 DataError '{0}/in/z.avi' is not", "rank 1 DataError '{0}/in/z.avi' is not the same on all")),
        ("none", ("rank 0 did it", "rank 1 did it")),
    ],
)
def test_a_fault_of_one_rank_is_told_on_every_rank(
    fault: str, texts: tuple[str, str], exported: Path, tmp_path: Path
) -> None:
    draw_pictures(tmp_path / "in", 20)
    write_video(tmp_path / "in" / "z.avi", 20)
    model, out = exported / "model.onnx", tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "multiring", "run", "-n", "2", "--", sys.executable, "-c", FAULTY, fault]
    command += [str(model), str(tmp_path / "in"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    for text in texts:
        assert text.format(tmp_path) in done.stdout, done.stderr
    assert out.exists() == (fault == "none")
    if fault != "none":  # nothing of the fault is kept: the next start does the rest
        assert alone(Predictor.open(model), [tmp_path / "in"], out).pictures == 40
    assert len(lines(out)) == 40
    assert not any("error" in each for each in lines(out))


def test_a_folder_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_pictures(tmp_path / "in", 1)
    draw_pictures(tmp_path / "in" / "closed", 1)
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"folder '.*/in/closed' cannot be read: Permission denied"):
        find_inputs([tmp_path / "in"])


def test_a_link_to_a_folder_is_followed_and_a_loop_is_told(exported: Path, tmp_path: Path) -> None:
    draw_pictures(tmp_path / "elsewhere", 2)
    draw_pictures(tmp_path / "in" / "own", 1)
    (tmp_path / "in" / "linked").symlink_to(tmp_path / "elsewhere")
    alone(Predictor.open(exported / "model.onnx"), [tmp_path / "in"], tmp_path / "out.jsonl")
    names = [each["picture"].removeprefix(f"{tmp_path}/in/") for each in lines(tmp_path / "out.jsonl")]
    assert names == ["linked/000.png", "linked/001.png", "own/000.png"]
    (tmp_path / "in" / "own" / "back").symlink_to(tmp_path / "in")
    with pytest.raises(DataError, match=r"folder '.*/in/own/back' is a link to a folder around it: remove the link"):
        find_inputs([tmp_path / "in"])
    (tmp_path / "in" / "own" / "back").unlink()
    (tmp_path / "elsewhere" / "again").symlink_to(tmp_path / "in" / "own")
    (tmp_path / "in" / "own" / "other").symlink_to(tmp_path / "elsewhere")  # two links that lead to each other
    with pytest.raises(DataError, match=r"'.*/in/linked/again/other' is a link to a folder around it"):
        find_inputs([tmp_path / "in"])


def test_pictures_of_formats_that_are_not_read_are_named(exported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    draw_pictures(folder, 1)
    with Image.open(folder / "000.png") as picture:
        picture.save(folder / "jpeg.jfif", "JPEG")
        picture.save(folder / "raw.dng", "TIFF")  # a camera's file has such a preview, which is another picture
    (folder / "phone.HEIC").write_bytes(b"....ftypheic")
    done = alone(Predictor.open(exported / "model.onnx"), [folder], tmp_path / "out.jsonl")
    assert done.pictures == 2
    assert done.problems == tuple(
        f"picture '{folder}/{name}' has a format that multiring does not read: save it as PNG or JPEG"
        for name in ("phone.HEIC", "raw.dng")
    )


def test_a_full_disk_keeps_the_answers_so_far(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for short names
    draw_pictures(Path("in"), 40)
    predictor, out = Predictor.open(exported / "model.onnx"), Path("out.jsonl")
    before, real = resource.getrlimit(resource.RLIMIT_FSIZE), PartFolder.open_part

    def limited(parts: PartFolder) -> part_files.PartWriter:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))  # a chunk of 16 answers has half as many bytes
        return real(parts)

    group = multiring.init()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(PartFolder, "open_part", limited)
            with pytest.raises(DataError, match=r"'out.*part-.*': File too large; make room on the disk, .* are kept"):
                predict(group, predictor, [Path("in")], out)
        assert len(PartFolder(out).done()) == 1
        with pytest.raises(DataError, match=r"'new\.jsonl\.parts/job\.json': File too large; make room on the disk"):
            predict(group, predictor, [Path("in")], Path("new.jsonl"))  # its list of the pictures is longer
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        multiring.shutdown()
    assert not out.exists()
    done = alone(predictor, [Path("in")], out)
    assert (done.pictures, done.resumed) == (40, 1)
    assert [each["picture"][-7:] for each in lines(out)] == [f"{number:03}.png" for number in range(40)]


def test_file_systems_without_hard_links(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    draw_pictures(tmp_path / "in", 3)
    alone(Predictor.open(exported / "model.onnx"), [tmp_path / "in"], tmp_path / "out.jsonl")
    assert len(lines(tmp_path / "out.jsonl")) == 3
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in", "out.jsonl"]
    with pytest.raises(DataError, match="was made meanwhile, and was left as it is"):
        part_files.publish(tmp_path / "out.jsonl", iter([b"other"]))
    assert len(lines(tmp_path / "out.jsonl")) == 3


def test_a_job_that_waited_for_another_one_finds_its_result(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    first, second = PartFolder(out), PartFolder(out)
    first.begin({"job": 1})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.begin, {"job": 1})
        time.sleep(0.2)
        part_files.publish(out, iter([b"{}"]))
        first.remove()
        with pytest.raises(ArgumentError, match="is there already"):
            waiting.result(240)
    assert [each.name for each in tmp_path.iterdir()] == ["out.jsonl"]
    for wrong, text in (
        (tmp_path / "none" / "out.jsonl", "there is no folder"),
        (Path(), "is a folder: want the name"),
    ):
        with pytest.raises(ArgumentError, match=text):
            PartFolder(wrong).begin({"job": 1})
