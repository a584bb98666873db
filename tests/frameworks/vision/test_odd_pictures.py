"""Turned, transparent, grey, CMYK and deep pictures mean the same in the page, in training, in predict and in serve."""

import io
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.model_servers import running_server

import multiring
from multiring.vision import Label, VisionProject, make_split
from multiring.vision.fitting.samples import PictureSamples, SampleOptions
from multiring.vision.fitting.targets import labelled_parts
from multiring.vision.labelling.application import LabellingService, create_application
from multiring.vision.models.answers import predictions_of
from multiring.vision.models.preprocessing import prepare_picture
from multiring.vision.models.vision_model import load_model
from multiring.vision.pictures import Pixels
from multiring.vision.predicting.predicting import predict
from multiring.vision.predicting.predictors import Predictor, answer_values

with warnings.catch_warnings():
    # Newer releases of starlette want httpx2 instead of httpx, and work with httpx.
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient


def odd_pictures(folder: Path) -> dict[str, Pixels]:
    """Write pictures, and return what each means, worked out without a reader of pictures."""
    folder.mkdir()
    random = np.random.default_rng(9)
    rows, columns = np.mgrid[:30, :40]
    plain = np.stack([rows * 8, columns * 6, (rows + columns) * 3], 2).astype(np.uint8)
    wanted: dict[str, Pixels] = {}

    def add(name: str, stored: Image.Image, meaning: Any, **options: Any) -> None:
        stored.save(folder / name, **options)
        wanted[name] = np.ascontiguousarray(meaning, np.uint8)

    grey = plain[..., 0]
    for orientation, seen in ((3, plain[::-1, ::-1]), (6, np.rot90(plain)), (5, plain.transpose(1, 0, 2))):
        exif = Image.Exif()
        exif[274] = orientation
        add(f"turned{orientation}.png", Image.fromarray(np.ascontiguousarray(seen)), plain, exif=exif.tobytes())
    alpha = np.where(columns < 17, 0, 255).astype(np.uint8)[..., None]
    seen_through = np.where(alpha, plain, 255)
    add("alpha.png", Image.fromarray(np.concatenate([plain, alpha], 2)), seen_through)
    add("grey-alpha.png", Image.fromarray(np.stack([grey, alpha[..., 0]], 2)), np.where(alpha, grey[..., None], 255))
    colours, numbers = random.integers(0, 256, (16, 3), np.uint8), random.integers(0, 16, (30, 40), np.uint8)
    indexed = Image.fromarray(numbers)
    indexed.putpalette(colours.tobytes())
    add("palette.png", indexed, colours[numbers])
    hidden = np.where((numbers == 3)[..., None], 255, colours[numbers])
    add("hidden.png", indexed, hidden, transparency=3)
    inks = np.concatenate([255 - plain, np.zeros_like(alpha)], 2)
    add("cmyk.tif", Image.frombytes("CMYK", (40, 30), inks.tobytes()), plain)
    deep = random.integers(0, 1 << 16, (30, 40), np.uint16)
    add("deep.png", Image.fromarray(deep), np.repeat((deep >> 8)[..., None], 3, 2))
    add("grey.png", Image.fromarray(grey), np.repeat(grey[..., None], 3, 2))
    bits = numbers > 7
    add("bits.png", Image.fromarray(bits), np.repeat(bits[..., None], 3, 2) * 255)
    still = [Image.fromarray(np.repeat(each[..., None], 3, 2)) for each in (grey, 255 - grey)]
    add("frames.tif", still[0], np.repeat(grey[..., None], 3, 2), save_all=True, append_images=still[1:])
    return wanted


def test_odd_pictures_mean_the_same_everywhere(exported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    wanted = odd_pictures(folder)
    names = sorted(wanted)
    model = load_model(exported)
    with VisionProject.create(folder) as project:
        project.scan()
        assert [each.path for each in project.images()] == names
        project.add_class("disc")
        project.set_many_labels(dict.fromkeys(names, (Label(class_name="disc"),)), "ann")
        data = labelled_parts(project, make_split(project, {"train": 1.0}), "classify", ["train"])
    # Training:
    options = SampleOptions(size=16, fit="stretch")
    samples = PictureSamples(folder, data.parts["train"], lambda *_: {}, options)
    for number, sample in enumerate(samples.all):
        found = samples.sample(number)["pixels"]
        assert (found == prepare_picture(wanted[sample.path], 16, "stretch")).all(), sample.path
    assert len(samples) == len(names)
    # Predict:
    group = multiring.init()
    predict(group, Predictor.open(exported / "model.onnx"), [folder / name for name in names], tmp_path / "out.jsonl")
    multiring.shutdown()
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    scores = set()
    with (
        TestClient(create_application(LabellingService(folder)), base_url="http://localhost") as page,
        running_server(exported / "model.onnx") as server,
    ):
        for name, record in zip(names, records, strict=True):
            pixels = wanted[name]
            told = page.get("/api/picture", params={"path": name}).json()
            shown = page.get("/picture", params={"path": name, "digest": told["digest"], "side": 0})
            assert (np.asarray(Image.open(io.BytesIO(shown.content))) == pixels).all(), name
            with torch.no_grad():
                arrays = {key: each.numpy() for key, each in model(torch.from_numpy(pixels[None])).items()}
            [answer] = predictions_of(model.description, arrays)
            expected = answer_values(answer, pixels.shape[1], pixels.shape[0])
            status, _, body = server.ask("POST", "/v2/models/first/picture", (folder / name).read_bytes())
            assert status == 200
            for found in (record, *json.loads(body)["answers"]):
                assert (found["width"], found["height"]) == (40, 30)
                assert [each["class"] for each in found["labels"]] == [each["class"] for each in expected["labels"]]
                assert found["labels"][0]["score"] == pytest.approx(expected["labels"][0]["score"], abs=1e-5), name
            scores.add(round(expected["labels"][0]["score"], 3))
        server.end()
    assert len(scores) >= 7  # the answers tell the pictures apart
