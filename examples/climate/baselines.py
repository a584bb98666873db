"""Measure baselines on climate fields without a network; a network has to beat their figures.

    python -m examples.climate.baselines fields

It prints the IoU of each class and their mean for three baselines: background everywhere; logistic regression on a
pixel's channels; and gradient boosting. Boosting uses the mean, deviation, smallest and largest value of each channel
within 15 x 15 pixels, and the latitude. Both classifiers learn from pixels drawn from `train`. They guess storms more
often than storms are drawn, by a factor chosen for the best mean IoU on fields of `train` that are held back. The
figures are also written beside the fields, so that the report of a training on these fields shows them.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from multiring.training import write_baselines

AROUND = 15  # pixels along a side of the surroundings
CLASSES = ("background", "cyclone", "river")
DRAWN = {0: 60, 1: 40, 2: 40}  # the most pixels of each class that are drawn from a field
HELD_BACK = 20  # the number of fields held back
BOOSTS = (0.1, 0.2, 0.4, 0.7, 1.0, 1.6)

Features = NDArray[np.float32]


def read(path: Path) -> tuple[Features, NDArray[np.int64]]:
    """Return a file's fields and labels; missing values become the channel's mean."""
    with h5py.File(path) as file:
        data, labels = file["climate/data"][:], file["climate/labels_0"][:].astype(np.int64)
    mean = np.nanmean(data, (0, 1))
    return np.where(np.isnan(data), mean, data), labels


def near(data: Features) -> Features:
    """Return the features of the channels around each pixel, and its latitude: (pixels, features)."""
    size = (AROUND, AROUND, 1)
    around = ("nearest", "wrap", "nearest")
    mean = ndimage.uniform_filter(data, size, mode=around)
    spread = np.sqrt(np.maximum(ndimage.uniform_filter(data**2, size, mode=around) - mean**2, 0))
    low, high = (each(data, size, mode=around) for each in (ndimage.minimum_filter, ndimage.maximum_filter))
    latitude = np.broadcast_to(np.linspace(-1, 1, data.shape[0])[:, None, None], (*data.shape[:2], 1))
    return np.concatenate([data, mean, spread, low, high, latitude], -1, dtype=np.float32).reshape(-1, 81)


def itself(data: Features) -> Features:
    """Return the channels of each pixel: (pixels, channels)."""
    return data.reshape(-1, data.shape[-1])


def intersection_over_union(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return each class's IoU in percent, from a confusion matrix."""
    hit = np.diag(counts)
    shares: NDArray[np.float64] = 100 * hit / np.maximum(counts.sum(0) + counts.sum(1) - hit, 1)
    return shares


def summed(counts: Iterable[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the sum of some confusion matrices."""
    total: NDArray[np.int64] = np.sum(list(counts), 0)
    return total


def confusion(labels: NDArray[np.int64], guesses: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a confusion matrix: how many pixels of class i (rows) were taken for class j."""
    classes = len(CLASSES)
    counts: NDArray[np.int64] = np.bincount(labels.ravel() * classes + guesses.ravel(), minlength=classes**2)
    return counts.reshape(classes, classes)


class Baseline:
    """A classifier of pixels, with a factor for rare classes that is best for the mean IoU."""

    def __init__(self, model: object, describe: object) -> None:
        self.model, self.describe = model, describe
        self.boost = 1.0

    def learn(self, paths: list[Path]) -> None:
        """Learn from pixels drawn from all fields but the last ones, and choose the factor on those."""
        random = np.random.default_rng(0)
        features, labels = [], []
        for path in paths[:-HELD_BACK]:
            data, truth = read(path)
            described, flat = self.describe(data), truth.ravel()  # type: ignore[operator]
            for label, most in DRAWN.items():
                places = np.nonzero(flat == label)[0]
                drawn = random.choice(places, min(most, len(places)), replace=False)
                features.append(described[drawn])
                labels.append(flat[drawn])
        self.model.fit(np.concatenate(features), np.concatenate(labels))  # type: ignore[attr-defined]
        held_back = [self.chances(path) for path in paths[-HELD_BACK:]]
        scores = {
            boost: intersection_over_union(summed(confusion(t, self.guess(c, boost)) for c, t in held_back)).mean()
            for boost in BOOSTS
        }
        self.boost = max(scores, key=scores.__getitem__)

    def chances(self, path: Path) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return each pixel's class probabilities, and its class."""
        data, truth = read(path)
        return self.model.predict_proba(self.describe(data)), truth.ravel()  # type: ignore[attr-defined,operator]

    @staticmethod
    def guess(chances: NDArray[np.float64], boost: float) -> NDArray[np.int64]:
        """Return each pixel's likeliest class, after multiplying the probabilities of rare classes by `boost`."""
        guesses: NDArray[np.int64] = (chances * np.array([1, boost, boost])).argmax(1)
        return guesses

    def measure(self, paths: list[Path]) -> list[float]:
        """Return the IoU of each class over all files, in percent."""
        counts = summed(
            confusion(truth, self.guess(chances, self.boost)) for chances, truth in map(self.chances, paths)
        )
        return [float(each) for each in intersection_over_union(counts)]


def main() -> None:
    """Measure and print the baselines."""
    parser = argparse.ArgumentParser(description="IoU without a network.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args()
    paths = {split: sorted((options.folder / split).glob("*.h5")) for split in ("train", "val", "shifted")}
    rows: dict[str, dict[str, list[float]]] = {"background": {}}
    for split in ("val", "shifted"):
        labels = [read(path)[1] for path in paths[split]]
        counts = summed(confusion(each, np.zeros_like(each)) for each in labels)
        rows["background"][split] = [float(each) for each in intersection_over_union(counts)]
    for name, model, describe in (
        ("pixels, logistic", make_pipeline(StandardScaler(), LogisticRegression(max_iter=300)), itself),
        ("15 x 15, boosting", HistGradientBoostingClassifier(max_iter=200, random_state=0), near),
    ):
        baseline = Baseline(model, describe)
        baseline.learn(paths["train"])
        rows[name] = {split: baseline.measure(paths[split]) for split in ("val", "shifted")}
    named = {name: {f"{split} mean IoU": float(np.mean(row[split])) for split in row} for name, row in rows.items()}
    write_baselines(options.folder, named)
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{'IoU, %':<20}{'split':<9}" + "".join(f"{name:>12}" for name in CLASSES) + f"{'mean':>8}")
    for name, row in rows.items():
        for split, values in row.items():
            shown = "".join(f"{each:>12.1f}" for each in values)
            print(f"{name:<20}{split:<9}{shown}{np.mean(values):>8.1f}")


if __name__ == "__main__":
    main()
