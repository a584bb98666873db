"""Measure baselines on images in ImageNet's layout without a network; a network has to beat their figures.

    python -m examples.imagenet.baselines images

It prints top-1 accuracy for three baselines: the largest class; logistic regression on pixels; and logistic regression
on histograms of oriented gradients (Dalal, Triggs, CVPR 2005) and of colours. The regressions learn from `train`, with
the regularisation that is best on a tenth of it, and are measured on `val` and `shifted`. The figures are also written
beside the images, so that the report of a training on these images shows them.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from multiring.training import write_baselines

CELL, ORIENTATIONS, COLOURS = 8, 9, 4  # pixels; bins of half a turn; bins of each colour
PIXELS = 32  # pixels along a side, for the regression on pixels
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1)
SPLITS = ("train", "val", "shifted")

Features = NDArray[np.float32]


def read(folder: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the images of a split, (n, side, side, 3), and their classes."""
    classes = sorted(each for each in folder.iterdir() if each.is_dir())
    images, labels = [], []
    for label, place in enumerate(classes):
        for path in sorted(place.iterdir()):
            images.append(np.asarray(Image.open(path).convert("RGB")))
            labels.append(label)
    return np.stack(images), np.array(labels)


def pixels(images: NDArray[np.uint8]) -> Features:
    """Return the images resized to PIXELS along a side, as flat vectors."""
    factor = images.shape[1] // PIXELS
    small = images.reshape(len(images), PIXELS, factor, PIXELS, factor, 3).mean((2, 4), dtype=np.float32)
    flat: Features = small.reshape(len(images), -1) / np.float32(255)
    return flat


def descriptors(images: NDArray[np.uint8]) -> Features:
    """Return histograms of gradient orientations by cell, over blocks of 2 x 2 cells, and of colours."""
    return np.stack([np.concatenate([_gradients(each), _colours(each)]) for each in images]).astype(np.float32)


def _gradients(image: NDArray[np.uint8]) -> Features:
    grey = image.mean(-1) / 255
    down, across = np.gradient(grey)
    strength, angle = np.hypot(down, across), np.arctan2(down, across) % np.pi
    bins = np.minimum((angle / np.pi * ORIENTATIONS).astype(int), ORIENTATIONS - 1)
    cells = grey.shape[0] // CELL
    rows, columns = np.indices(grey.shape) // CELL
    index = (rows * cells + columns) * ORIENTATIONS + bins
    counts = np.bincount(index.ravel(), strength.ravel(), cells * cells * ORIENTATIONS)
    counts = counts.reshape(cells, cells, ORIENTATIONS)
    blocks = np.concatenate([counts[:-1, :-1], counts[1:, :-1], counts[:-1, 1:], counts[1:, 1:]], -1)
    blocks /= np.sqrt((blocks**2).sum(-1, keepdims=True) + 1e-4)
    flat: Features = blocks.ravel().astype(np.float32)
    return flat


def _colours(image: NDArray[np.uint8]) -> Features:
    bins = image.astype(int) * COLOURS // 256
    index = (bins[..., 0] * COLOURS + bins[..., 1]) * COLOURS + bins[..., 2]
    shares: Features = (np.bincount(index.ravel(), minlength=COLOURS**3) / index.size).astype(np.float32)
    return shares


def regression(features: dict[str, Features], labels: dict[str, NDArray[np.int64]]) -> dict[str, float]:
    """Return top-1 accuracy on the splits other than train, in percent."""
    scaler = StandardScaler().fit(features["train"])
    scaled = {split: scaler.transform(each) for split, each in features.items()}
    x, y = scaled["train"], labels["train"]
    held_back = np.arange(len(y)) % 10 == 0
    scores = {}
    for strength in STRENGTHS:
        model = LogisticRegression(C=strength, max_iter=200).fit(x[~held_back], y[~held_back])
        scores[strength] = model.score(x[held_back], y[held_back])
    model = LogisticRegression(C=max(scores, key=scores.__getitem__), max_iter=300).fit(x, y)
    return {split: 100 * model.score(scaled[split], labels[split]) for split in SPLITS if split != "train"}


def main() -> None:
    """Measure and print the baselines."""
    parser = argparse.ArgumentParser(description="Top-1 without a network.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args()
    read_splits = {split: read(options.folder / split) for split in SPLITS}
    labels = {split: each for split, (_, each) in read_splits.items()}
    largest = np.bincount(labels["train"]).argmax()
    rows = {"majority": {split: 100 * float((labels[split] == largest).mean()) for split in SPLITS[1:]}}
    for name, describe in (("pixels", pixels), ("gradients and colours", descriptors)):
        rows[name] = regression({split: describe(images) for split, (images, _) in read_splits.items()}, labels)
    named = {name: {f"{split} top-1": value for split, value in row.items()} for name, row in rows.items()}
    write_baselines(options.folder, named)
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{'top-1, %':<24}{'val':>8}{'shifted':>9}")
    for name, row in rows.items():
        print(f"{name:<24}{row['val']:>8.1f}{row['shifted']:>9.1f}")


if __name__ == "__main__":
    main()
