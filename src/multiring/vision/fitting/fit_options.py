"""The options of `multiring vision train`, and their values by the amount of data."""

import math
from dataclasses import dataclass
from typing import Any

from multiring._arguments import require_choice, require_number
from multiring.errors import ArgumentError
from multiring.training.options import TrainingOptions, require_types
from multiring.vision.models.architectures import ENCODERS, HEADS
from multiring.vision.models.description import SYMMETRIES
from multiring.vision.models.residual import OUTPUTS

_BASE_RATE = 0.3  # of the learning rate of random weights, for pretrained ones
_PLACES = ("detect", "segment")  # kinds that say where things are
_MOST_SIZE = {"classify": 192, "detect": 320, "segment": 320, "act": 96}  # pixels, chosen by the recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionOptions(TrainingOptions):
    """The additional options of a training on pictures. Defaults of epochs, batch and more depend on the data."""

    kind: str = "classify"  # classify pictures, detect boxes, segment pixels, or act: classify clips of video
    split: str = "split"  # the name of the split in runs/splits
    train: str = "train"  # the part of the split to train on
    val: str = "val"  # the part of the split that chooses the best checkpoint; empty: the last checkpoint is the best
    base: str = ""  # a file of pretrained weights for the network's encoder; empty: random weights
    base_digest: str = ""  # SHA-256 that the file of the option base must have; empty: any
    fixed: int = 0  # of a pretrained encoder's four resolutions, how many keep their weights, the highest ones first
    fixed_norms: bool = False  # the batch norms of a pretrained encoder keep their statistics
    fit_head: bool = False  # before the first epoch, fit the last layer to the pretrained features; for classify
    architecture: str = "resnet"  # resnet, or efficientnet-lite0; by default, that of the option base
    width: int = 32  # channels of the first stage of resnet
    blocks: int = 2  # residual blocks of each of the four stages of resnet
    size: int = 0  # side in pixels of the square that the network sees; 0: by the pictures
    fit: str = ""  # stretch or letterbox: how pictures become squares; empty: by the kind
    head: int = 64  # channels of the part of the network that is the kind's own; classify has none
    frames: int = 8  # frames of a clip that the network sees, for act
    levels: int = 1  # for classify: how many of the lowest resolutions the last layer takes features of
    symmetries: int = 1  # for classify: an answer is the mean over 2 (mirrored), 4 (turned) or 8 (both) pictures
    smoothing: float = 0.05  # the share of a label that is spread over all classes
    mirror: bool = True  # augment by mirroring left and right
    turns: bool = False  # augment by all turns of 90 degrees too: pictures have no upper end
    crop: float = 0.3  # augment by cutting out windows; the largest part of the area that is cut away
    colour: float = 0.2  # augment by changing brightness, contrast and saturation by at most this share
    sync_norm: bool = True  # batch norms over all ranks' samples, so that the result does not depend on their number
    cache_mib: int = 1024  # memory of a rank for decoded pictures

    def __post_init__(self) -> None:
        # super() without arguments does not work in a dataclass with slots before Python 3.14.
        require_types(self, VisionOptions)
        TrainingOptions.__post_init__(self)
        require_choice("kind", self.kind, tuple(HEADS))
        require_choice("architecture", self.architecture, tuple(ENCODERS))
        require_choice("fit", self.fit, ("", "stretch", "letterbox"))
        for name in ("width", "blocks", "head"):
            require_number(name, getattr(self, name), 1)
        for name in ("smoothing", "crop", "colour"):
            require_number(name, getattr(self, name), below=1)
        self._require_fit_for_classify()
        for name in ("base_digest", "fixed", "fixed_norms", "fit_head"):
            if getattr(self, name) and not self.base:
                raise ArgumentError(f"{name}={getattr(self, name)!r}, but no base: want the file by the option base")
        if self.val == self.train:
            raise ArgumentError(
                f"val={self.val!r} is the part to train on: want another part of the split, or an empty value"
            )
        require_number("cache_mib", self.cache_mib)
        require_number("frames", self.frames, 2)
        require_number("fixed", self.fixed)
        if self.size and (self.size % 32 or not 32 <= self.size <= 2048):
            raise ArgumentError(f"size={self.size}: want 0, or a multiple of 32 from 32 to 2048 pixels")

    def _require_fit_for_classify(self) -> None:
        """Raise ArgumentError if an option that only classifiers have is wrong, or is given for another kind."""
        for name, choices in (("symmetries", SYMMETRIES), ("levels", tuple(range(1, OUTPUTS + 1)))):
            if getattr(self, name) not in choices:
                raise ArgumentError(f"{name}={getattr(self, name)!r}: want {', '.join(map(str, choices))}")
        given = {"symmetries": self.symmetries > 1, "levels": self.levels > 1, "fit_head": self.fit_head}
        for name, is_given in given.items():
            if is_given and self.kind != "classify":
                raise ArgumentError(f"{name}={getattr(self, name)!r} for the kind {self.kind!r}: want classify")

    def _fewest_epochs(self) -> int:
        return 0 if self.fit_head else 1


def _epochs_by_size(kind: str, samples: int, *, has_base: bool) -> int:
    """Return the recipe's passes over all samples; pretrained weights need fewer."""
    if not has_base:
        return min(200, max(8, round(1800 / math.sqrt(samples))))
    return max(4, round(200 / math.sqrt(samples))) * (2 if kind in _PLACES else 1)


def recipe_by_size(  # noqa: PLR0913 -- all given by name
    kind: str,
    samples: int,
    longer_side: int,
    *,
    batch: int = 0,
    epochs: int = 0,
    ranks: int = 1,
    has_base: bool = False,
) -> dict[str, Any]:
    """Return the options that depend on the amount of data; a user's own values override them.

    Few pictures are seen more often, in smaller batches. The number of steps grows with the square root of the number
    of pictures. Whether a larger batch would pay is in the report, by the noise scale that the training measures.

    Args:
        kind: the kind of model.
        samples: the number of training samples.
        longer_side: the median of the pictures' longer sides in pixels.
        batch: the samples of a step; 0: by the number of samples, and at least one for each rank.
        epochs: passes over all samples; 0: by the number of samples.
        ranks: the number of ranks.
        has_base: the encoder begins with pretrained weights.
    """
    batch = batch or min(samples, max(ranks, 8 if samples < 64 else 16 if samples < 512 else 32))
    epochs = epochs or _epochs_by_size(kind, samples, has_base=has_base)
    steps = max(1, samples // batch) * epochs
    # What says where things are is new beside pretrained weights, and learns at the rate of a new network.
    is_mostly_new = has_base and kind in _PLACES
    return {
        "kind": kind,
        "fit": "letterbox" if kind in _PLACES else "stretch",
        # A motion to the left and one to the right are two actions.
        "mirror": kind != "act",
        "optimizer": "adamw",
        "batch": batch,
        "epochs": epochs,
        "rate": 1e-3 * math.sqrt(batch / 32) * (_BASE_RATE if has_base and not is_mostly_new else 1.0),
        "weight_decay": 0.05,
        "warmup": epochs / 10 if is_mostly_new else max(1.0, epochs / 20),
        "ema": min(0.999, max(0.5, 1 - 20 / steps)),
        "clip": 5.0,
        "evaluate_every": max(1.0, epochs / 20),
        "size": min(_MOST_SIZE[kind], max(32, 32 * math.ceil(longer_side / 32))),
        "log_every": max(1, min(10, steps // 20)),
        "peak": False,
        **({"fixed": 1, "fixed_norms": True} if is_mostly_new else {}),
    }
