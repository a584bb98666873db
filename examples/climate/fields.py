"""Climate fields as samples: HDF5 files in CAM5's layout, with one sample each.

A file has `climate/data` (height, width, channels) and `climate/labels_0` (height, width). The statistics file has
`climate/minval` and `climate/maxval`, (channels,), by which each channel is scaled to -1 ... 1. Missing values become
0, the middle of this range. The layout is that of the published files (Kurth et al. 2018), but only generated files
were tried.
"""

import hashlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from multiring.data.orders import ExactOrder, Order, SequentialOrder
from multiring.data.sample_maker import generator_for
from multiring.errors import DataError

DATA, LABELS, LEAST, MOST = "climate/data", "climate/labels_0", "climate/minval", "climate/maxval"
CLASSES = ("background", "cyclone", "river")


class Fields:
    """The files of a folder, as samples of a loader.

    Args:
        folder: the folder of the files, *.h5.
        statistics: the file with the channels' extremes.
        seed: the seed of the order.
        shuffle: whether the order is random; otherwise files are sorted by name.
        turns: whether each sample is rotated around the globe by a random angle, for training.

    Attributes:
        digest: identifies the data that a loader's state belongs to: names and sizes of files, the shape of fields, the
            channels' extremes, and `turns`. It does not cover the contents of files: reading all files would take as
            long as an epoch.

    Raises:
        DataError: there are no files; or, from `sample`, a file lacks a variable or has another shape than the first.
    """

    def __init__(
        self, folder: Path, statistics: Path, *, seed: int = 0, shuffle: bool = True, turns: bool = False
    ) -> None:
        self.paths = sorted(folder.glob("*.h5"))
        if not self.paths:
            raise DataError(f"{folder}: no *.h5 files of fields")
        self.seed, self._turns = seed, turns
        with _opened(statistics, LEAST, MOST) as file:
            self._least, most = file[LEAST][:].astype(np.float32), file[MOST][:].astype(np.float32)
        self._half = np.maximum((most - self._least) / 2, np.float32(1e-30))
        with _opened(self.paths[0], DATA, LABELS) as file:
            self.shape: tuple[int, int, int] = file[DATA].shape
        if self.shape[2] != len(self._least):
            found = len(self._least)
            raise DataError(f"{statistics}: extremes of {found} channels; {self.paths[0]} has {self.shape[2]}")
        self.order: Order = ExactOrder(len(self.paths), seed) if shuffle else SequentialOrder(len(self.paths))
        named = "\n".join(f"{path.name} {path.stat().st_size}" for path in self.paths)
        told = repr((named, self.shape, turns)).encode() + self._least.tobytes() + most.tobytes()
        self.digest = hashlib.blake2b(told, digest_size=8).hexdigest()

    def sample(self, number: int, epoch: int = 0, draw: int = 0) -> dict[str, Any]:
        """Return {"fields": float32 (channels, height, width), "labels": int64 (height, width), "name": file name}."""
        path = self.paths[number]
        with _opened(path, DATA, LABELS) as file:
            data, labels = file[DATA][:], file[LABELS][:].astype(np.int64)
        if data.shape != self.shape or labels.shape != self.shape[:2]:
            raise DataError(
                f"{path}: fields of shape {data.shape} and labels of {labels.shape}; want {self.shape} and "
                f"{self.shape[:2]}, as {self.paths[0].name} has"
            )
        if labels.min() < 0 or labels.max() >= len(CLASSES):
            raise DataError(f"{path}: labels {labels.min()} to {labels.max()}; want 0 to {len(CLASSES) - 1}")
        scaled = np.nan_to_num((data.astype(np.float32) - self._least) / self._half - 1)
        if self._turns:
            turn = int(generator_for(self.seed, epoch, number, draw).integers(self.shape[1]))
            scaled, labels = np.roll(scaled, turn, 1), np.roll(labels, turn, 1)
        return {"fields": np.ascontiguousarray(scaled.transpose(2, 0, 1)), "labels": labels, "name": path.name}

    def frequencies(self, most: int = 200) -> NDArray[np.float64]:
        """Return each class's share of the pixels in the first files.

        Raises:
            DataError: a class has no pixel.
        """
        counts = np.zeros(len(CLASSES))
        for path in self.paths[:most]:
            with _opened(path, LABELS) as file:
                counts += np.bincount(file[LABELS][:].ravel(), minlength=len(CLASSES))[: len(CLASSES)]
        if not counts.all():
            raise DataError(
                f"{self.paths[0].parent}: class {CLASSES[int(counts.argmin())]!r} has no pixel in the first "
                f"{min(most, len(self.paths))} files; it cannot be weighted or learnt"
            )
        shares: NDArray[np.float64] = counts / counts.sum()
        return shares


def _opened(path: Path, *names: str) -> Any:
    """Open a file, and check that it has the variables `names`."""
    try:
        file = h5py.File(path)
    except OSError as error:
        raise DataError(f"{path}: it cannot be read as HDF5: {error}") from error
    for name in names:
        if name not in file:
            there = ", ".join(
                sorted(f"{group}/{key}" for group in file for key in getattr(file[group], "keys", list)())
            )
            file.close()
            raise DataError(f"{path}: no variable {name}; it has {there or 'none'}")
    return file
