"""Exported models of random weights and pictures for the measurements of predicting and serving."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.evidence.vision.trainings import project
from PIL import Image
from tests.support.vision_models import make_run

from multiring.vision import VisionProject
from multiring.vision.exporting.runs import export_run
from multiring.vision.fitting.train_command import train_model

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "build" / "evidence" / "vision"


def exported(size: int, width: int, blocks: int = 1) -> Path:
    """Return the model.onnx of a classifier; make it if it is not there.

    Args:
        size: the side of the square that the network sees.
        width: the channels of its first stage.
        blocks: the blocks of each stage.
    """
    folder = FOLDER / f"served-{size}-{width}-{blocks}"
    found = folder / "runs" / "first" / "model.onnx"
    if not found.exists():
        # Made under another name, so that a killed program leaves no half of it.
        FOLDER.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=FOLDER))
        project, run = make_run(beside / "project", 20, size=size, width=width, blocks=blocks)
        with project:
            export_run(project, run)
        (beside / "project").rename(folder)
        beside.rmdir()
    return found


def trained_and_exported(kind: str) -> Path:
    """Return the model.onnx of a small model of a kind that was trained on generated pictures; make it if needed."""
    found = FOLDER / "served-kinds" / kind / "runs" / kind / "model.onnx"
    if not found.exists():
        place = project(kind, folder=FOLDER / "served-kinds")
        options: dict[str, Any] = {
            "width": 8,
            "blocks": 1,
            "head": 8,
            "size": 32,
            "epochs": 20,
            "batch": 8,
            "frames": 4,
        }
        run = train_model(place, kind=kind, noise=False, peak=False, **options)
        if run is None:
            raise RuntimeError(f"the training of {kind} was interrupted: start it again")
        with VisionProject.open(place) as opened:
            export_run(opened, run.name)
    return found


def photographs(number: int, width: int, height: int) -> Path:
    """Return a folder with JPEG files of smooth noise; make it if it is not there."""
    folder = FOLDER / f"photographs-{number}-{width}-{height}"
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for index in range(number):
        path = folder / f"{index:05}.jpg"
        coarse = Image.fromarray(random.integers(0, 256, (6, 8, 3), np.uint8))
        if not path.exists():
            coarse.resize((width, height), Image.Resampling.BICUBIC).save(path, quality=90)
    return folder
