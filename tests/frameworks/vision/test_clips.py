"""Models of clips on the whole way: videos become frames, labels, a model, its exported file, and answers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from tests.frameworks.vision.test_predicting import alone, lines, write_video
from tests.support.model_servers import running_server

from multiring._cli import main
from multiring.errors import ArgumentError
from multiring.vision import VisionProject
from multiring.vision.models.answers import predictions_of
from multiring.vision.models.vision_model import load_model
from multiring.vision.predicting.inputs import Video, find_inputs, read_clip
from multiring.vision.predicting.predictors import Predictor

NAMES = [f"{motion}/{number}.avi" for motion in ("left", "right") for number in range(6)]


def write_motion(path: Path, number: int, *, is_left: bool) -> None:
    """Write a video of 9 frames in which a light square goes to a side."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10, (48, 32))
    assert writer.isOpened()
    for frame in range(9):
        picture = np.full((32, 48, 3), 20 + 5 * number, np.uint8)
        x = 4 * (8 - frame if is_left else frame) + number
        picture[8:20, x : x + 8] = 230
        writer.write(picture)
    writer.release()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run of a model of clips, made by the commands of the page, with its exported file."""
    folder = tmp_path_factory.mktemp("clips") / "motions"
    for each in NAMES:
        write_motion(folder / each, int(Path(each).stem), is_left=each.startswith("left"))
    for words in (
        ["frames", str(folder), *NAMES],
        ["import", str(folder), str(folder), "--format", "imagefolder"],
        ["train", str(folder), "--kind", "act", "--epochs=2", "--frames=4", "--size=32", "--width=8", "--blocks=1"],
        ["eval", str(folder), "act"],
        ["export-model", str(folder), "act"],
    ):
        assert main(["vision", *words]) == 0
    return folder / "runs" / "act"


def test_every_video_is_a_clip_of_its_class(run: Path) -> None:
    told = json.loads((run / "result.json").read_text())["about"]
    assert told.startswith("10 training clips of motions")
    found = load_model(run).description
    assert (found.classes, found.frames) == (("left", "right"), 4)
    scores = json.loads((run / "eval-val.json").read_text())
    assert len(scores["samples"]) == 2  # of 12 clips, a fifth
    with VisionProject.open(run.parents[1]) as project:
        frames = project.frames_of("right/3.avi")
    assert [each.frame for each in frames] == list(range(9))


def test_a_video_gets_one_answer_as_a_clip(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_motion(folder / "a.avi", 1, is_left=True)
    write_motion(folder / "b.avi", 3, is_left=False)
    write_video(folder / "short.avi", 2)  # fewer frames than the model takes
    (folder / "broken.mp4").write_bytes(b"no video")
    (folder / "picture.png").write_bytes(b"beside them")
    words = ["vision", "predict", str(run / "model.onnx"), str(folder), "--out", str(tmp_path / "one.jsonl")]
    assert main(words) == 0
    assert capsys.readouterr().out == f"3 videos, 1 unreadable: {tmp_path}/one.jsonl\n"
    found = lines(tmp_path / "one.jsonl")
    assert [each["video"] for each in found] == [
        str(folder / name) for name in ("a.avi", "b.avi", "broken.mp4", "short.avi")
    ]
    assert "broken.mp4' cannot be decoded" in found[2]["error"]
    model = load_model(run)
    for each in (found[0], found[1], found[3]):
        clip = read_clip(Path(each["video"]), 4)
        with torch.no_grad():
            answers = {name: value.numpy() for name, value in model(torch.from_numpy(clip[None])).items()}
        [wanted] = predictions_of(model.description, answers)
        assert each["labels"][0]["class"] == wanted.labels[0].class_name
        assert each["labels"][0]["score"] == pytest.approx(wanted.scores[0], abs=1e-4)
        assert (each["width"], each["height"]) == (clip.shape[2], clip.shape[1])
    command = [sys.executable, "-m", "multiring"]
    words[-1] = str(tmp_path / "two.jsonl")
    subprocess.run([*command, "run", "-n", "2", "--", *command, *words], check=True, capture_output=True, timeout=240)
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()


def test_what_is_no_video_is_refused(run: Path, tmp_path: Path) -> None:
    predictor = Predictor.open(run)
    (tmp_path / "a.png").write_bytes(b"")
    for path, text in (
        (tmp_path / "a.png", r"a\.png' is no video, and the model takes clips of 4 frames"),
        (tmp_path, "has no video, and the model takes clips of 4 frames"),
    ):
        with pytest.raises(ArgumentError, match=text):
            alone(predictor, [path], tmp_path / "out.jsonl")
    write_video(tmp_path / "a.avi", 3)
    with pytest.raises(ArgumentError, match="COCO holds boxes and masks"):
        alone(predictor, [tmp_path / "a.avi"], tmp_path / "out.jsonl", file_format="coco")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.avi", "a.png"]


@pytest.mark.parametrize(("frames", "every"), [(4, 1), (3, 2), (20, 1), (5, 7)])
def test_frames_of_a_clip_are_evenly_spaced(tmp_path: Path, frames: int, every: int) -> None:
    write_video(tmp_path / "a.avi", 12)
    video = Video(tmp_path / "a.avi")
    every_frame = []
    while video.grab():
        every_frame.append(video.pixels())
    video.close()
    kept = every_frame[::every]
    wanted = [kept[int((place + 0.5) * len(kept) / frames)] for place in range(frames)]
    np.testing.assert_array_equal(read_clip(tmp_path / "a.avi", frames, every), np.stack(wanted))
    [found] = find_inputs([tmp_path], clip_frames=frames)
    assert (found.noun, found.clip_frames) == ("video", frames)


def test_clips_are_served_as_tensors(run: Path, tmp_path: Path) -> None:
    write_motion(tmp_path / "a.avi", 1, is_left=True)
    clip = read_clip(tmp_path / "a.avi", 4)
    alone(Predictor.open(run / "model.onnx"), [tmp_path / "a.avi"], tmp_path / "out.jsonl")
    [wanted] = lines(tmp_path / "out.jsonl")
    with running_server(run / "model.onnx") as server:

        def asked(shape: list[int], data: bytes) -> tuple[int, Any]:
            one = {"name": "pixels", "shape": shape, "datatype": "UINT8", "parameters": {"binary_data_size": len(data)}}
            head = json.dumps({"inputs": [one]}).encode()
            headers = {"Inference-Header-Content-Length": str(len(head))}
            status, _, body = server.ask("POST", "/v2/models/act/infer", head + data, headers)
            return status, json.loads(body)

        status, told = asked([1, *clip.shape], clip.tobytes())
        assert status == 200
        assert max(told["outputs"][0]["data"]) == pytest.approx(wanted["labels"][0]["score"], abs=1e-5)
        status, told = asked([1, 3, *clip.shape[1:]], clip[:3].tobytes())
        assert (status, "want [-1, 4, -1, -1, 3]" in told["error"]) == (400, True)
        status, _, body = server.ask("POST", "/v2/models/act/picture", b"x")
        assert (status, b"takes clips of 4 frames, and not pictures: use infer" in body) == (400, True)
