"""Generate images in ImageNet's layout. Each class is a shape with a surface pattern, drawn with random variations.

    python -m examples.imagenet.generate images --classes 40 --train 400 --val 50

It writes images/train/<class>/<number>.JPEG, images/val/... and images/shifted/..., where lighting, backgrounds and
sharpness differ from training. A class is one of 8 shapes with one of 5 surfaces. Pose, size, colours, light, occlusion
and background are drawn anew for every image, so none of them reveals the class. Image i of a split is the same in
every run, on any number of processes.

These are generated images. Figures measured on them say nothing about photographs.
"""

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from examples.generated import claim
from numpy.typing import NDArray
from PIL import Image

Field = NDArray[np.float64]
SPLITS = ("train", "val", "shifted")
QUALITY = 92  # the JPEG quality


def _polygon(x: Field, y: Field, corners: int, inner: float) -> Field:
    """Return how far outside a star each point is; `inner` is the radius between its points, 1 for a polygon."""
    angle = np.arctan2(y, x) % (2 * np.pi / corners)
    folded = np.abs(angle - np.pi / corners) / (np.pi / corners)  # 1 at a corner, 0 between two
    edge = np.cos(np.pi / corners) if inner == 1 else inner
    return np.hypot(x, y) - (edge + (1 - edge) * folded ** (2 if inner == 1 else 1.2))


def _ring(x: Field, y: Field) -> Field:
    return np.abs(np.hypot(x, y) - 0.72) - 0.24


def _cross(x: Field, y: Field) -> Field:
    x, y = np.abs(x), np.abs(y)
    return np.minimum(np.maximum(x - 0.3, y - 0.95), np.maximum(y - 0.3, x - 0.95))


def _crescent(x: Field, y: Field) -> Field:
    return np.maximum(np.hypot(x, y) - 0.95, 0.75 - np.hypot(x - 0.45, y))


def _bar(x: Field, y: Field) -> Field:
    return np.maximum(np.abs(x) - 1.0, np.abs(y) - 0.35)


SHAPES: dict[str, Callable[[Field, Field], Field]] = {
    "disc": lambda x, y: np.hypot(x, y) - 0.85,
    "triangle": lambda x, y: np.maximum(np.maximum(-y - 0.5, 0.866 * x + 0.5 * y - 0.5), -0.866 * x + 0.5 * y - 0.5),
    "square": lambda x, y: np.maximum(np.abs(x), np.abs(y)) - 0.75,
    "star": lambda x, y: _polygon(x, y, 5, 0.42),
    "ring": _ring,
    "cross": _cross,
    "crescent": _crescent,
    "bar": _bar,
}
SURFACES: dict[str, Callable[[Field, Field], Field]] = {
    "plain": lambda x, _: np.zeros_like(x),
    "stripes": lambda x, _: np.sin(x * 11),
    "checks": lambda x, y: np.sign(np.sin(x * 8)) * np.sign(np.sin(y * 8)),
    "dots": lambda x, y: np.where(np.hypot((x * 2.2) % 1 - 0.5, (y * 2.2) % 1 - 0.5) < 0.27, 1.0, -1.0),
    "rings": lambda x, y: np.sin(np.hypot(x, y) * 15),
}
CLASSES = [f"{shape}-{surface}" for shape in SHAPES for surface in SURFACES]


@dataclass(frozen=True, kw_only=True, slots=True)
class Nuisances:
    """The variation among images of one class."""

    contrast: float  # the least contrast of a surface's two colours
    light: float  # how much darker one side may be
    occlusion: float  # the share of images with a bar across
    blur: float  # the most blur, in pixels
    noise: float  # the standard deviation of a pixel, whose range is 1
    clutter: int  # the most shapes without a surface in the background


NUISANCES = {
    "train": Nuisances(contrast=0.35, light=0.5, occlusion=0.3, blur=0.6, noise=0.04, clutter=3),
    "val": Nuisances(contrast=0.35, light=0.5, occlusion=0.3, blur=0.6, noise=0.04, clutter=3),
    "shifted": Nuisances(contrast=0.25, light=0.8, occlusion=0.6, blur=1.2, noise=0.09, clutter=6),
}


def draw(label: int, split: str, number: int, size: int) -> NDArray[np.uint8]:
    """Return image `number` of a class: (size, size, 3)."""
    random = np.random.default_rng([SPLITS.index(split), label, number])
    nuisances = NUISANCES[split]
    shape, surface = CLASSES[label % len(CLASSES)].split("-")
    # Draw twice as many points as pixels in each direction; averaging four points smooths the edges.
    axis = (np.arange(size * 2) + 0.5) / size - 1
    x, y = np.meshgrid(axis, axis)
    image = _background(random, x, y, nuisances)
    dx, dy = random.uniform(-0.3, 0.3, 2)
    scale, turn = random.uniform(0.42, 0.7), random.uniform(0, 2 * np.pi)
    u = ((x - dx) * np.cos(turn) + (y - dy) * np.sin(turn)) / scale
    v = ((y - dy) * np.cos(turn) - (x - dx) * np.sin(turn)) / scale
    v = v * random.uniform(0.8, 1.25)
    light, dark = _two_colours(random, nuisances.contrast)
    if surface == "plain" and random.random() < 0.5:
        light = dark
    share = (SURFACES[surface](u + random.uniform(-1, 1) * (surface in {"stripes", "checks", "dots"}), v) + 1) / 2
    painted = dark + (light - dark) * share[..., None]
    image = np.where((SHAPES[shape](u, v) < 0)[..., None], painted, image)
    if random.random() < nuisances.occlusion:
        turn, offset = random.uniform(0, np.pi), random.uniform(-0.5, 0.5)
        bar = np.abs(x * np.cos(turn) + y * np.sin(turn) - offset) < random.uniform(0.05, 0.14)
        image = np.where(bar[..., None], random.uniform(0, 1, 3), image)
    return _photographed(random, image, x, y, nuisances)


def _two_colours(random: np.random.Generator, contrast: float) -> tuple[Field, Field]:
    while True:
        one, other = random.uniform(0, 1, (2, 3))
        if abs(one.mean() - other.mean()) > contrast:
            return one, other


def _background(random: np.random.Generator, x: Field, y: Field, nuisances: Nuisances) -> Field:
    """Return a background whose colour changes over the image, with waves and parts of other shapes."""
    one, other = random.uniform(0.1, 0.9, (2, 3))
    turn, length = random.uniform(0, 2 * np.pi), random.uniform(0.5, 9)
    waves = np.sin((x * np.cos(turn) + y * np.sin(turn)) * length + random.uniform(0, 6)) * random.uniform(0.1, 0.5)
    image: Field = one + (other - one) * (0.5 + waves)[..., None]
    for _ in range(random.integers(0, nuisances.clutter + 1)):
        shape = list(SHAPES.values())[random.integers(len(SHAPES))]
        # Place other shapes at the rim, and smaller than the image's own shape.
        around, far, scale = random.uniform(0, 2 * np.pi), random.uniform(0.8, 1.2), random.uniform(0.1, 0.3)
        inside = shape((x - far * np.cos(around)) / scale, (y - far * np.sin(around)) / scale) < 0
        image = np.where(inside[..., None], random.uniform(0, 1, 3), image)
    return image


def _photographed(
    random: np.random.Generator, image: Field, x: Field, y: Field, nuisances: Nuisances
) -> NDArray[np.uint8]:
    turn = random.uniform(0, 2 * np.pi)
    shade = 1 - nuisances.light * random.uniform(0, 1) * (0.5 + (x * np.cos(turn) + y * np.sin(turn)) / 2.9)
    image = image * (shade * random.uniform(0.75, 1.2))[..., None]
    size = image.shape[0] // 2
    image = image.reshape(size, 2, size, 2, 3).mean((1, 3))
    blur = random.uniform(0, nuisances.blur)
    for axis in (0, 1):  # three taps, with about this standard deviation
        side = min(0.32, blur**2 / 2)
        image = (1 - 2 * side) * image + side * (np.roll(image, 1, axis) + np.roll(image, -1, axis))
    image = image + random.normal(0, nuisances.noise, image.shape)
    pixels: NDArray[np.uint8] = (np.clip(image, 0, 1) * 255).round().astype(np.uint8)
    return pixels


def _write_class(folder: Path, counts: dict[str, int], size: int, label: int) -> None:
    for split, count in counts.items():
        if not count:
            continue
        place = folder / split / f"n{label:08d}"
        place.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            Image.fromarray(draw(label, split, number, size)).save(place / f"{number:06d}.JPEG", quality=QUALITY)


def generate(folder: Path, classes: int, counts: dict[str, int], *, size: int = 64, processes: int = 2) -> None:
    """Write `counts` images of each class and split; more than 40 classes repeat the 40 under new numbers.

    Raises:
        ArgumentError: the folder has files that were not generated.
    """
    claim(folder, counts=counts, classes=classes, size=size)
    with ProcessPoolExecutor(processes) as pool:
        made = pool.map(partial(_write_class, folder, counts, size), range(classes))
        for number, _ in enumerate(made, 1):
            if number % max(1, classes // 10) == 0:
                print(f"{folder}: {number} of {classes} classes are drawn", file=sys.stderr, flush=True)
    names = [f"n{label:08d} {CLASSES[label % len(CLASSES)]}\n" for label in range(classes)]
    (folder / "classes.txt").write_text("".join(names), encoding="utf-8")


def main() -> None:
    """Generate the images that the command line asks for."""
    parser = argparse.ArgumentParser(description="Generate images in ImageNet's layout.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--classes", type=int, default=40, help="number of classes (40); beyond 40 they repeat")
    parser.add_argument("--train", type=int, default=400, help="images of each class (400)")
    parser.add_argument("--val", type=int, default=50, help="images of each class (50), also in the shifted split")
    parser.add_argument("--size", type=int, default=64, help="pixels along a side (64)")
    parser.add_argument("--processes", type=int, default=2, help="number of processes that draw (2)")
    options = parser.parse_args()
    counts = {"train": options.train, "val": options.val, "shifted": options.val}
    generate(options.folder, options.classes, counts, size=options.size, processes=options.processes)
    print(f"{options.folder}: {options.classes} classes, {sum(counts.values()) * options.classes} generated images")


if __name__ == "__main__":
    main()
