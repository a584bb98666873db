"""A project of small generated pictures, and a small model of them, for tests of exporting, predicting and serving."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from multiring.vision import Label, VisionProject, make_split, read_picture
from multiring.vision.models.answers import predictions_of
from multiring.vision.models.description import ModelDescription
from multiring.vision.models.vision_model import VisionModel, save_model
from multiring.vision.pictures import Pixels

CLASSES = ("disc", "block", "stripe")
SIZES = ((40, 30), (24, 24), (33, 57))


def draw_pictures(folder: Path, number: int, seed: int = 0) -> list[Path]:
    """Write pictures of colour gradients with noise, of three sizes, and return their paths."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for index in range(number):
        width, height = SIZES[index % 3]
        paths.append(folder / f"{index:03}.png")
        Image.fromarray(_gradients(random, 1, height, width)[0]).save(paths[-1])
    return paths


def small_model(
    seed: int = 0, *, size: int = 16, width: int = 8, blocks: int = 1, levels: int = 1, symmetries: int = 1
) -> VisionModel:
    """Return a model of random weights whose answers vary with the picture.

    Args:
        seed: of the weights.
        size: the side of the square that the network sees.
        width: the channels of the network's first stage.
        blocks: of each stage.
        levels: of the network.
        symmetries: of the description.
    """
    torch.manual_seed(seed)
    description = ModelDescription(
        kind="classify",
        classes=CLASSES,
        size=size,
        architecture="resnet",
        arguments={"width": width, "blocks": blocks, "levels": levels},
        mean=(0.4, 0.5, 0.6),
        std=(0.2, 0.25, 0.3),
        split="split",
    )
    model = VisionModel(description)
    gradients = _gradients(np.random.default_rng(seed), 96, size, size)
    squares = torch.from_numpy(gradients).permute(0, 3, 1, 2).float()
    last = [each for each in model.network.modules() if isinstance(each, torch.nn.Linear)][-1]
    with torch.no_grad():
        # Batch norm takes its statistics from such pictures, and every class is the answer for some of them.
        model.train()
        for _ in range(20):
            model.outputs(squares)
        model.eval()
        found = model.outputs(squares)
        scale = 2 / found.std(0)
        last.bias.copy_((last.bias - found.mean(0)) * scale)
        last.weight.mul_(scale[:, None])
    symmetric = VisionModel(replace(description, symmetries=symmetries))
    symmetric.load_state_dict(model.state_dict())
    return symmetric.eval()


def _gradients(random: np.random.Generator, number: int, height: int, width: int) -> Pixels:
    """Return pictures that change from one colour to another, with noise."""
    ends = random.integers(0, 256, (2, number, 1, 1, 3))
    share = np.linspace(0, 1, width)[None, None, :, None]
    noise = random.integers(-20, 21, (number, height, width, 3))
    found: Pixels = (ends[0] * share + ends[1] * (1 - share) + noise).clip(0, 255).astype(np.uint8)
    return found


def make_run(folder: Path, number: int = 60, seed: int = 0, **network: int) -> tuple[VisionProject, str]:
    """Make a project with a run whose labels are what its model answers, and return it with the run's name.

    Args:
        folder: of the project.
        number: of the pictures.
        seed: of pictures and weights.
        network: options of `small_model`.
    """
    draw_pictures(folder, number, seed)
    project = VisionProject.create(folder)
    project.scan()
    for name in CLASSES:
        project.add_class(name)
    model = small_model(seed, **network)
    for image in project.images():
        pixels = torch.from_numpy(read_picture(folder / image.path).pixels[None])
        with torch.no_grad():
            answers = {name: each.numpy() for name, each in model(pixels).items()}
        [answer] = predictions_of(model.description, answers)
        project.set_labels(image.path, (Label(class_name=answer.labels[0].class_name),), author="model")
    split = make_split(project, {"train": 0.2, "val": 0.8})
    run = project.runs / "first"
    run.mkdir()
    save_model(run, model, replace(model.description, digests={"split": split.digest}))
    return project, "first"
