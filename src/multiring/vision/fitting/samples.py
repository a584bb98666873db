"""Labelled pictures as a data set for `multiring.data.Loader`."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring._forks import ForkSafeLock
from multiring.data.orders import ExactOrder, Order, SequentialOrder, digest_of_order
from multiring.data.sample_maker import generator_for
from multiring.errors import DataError
from multiring.vision.fitting.augmentation import UNCHANGED, AugmentationPolicy, PictureChange, draw_change
from multiring.vision.fitting.targets import LabelledSample
from multiring.vision.models.preprocessing import prepare_picture
from multiring.vision.pictures import decode_picture

Pixels = NDArray[np.uint8]


class FullBatchOrder:
    """A new order for each epoch, without the samples that would not fill the last batch.

    So all batches have the same size. Batch norms over ranks need it: in a smaller batch, a rank could be without a
    sample, and the others would wait for its statistics without end. Each epoch leaves out other samples.

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
        frames: of a clip that the network sees, evenly spaced over the clip.
    """

    size: int
    fit: str
    seed: int = 0
    batch: int = 0
    policy: AugmentationPolicy | None = None
    cache_bytes: int = 0
    frames: int = 1


class PictureSamples:
    """Pictures as squares, with targets, for a loader.

    Args:
        folder: the project's folder.
        samples: the pictures.
        targets: returns the other fields of a sample, by the labelled sample and the change of its picture.
        options: how pictures become samples.

    Raises:
        ArgumentError: there are fewer samples than a batch has.
    """

    def __init__(
        self,
        folder: Path,
        samples: Sequence[LabelledSample],
        targets: Callable[[LabelledSample, PictureChange], dict[str, Any]],
        options: SampleOptions,
    ) -> None:
        self.seed, self.all = options.seed, tuple(samples)
        self._folder, self._targets, self._options = folder, targets, options
        self.order: Order = (
            FullBatchOrder(len(samples), options.batch, options.seed)
            if options.batch
            else SequentialOrder(len(samples))
        )
        told = [f"{each.path}\n{each.digest}\n{each.labels!r} {each.frames}\n" for each in samples]
        self.digest = hashlib.sha256(f"{options.size} {options.fit}\n{''.join(told)}".encode()).hexdigest()
        self._kept: dict[str, Pixels] = {}
        self._free = options.cache_bytes
        self._lock = ForkSafeLock()

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""
        return self.order.length

    def sample(self, number: int, epoch: int = 0, draw: int = 0) -> dict[str, Any]:
        """Return a sample: "pixels", uint8 (size, size, 3) or (frames, size, size, 3), "number" and the targets.

        Raises:
            DataError: the picture cannot be read, or its file changed since the last scan.
        """
        policy, change = self._options.policy, UNCHANGED
        if policy is not None:
            change = draw_change(policy, generator_for(self.seed, epoch, number, draw))
        return {
            "pixels": change.pixels(self.squares(number)),
            "number": np.int64(number),
            **self._targets(self.all[number], change),
        }

    def squares(self, number: int) -> Pixels:
        """Return a picture, or a clip's frames, as the network sees them without augmentation."""
        sample = self.all[number]
        if not sample.frames:
            return self._square(sample.path, sample.digest)
        return np.stack([self._square(*each) for each in chosen_frames(sample, self._options.frames)])

    def _square(self, path: str, digest: str) -> Pixels:
        kept = self._kept.get(path)
        if kept is not None:
            return kept
        square = prepare_picture(read_pixels(self._folder, path, digest), self._options.size, self._options.fit)
        with self._lock:
            if path not in self._kept and square.nbytes <= self._free:
                self._free -= square.nbytes  # first: a fork between the two lines keeps less, and never too much
                self._kept[path] = square
        return square


def chosen_frames(sample: LabelledSample, frames: int) -> list[tuple[str, str]]:
    """Return the paths and digests of frames that a network sees of a clip, evenly spaced over it."""
    places = (np.arange(frames) + 0.5) * len(sample.frames) / frames
    return [sample.frames[int(place)] for place in places]


def read_sample(folder: Path, sample: LabelledSample, frames: int) -> Pixels:
    """Return a sample as `VisionModel` takes it: pixels (height, width, 3), or (frames, height, width, 3) of a clip.

    Raises:
        DataError: as of `read_pixels`; or frames of a clip have other sizes.
    """
    if not sample.frames:
        return read_pixels(folder, sample.path, sample.digest)
    found = [read_pixels(folder, *each) for each in chosen_frames(sample, frames)]
    if len({each.shape for each in found}) > 1:
        raise DataError(f"the frames of the clip from {sample.path!r} have several sizes: want one size in a video")
    return np.stack(found)


def read_pixels(folder: Path, name: str, digest: str) -> Pixels:
    """Return a picture's pixels, uint8 (height, width, 3).

    Args:
        folder: the project's folder.
        name: the picture's path in it.
        digest: SHA-256 of the file at the last scan.

    Raises:
        DataError: the picture cannot be read, or its file changed since the last scan, so that the labels may be wrong.
    """
    path = folder / name
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"picture {name!r} cannot be read: {error.strerror or error}") from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise DataError(
            f"picture {name!r} was changed since the last scan: run `multiring vision check {folder}`, and see whether "
            "its labels still hold"
        )
    return decode_picture(f"picture {name!r}", data).pixels
