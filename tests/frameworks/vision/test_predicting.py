"""Prediction for pictures and videos: order, each once, on ranks, after kills, and what cannot be read."""

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.vision_models import draw_pictures

import multiring
from multiring._cli import main
from multiring.errors import ArgumentError, DataError
from multiring.vision import Box, Label, read_picture
from multiring.vision.formats.coco import read_coco
from multiring.vision.models.answers import Prediction, predictions_of
from multiring.vision.models.description import ModelDescription
from multiring.vision.models.vision_model import load_model
from multiring.vision.pictures import Pixels
from multiring.vision.predicting import part_files
from multiring.vision.predicting.inputs import find_inputs, read_clip
from multiring.vision.predicting.part_files import PartFolder
from multiring.vision.predicting.predicting import PredictionResult, predict
from multiring.vision.predicting.predictors import Predictor, answer_values


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def alone(predictor: Predictor, paths: list[Path], out: Path, **options: Any) -> PredictionResult:
    """Predict on this process alone."""
    group = multiring.init()
    try:
        return predict(group, predictor, paths, out, **options)
    finally:
        multiring.shutdown()


def write_video(path: Path, frames: int) -> None:
    """Write a video whose frame k has the grey 10 k."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10, (32, 24))
    assert writer.isOpened()
    for number in range(frames):
        writer.write(np.full((24, 32, 3), 10 * number % 250, np.uint8))
    writer.release()


def with_empty_ticks(video: bytes, count: int) -> bytes:
    """Return an AVI file in which each frame is followed by so many ticks without data: the frame stays."""
    lists = video.index(b"movi") + 4
    frames, at = [], lists
    while video[at : at + 4] == b"00dc":
        end = at + 8 + int.from_bytes(video[at + 4 : at + 8], "little")
        frames.append(video[at : end + end % 2])
        at = end + end % 2
    assert frames
    movi, index = b"", b""
    for each in frames:
        for chunk in [each, *[b"00dc\0\0\0\0"] * count]:
            index += b"00dc" + struct.pack("<III", 16, 4 + len(movi), len(chunk) - 8)
            movi += chunk
    head = bytearray(video[:lists])
    ticks = struct.pack("<I", len(frames) * (1 + count))
    head[48:52] = ticks  # of the main header
    stream = head.index(b"strh") + 8
    head[stream + 32 : stream + 36] = ticks
    head[lists - 8 : lists - 4] = struct.pack("<I", 4 + len(movi))
    found = bytes(head) + movi + b"idx1" + struct.pack("<I", len(index)) + index
    return found[:4] + struct.pack("<I", len(found) - 8) + found[8:]


def mixed_folder(folder: Path) -> Path:
    """Make a folder of 37 pictures of three sizes, two that cannot be read, a long one and a video."""
    draw_pictures(folder, 37, seed=3)
    (folder / "010.png").write_bytes((folder / "010.png").read_bytes()[:80])
    (folder / "empty.jpg").write_bytes(b"")
    Image.new("RGB", (20000, 1)).save(folder / "long.png")
    (folder / "sub").mkdir()
    write_video(folder / "sub" / "clip.avi", 21)
    (folder / "notes.txt").write_text("no picture")
    (folder / ".hidden.png").write_bytes(b"")
    return folder


def test_answers_are_those_of_the_trained_model_in_the_order_of_the_input(exported: Path, tmp_path: Path) -> None:
    folder = mixed_folder(tmp_path / "in")
    done = alone(Predictor.open(exported / "model.onnx"), [folder], tmp_path / "out.jsonl", every=2)
    records = lines(tmp_path / "out.jsonl")
    assert done.pictures == 36 + 11
    assert [each.split(": ")[0] for each in done.problems] == [
        f"picture '{folder}/010.png' cannot be decoded",
        f"picture '{folder}/empty.jpg' is empty",
        f"picture '{folder}/long.png'",
    ]
    names = [f"{folder}/{number:03}.png" for number in range(37)] + [f"{folder}/empty.jpg", f"{folder}/long.png"]
    assert [each["picture"] for each in records if "picture" in each] == names
    assert [each["frame"] for each in records if "frame" in each] == list(range(0, 21, 2))
    model = load_model(exported)
    for record in records:
        if "error" in record or "frame" in record:
            continue
        pixels = torch.from_numpy(read_picture(Path(record["picture"])).pixels[None])
        with torch.no_grad():
            [expected] = predictions_of(model.description, {k: v.numpy() for k, v in model(pixels).items()})
        assert record["labels"][0]["class"] == expected.labels[0].class_name
        assert record["labels"][0]["score"] == pytest.approx(expected.scores[0], abs=1e-5)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in", "out.jsonl"]
    by_torch = alone(Predictor.open(exported), [folder], tmp_path / "torch.jsonl", every=2)
    assert by_torch == done
    for one, other in zip(records, lines(tmp_path / "torch.jsonl"), strict=True):
        assert one.get("error") == other.get("error")
        assert [each["class"] for each in one.get("labels", ())] == [each["class"] for each in other.get("labels", ())]


def _command(model: Path, folder: Path, out: Path, *words: str) -> list[str]:
    multiring_command = [sys.executable, "-m", "multiring"]
    return [*multiring_command, *words, "vision", "predict", str(model), str(folder), "--out", str(out)]


def test_two_ranks_write_the_same_bytes_as_one(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, model = mixed_folder(tmp_path / "in"), exported / "model.onnx"
    words = ["vision", "predict", str(model), str(folder), "--out", str(tmp_path / "one.jsonl")]
    assert main(words) == 0
    told = capsys.readouterr()
    assert told.out == f"57 pictures, 3 unreadable: {tmp_path}/one.jsonl\n"
    assert told.err.startswith(f"unreadable: picture '{folder}/010.png' cannot be decoded")
    command = _command(model, folder, tmp_path / "two.jsonl", "run", "-n", "2", "--", sys.executable, "-m", "multiring")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "57 pictures, 3 unreadable" in done.stdout
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert main(words) == 2
    assert "is there already: remove it" in capsys.readouterr().err
    command[command.index("predict") + 1] = str(tmp_path / "none.onnx")
    command[-1] = str(tmp_path / "three.jsonl")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 2
    assert "none.onnx' cannot be read: No such file" in done.stderr


def test_a_killed_prediction_goes_on(exported: Path, tmp_path: Path) -> None:
    folder, model = mixed_folder(tmp_path / "in"), exported / "model.onnx"
    draw_pictures(folder / "more", 60, seed=4)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    alone(Predictor.open(model), [folder], whole)
    for least in (1, 3):  # kills once there are so many whole chunks
        process = subprocess.Popen([sys.executable, "-c", SLOW, str(model), str(folder), str(out)])
        deadline = time.monotonic() + 240
        while len(PartFolder(out).done()) < least:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        if least == 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(part_files, "_PATIENCE_S", 0.0)
                with pytest.raises(
                    ArgumentError, match=r"another prediction writes to '.*out\.jsonl': wait for its end"
                ):
                    alone(Predictor.open(model), [folder], out)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    # What a kill may leave: a line without its end, and a line that a lost page cut.
    parts = sorted(PartFolder(out).folder.glob("part-*"))
    with parts[0].open("ab") as file:
        file.write(b'{"chunk": [0, 0], "records": [{"picture": "x"')
    (PartFolder(out).folder / f"part-{'f' * 16}.jsonl").write_bytes(b'{"chunk": [16, 0], "records": []\0\0\0')
    before = PartFolder(out).done()
    with pytest.raises(ArgumentError, match="has the parts of another job"):
        alone(Predictor.open(model), [folder], out, every=3)
    done = alone(Predictor.open(model), [folder], out)
    assert done.resumed == len(before) >= 3
    assert out.read_bytes() == whole.read_bytes()
    assert not PartFolder(out).folder.exists()


# Predicts, and sleeps before each picture is read, so that a kill comes in between.
SLOW = """
import sys, time
from pathlib import Path
import multiring
from multiring.vision.predicting import predicting, shares
from multiring.vision.predicting.predictors import Predictor

read = shares.read_picture
shares.read_picture = lambda path: time.sleep(0.03) or read(path)
predicting.predict(multiring.init(), Predictor.open(Path(sys.argv[1])), [Path(sys.argv[2])], Path(sys.argv[3]))
"""


def test_a_kill_after_the_last_step_but_one_is_harmless(exported: Path, tmp_path: Path) -> None:
    draw_pictures(tmp_path / "in", 5)
    predictor, out = Predictor.open(exported / "model.onnx"), tmp_path / "out.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartFolder, "remove", lambda _: None)
        first = alone(predictor, [tmp_path / "in"], out)
    data = out.read_bytes()
    again = alone(predictor, [tmp_path / "in"], out)
    assert (again.pictures, again.resumed, first.resumed) == (5, 1, 0)
    assert out.read_bytes() == data
    assert not PartFolder(out).folder.exists()
    with pytest.raises(ArgumentError, match="is there already"):
        alone(predictor, [tmp_path / "in"], out)


def boxes(pixels: Pixels) -> dict[str, Any]:
    """Return a made-up answer: the mean of red."""
    return {"mean": pixels[..., 0].mean((1, 2))}


def test_coco_holds_boxes_scores_frames_and_what_was_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exported: Path
) -> None:
    def answers(_: ModelDescription, found: dict[str, Any]) -> list[Prediction]:
        labels = [Box(class_name="b", left=1, top=2, width=3.5, height=4, track=None) for _ in found["mean"]]
        return [Prediction(labels=(each,), scores=(0.25,), confidence=0.5) for each in labels]

    monkeypatch.setattr("multiring.vision.predicting.predictors.predictions_of", answers)
    described = ModelDescription(kind="detect", classes=("a", "b"), size=32, architecture="resnet")
    folder = mixed_folder(tmp_path / "in")
    monkeypatch.chdir(tmp_path)
    done = alone(Predictor(described, "0" * 64, boxes), [Path("in")], tmp_path / "out.json", file_format="coco")
    told = json.loads((tmp_path / "out.json").read_text())
    assert len(told["images"]) == len(told["annotations"]) == done.pictures == 36 + 21
    assert {each["score"] for each in told["annotations"]} == {0.25}
    assert [each["file_name"] for each in told["unreadable"]] == ["in/010.png", "in/empty.jpg", "in/long.png"]
    assert told["images"][-1] == {
        "id": 57, "file_name": "in/sub/clip.avi/frame-000020", "width": 32, "height": 24, "video": "in/sub/clip.avi",
        "frame": 20,
    }  # fmt: skip
    told["images"] = [each for each in told["images"] if "video" not in each]
    kept = {each["id"] for each in told["images"]}
    told["annotations"] = [each for each in told["annotations"] if each["image_id"] in kept]
    (tmp_path / "again.json").write_text(json.dumps(told))
    found = read_coco(tmp_path / "again.json", tmp_path)  # other programs read it
    assert found.pictures[0].labels == (Box(class_name="b", left=1, top=2, width=3.5, height=4),)
    assert folder.is_dir()
    with pytest.raises(ArgumentError, match="COCO holds boxes and masks"):
        alone(Predictor.open(exported / "model.onnx"), [folder], tmp_path / "x.json", file_format="coco")


def test_videos_that_are_damaged_are_named(exported: Path, tmp_path: Path) -> None:
    video = tmp_path / "clip.avi"
    write_video(video, 40)
    data = video.read_bytes()
    (tmp_path / "cut.avi").write_bytes(data[: len(data) * 3 // 4])
    (tmp_path / "none.mp4").write_bytes(b"no video at all")
    out = tmp_path / "out.jsonl"
    paths = [tmp_path / "none.mp4", tmp_path / "cut.avi", video]
    done = alone(Predictor.open(exported / "model.onnx"), paths, out)
    records = lines(out)
    assert records[0]["video"] == f"{tmp_path}/none.mp4"
    assert "OpenCV does not open it" in records[0]["error"]
    frames = {name: [each["frame"] for each in records if each["video"] == str(tmp_path / name) and "frame" in each]
              for name in ("cut.avi", "clip.avi")}  # fmt: skip
    assert frames["clip.avi"] == list(range(40))
    assert 0 < len(frames["cut.avi"]) < 40
    assert len(done.problems) == 2
    assert f"cut.avi' ends after {len(frames['cut.avi'])} of 40 frames: it is damaged" in done.problems[1]
    with pytest.raises(DataError, match="no picture that multiring reads"):
        read_picture(video)


def test_a_video_whose_frames_stay_for_several_ticks_is_whole(tmp_path: Path) -> None:
    """Debian's opencv-doc has one: tree.avi declares 444 frames, and 376 of them are empty."""
    write_video(tmp_path / "clip.avi", 12)
    (tmp_path / "slow.avi").write_bytes(with_empty_ticks((tmp_path / "clip.avi").read_bytes(), 5))
    (tmp_path / "cut.avi").write_bytes((tmp_path / "slow.avi").read_bytes()[:-4000])
    assert read_clip(tmp_path / "slow.avi", 12).tolist() == read_clip(tmp_path / "clip.avi", 12).tolist()
    with pytest.raises(DataError, match=r"cut.avi' ends after \d+ of 72 frames: it is damaged"):
        read_clip(tmp_path / "cut.avi", 12)


def test_inputs_that_are_wrong_are_refused(exported: Path, tmp_path: Path) -> None:
    predictor = Predictor.open(exported / "model.onnx")
    [picture] = draw_pictures(tmp_path / "in", 1)
    (tmp_path / "empty").mkdir()
    for paths, out, options, text in (
        ([tmp_path / "none.png"], "o", {}, "there is no such file or folder"),
        ([tmp_path / "empty"], "o", {}, "has no picture and no video"),
        ([picture, picture], "o", {}, "is named twice: want each picture once"),
        ([picture], "none/o", {}, "there is no folder"),
        ([picture], "o", {"every": 0}, "every=0: want at least 1"),
        ([picture], "o", {"file_format": "xml"}, "format 'xml': want one of jsonl, coco"),
    ):
        with pytest.raises(ArgumentError, match=text):
            alone(predictor, paths, tmp_path / out, **options)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArgumentError, match="no such file or folder"):
        find_inputs([tmp_path / "pipe"])
    assert answer_values(Prediction(labels=(Label(class_name="a"),), scores=(0.5,), confidence=0.25), 4, 3) == {
        "width": 4, "height": 3, "labels": [{"class": "a", "score": 0.5}], "confidence": 0.25,
    }  # fmt: skip


def test_missing_chunks_are_told(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the ranks did not share the folder of the parts."""
    draw_pictures(tmp_path / "in", 20)
    monkeypatch.setattr("multiring.vision.predicting.part_files.PartWriter.add", lambda *_: None)
    with pytest.raises(DataError, match=r"no rank has written the answers for .*: want a folder for --out"):
        alone(Predictor.open(exported / "model.onnx"), [tmp_path / "in"], tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
