"""Labelled pictures as a data set for `multiring.data.Loader`."""

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.data.dataset import generator_for
from multiring.data.orders import ExactOrder, Order, SequentialOrder, digest_of_order
from multiring.errors import DataError
from multiring.vision.fitting.augmentation import AugmentationPolicy, draw_change
from multiring.vision.fitting.targets import LabelledSample
from multiring.vision.models.preprocessing import prepare_picture
from multiring.vision.pictures import decode_picture

Pixels = NDArray[np.uint8]


class FullBatchOrder:
    """A new order for each epoch, without the samples that would not fill the last batch.

    So all batches have the same size. Batch norms over ranks need it: in a smaller batch, a rank could be without a
    sample, and the others would wait for its statistics for ever. Each epoch leaves out other samples.

    Args:
        samples: the number of samples.
        batch: samples of a batch, of all ranks.
        seed: the seed of the orders.
    """

    def __init__(self, samples: int, batch: int, seed: int) -> None:
        self._all = ExactOrder(samples, seed)
        self.length = samples // batch * batch
        self.digest = digest_of_order("full batches", self._all.digest, batch)

    def samples(self, epoch: int, places: Any) -> Any:
        """Return the samples at `places` of an epoch."""
        return self._all.samples(epoch, places)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOptions:
    """How pictures become samples.

    Attributes:
        size: the side of the squares.
        fit: how pictures become squares: "stretch" or "letterbox".
        seed: the seed of the order and of the augmentation.
        batch: samples of a batch for training; 0 keeps the order of the samples, for scoring.
        policy: how pictures change in training; None leaves them as they are.
        cache_bytes: the largest size of the squares that are kept in memory.
    """

    size: int
    fit: str
    seed: int = 0
    batch: int = 0
    policy: AugmentationPolicy | None = None
    cache_bytes: int = 0


class PictureSamples:
    """Pictures as squares, with targets, for a loader.

    Args:
        folder: the project's folder.
        samples: the pictures.
        targets: returns the other fields of a sample, by the labelled sample.
        options: how pictures become samples.

    Raises:
        ArgumentError: there are fewer samples than a batch has.
    """

    def __init__(
        self,
        folder: Path,
        samples: Sequence[LabelledSample],
        targets: Callable[[LabelledSample], dict[str, Any]],
        options: SampleOptions,
    ) -> None:
        self.seed, self.all = options.seed, tuple(samples)
        self._folder, self._targets, self._options = folder, targets, options
        self.order: Order = (
            FullBatchOrder(len(samples), options.batch, options.seed)
            if options.batch
            else SequentialOrder(len(samples))
        )
        told = [f"{each.path}\n{each.digest}\n{each.labels!r}\n" for each in samples]
        self.digest = hashlib.sha256(f"{options.size} {options.fit}\n{''.join(told)}".encode()).hexdigest()
        self._kept: dict[int, Pixels] = {}
        self._free = options.cache_bytes
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""
        return self.order.length

    def sample(self, number: int, epoch: int = 0, draw: int = 0) -> dict[str, Any]:
        """Return a sample: "pixels", uint8 (size, size, 3), "number" and the targets.

        Raises:
            DataError: the picture cannot be read, or its file changed since the last scan.
        """
        square = self.square(number)
        policy = self._options.policy
        if policy is not None:
            change = draw_change(policy, generator_for(self.seed, epoch, number, draw))
            square = change.pixels(square)
        return {"pixels": square, "number": np.int64(number), **self._targets(self.all[number])}

    def square(self, number: int) -> Pixels:
        """Return a picture as the network sees it, without augmentation."""
        kept = self._kept.get(number)
        if kept is not None:
            return kept
        square = prepare_picture(read_sample(self._folder, self.all[number]), self._options.size, self._options.fit)
        with self._lock:
            if number not in self._kept and square.nbytes <= self._free:
                self._free -= square.nbytes
                self._kept[number] = square
        return square


def read_sample(folder: Path, sample: LabelledSample) -> Pixels:
    """Return a sample's pixels, uint8 (height, width, 3).

    Raises:
        DataError: the picture cannot be read, or its file changed since the last scan, so that the labels may be wrong.
    """
    path = folder / sample.path
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"picture {sample.path!r} cannot be read: {error.strerror or error}") from error
    if hashlib.sha256(data).hexdigest() != sample.digest:
        raise DataError(
            f"picture {sample.path!r} was changed since the last scan: run `multiring vision check {folder}`, and see "
            "whether its labels still hold"
        )
    return decode_picture(f"picture {sample.path!r}", data).pixels
