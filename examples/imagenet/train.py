"""Train a ResNet on images in ImageNet's layout, on any number of ranks.

    python -m examples.imagenet.generate images
    multiring run -n 2 -- python -m examples.imagenet.train --data images --options examples/imagenet/small.toml

`data` holds train/ and val/ with a folder for each class (1,000, 22,000 or any other number), or packs of them
(multiring data pack). When SIGTERM interrupts it, it saves and ends; when started again, it resumes.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from examples.imagenet.images import EvaluationCrop, TrainingCrop, as_input
from examples.imagenet.resnet import LAYERS, ResNet, zero_last_gammas
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from multiring.data import Dataset
from multiring.training import (
    TrainingOptions,
    TrainingRun,
    TrainingTask,
    model_dtype,
    parse_options,
    wilson_interval,
)
from multiring.training.task import Batch

TOP = 5
MOST_CONFUSED = 100  # with more classes, guesses are not counted by class


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageOptions(TrainingOptions):
    """The additional options of this program."""

    model: str = "resnet50"  # resnet26, resnet50 or resnet101
    width: int = 64  # channels of the network's first stage
    size: int = 224  # pixels along a side
    small: bool = False  # use a stem that keeps more of the pixels, for images of at most 64 pixels
    least_area: float = 0.08  # the least share of an image that a training crop covers
    smoothing: float = 0.1  # label smoothing
    skip_bad: bool = False  # leave out and count images that cannot be read; otherwise they are an error


class Images(TrainingTask):
    """The classification task for the training loop."""

    name = "ImageNet"

    def __init__(self, options: ImageOptions) -> None:
        self._options = options
        root = Path(options.data)
        if options.model not in LAYERS:
            raise ValueError(f"model={options.model!r}: want one of {', '.join(LAYERS)}")
        crop = TrainingCrop(size=options.size, least_area=options.least_area)
        self.training = Dataset(str(root / "train"), transform=crop, seed=options.seed)
        middle = EvaluationCrop(size=options.size, share=1.0 if options.small else 0.875)
        self.evaluations: dict[str, Any] = {
            split: Dataset(str(root / split), transform=middle, shuffle="none")
            for split in ("val", "shifted")
            if (root / split).exists()
        }
        self.classes = list(self.training.source.classes)
        for split, samples in self.evaluations.items():
            if list(samples.source.classes) != self.classes:
                raise ValueError(f"{root / split} has other classes than {root / 'train'}")
        self.about = f"{len(self.training)} images of {len(self.classes)} classes in {root}"
        if (root / "classes.txt").exists():
            self.about += ", generated: the results say nothing about photographs"

    def model(self) -> nn.Module:
        """Return the network; each block is initially the identity."""
        options = self._options
        made = ResNet(LAYERS[options.model], len(self.classes), 3, options.width, small=options.small)
        zero_last_gammas(made)
        return made.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return each image's cross-entropy, with smoothed labels."""
        labels = torch.as_tensor(batch["label"])
        return self._losses(self._logits(model, batch), labels)

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        logits: Tensor = model(as_input(batch["image"], model_dtype(model)))
        return logits if logits.dtype == torch.float64 else logits.float()

    def _losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels, reduction="none", label_smoothing=self._options.smoothing)

    def measure(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the training loss of each image, and counts: images, first guesses right, among the first five.

        With few classes, the counts of images by class and guess follow.
        """
        labels = torch.as_tensor(batch["label"])
        logits = self._logits(model, batch)
        losses, best = self._losses(logits, labels), logits.topk(min(TOP, len(self.classes)), 1).indices.cpu()
        labels = labels.cpu()
        hit = best == labels[:, None]
        counts = torch.tensor([len(labels), int(hit[:, 0].sum()), int(hit.any(1).sum())])
        classes = len(self.classes)
        if classes > MOST_CONFUSED:
            return losses, counts
        return losses, torch.cat([counts, torch.bincount(labels * classes + best[:, 0], minlength=classes**2)])

    def scores(self, counts: Tensor) -> dict[str, float]:
        """Return top-1 and top-5 in percent."""
        total, first, among = counts[:3].tolist()
        return {"top-1": 100 * first / total, "top-5": 100 * among / total}

    def intervals(self, counts: Tensor) -> dict[str, tuple[float, float]]:
        """Return Wilson's intervals of top-1 and top-5 over the images."""
        total, first, among = counts[:3].tolist()
        return {"top-1": wilson_interval(first, total), "top-5": wilson_interval(among, total)}

    def chance(self, counts: Tensor) -> dict[str, float]:  # noqa: ARG002 -- the same for all counts
        """Return the scores of guessing at random."""
        classes = len(self.classes)
        return {"top-1": 100 / classes, "top-5": 100 * min(TOP, classes) / classes}

    def confusion(self, counts: Tensor) -> list[list[int]]:
        """Return how many images of each class (rows) were taken for each class; empty if there are too many."""
        found: list[list[int]] = counts[3:].reshape(-1, len(self.classes)).tolist()
        return found


def main(words: list[str] | None = None) -> None:
    """Train, and write the results for the report."""
    options = parse_options(ImageOptions, words, "Train a ResNet on images in ImageNet's layout.")
    task = Images(options)
    run = TrainingRun(task, options)
    progress = run.train()
    confusion = task.confusion(progress.counts["val"]) if "val" in progress.counts else []
    run.write_report(model=options.model, confusion=confusion)


if __name__ == "__main__":
    main(sys.argv[1:])
