"""Exported models of random weights and pictures for the measurements of predicting and serving."""

import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from tests.support.vision_models import make_run

from multiring.vision.exporting.runs import export_run

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
