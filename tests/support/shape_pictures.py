"""Small generated pictures of shapes with labels, for tests of multiring.vision."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from multiring.vision import Box, Label, Mask, VisionProject, run_lengths_of

SHAPES = {"disc": "ellipse", "block": "rectangle"}


def classified_shapes(folder: Path, each: int, *, empty: int = 0, unlabelled: int = 0, seed: int = 1) -> Path:
    """Make a project of pictures with one shape each, labelled by its class.

    Args:
        folder: the project's folder, which is made.
        each: pictures of each class.
        empty: pictures with nothing in them, labelled so.
        unlabelled: pictures without a labelling.
        seed: of the pictures.
    """
    generator = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    names = [name for name in SHAPES for _ in range(each)] + [""] * (empty + unlabelled)
    for number, name in enumerate(names):
        _drawn(generator, [name] if name else [])[0].save(folder / f"{number:03}.png")
    with VisionProject.create(folder) as project:
        project.scan()
        for name in SHAPES:
            project.add_class(name)
        labelled = names[: len(names) - unlabelled]
        project.set_many_labels(
            {f"{number:03}.png": (Label(class_name=name),) if name else () for number, name in enumerate(labelled)},
            "ann",
        )
    return folder


def located_shapes(folder: Path, pictures: int, *, masks: bool = False, most: int = 3, seed: int = 1) -> Path:
    """Make a project of pictures with none to `most` shapes, labelled by boxes, or by masks."""
    generator = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    labels: dict[str, tuple[Label, ...]] = {}
    for number in range(pictures):
        names = generator.choice(list(SHAPES), size=number % (most + 1)).tolist()
        image, places = _drawn(generator, names)
        image.save(folder / f"{number:03}.png")
        labels[f"{number:03}.png"] = tuple(
            _located(name, place, image.size, masks=masks) for name, place in zip(names, places, strict=True)
        )
    with VisionProject.create(folder) as project:
        project.scan()
        for name in SHAPES:
            project.add_class(name)
        project.set_many_labels(labels, "ann")
    return folder


# Cycles of the four corners. Clips of all motions have the same frames, each twice; only the order differs.
MOTIONS = {"clockwise": (0, 1, 3, 2), "back": (0, 2, 3, 1), "zigzag": (0, 1, 2, 3), "cross": (0, 3, 1, 2)}


def moving_discs(folder: Path, each: int, seed: int = 1) -> Path:
    """Make a project of clips of 8 frames, in which a disc jumps between four corners, labelled by its motion."""
    generator = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    names = [name for name in MOTIONS for _ in range(each)]
    for number, name in enumerate(names):
        ground = generator.integers(200, 256, (32, 32, 3), dtype=np.uint8)
        colour, start = tuple(int(one) for one in generator.integers(0, 120, 3)), int(generator.integers(4))
        for frame in range(8):
            row, column = divmod(MOTIONS[name][(start + frame) % 4], 2)
            image = Image.fromarray(ground)
            ImageDraw.Draw(image).ellipse((2 + 16 * column, 2 + 16 * row, 13 + 16 * column, 13 + 16 * row), fill=colour)
            image.save(folder / f"{number:03}-{frame}.png")
    with VisionProject.create(folder) as project:
        project.scan()
        for name in MOTIONS:
            project.add_class(name)
        labels = {}
        for image_record in project.images():
            number, frame = (int(part) for part in image_record.path.removesuffix(".png").split("-"))
            project.set_frame(image_record.path, f"video {number}", frame)
            labels[image_record.path] = (Label(class_name=names[number]),)
        project.set_many_labels(labels, "ann")
    return folder


def _drawn(generator: np.random.Generator, names: Sequence[str]) -> tuple[Image.Image, list[tuple[int, int, int, int]]]:
    """Return a picture of dark shapes on a light noisy ground, and the shapes' boxes; they do not overlap."""
    width, height = (int(each) for each in generator.integers(56, 80, 2))
    ground = generator.integers(200, 256, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(ground)
    draw = ImageDraw.Draw(image)
    places: list[tuple[int, int, int, int]] = []
    for name in names:
        while True:
            side = int(generator.integers(16, 25))
            x, y = int(generator.integers(0, width - side)), int(generator.integers(0, height - side))
            place = (x, y, x + side, y + side)
            if all(
                place[0] >= other[2] or place[2] <= other[0] or place[1] >= other[3] or place[3] <= other[1]
                for other in places
            ):
                break
        colour = tuple(int(each) for each in generator.integers(0, 120, 3))
        getattr(draw, SHAPES[name])((x, y, x + side - 1, y + side - 1), fill=colour)
        places.append(place)
    return image, places


def _located(name: str, place: tuple[int, int, int, int], size: tuple[int, int], *, masks: bool) -> Label:
    left, top, right, bottom = place
    if not masks:
        return Box(class_name=name, left=left, top=top, width=right - left, height=bottom - top)
    image = Image.new("1", size)
    getattr(ImageDraw.Draw(image), SHAPES[name])((left, top, right - 1, bottom - 1), fill=1)
    return Mask(class_name=name, pixels=run_lengths_of(np.asarray(image)))
