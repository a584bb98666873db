"""Find tropical cyclones and atmospheric rivers in climate fields, pixel by pixel, on any number of ranks.

    python -m examples.climate.generate fields
    multiring run -n 2 -- python -m examples.climate.train --data fields --options examples/climate/small.toml

`data` holds train/ and val/ with HDF5 files in CAM5's layout, and stats.h5 (fields.py describes them).
When SIGTERM interrupts it, it saves and ends; when started again, it resumes.
"""

import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from examples.climate.deeplab import DeepLabV3Plus
from examples.climate.fields import CLASSES, Fields
from examples.climate.tiramisu import Tiramisu
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import multiring.torch as mt
from multiring.training import (
    TrainingOptions,
    TrainingRun,
    TrainingTask,
    jackknife_intervals,
    model_dtype,
    parse_options,
)
from multiring.training.intervals import JACKKNIFE_GROUPS
from multiring.training.run_folder import PICTURES
from multiring.training.task import Batch

SCORES = ("mean IoU", *CLASSES)
MODELS = ("deeplabv3+", "tiramisu")
COLOURS = np.array([[232, 238, 243], [178, 24, 43], [33, 102, 172]], np.uint8)  # one per class, for pictures
HATCH = 4  # pixels between hatching lines, which distinguish rivers from cyclones without colour


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldOptions(TrainingOptions):
    """The additional options of this program."""

    model: str = "deeplabv3+"  # or tiramisu
    width: int = 64  # channels of DeepLab's first stage
    growth: int = 32  # channels that a layer of Tiramisu adds
    sync_norm: bool = False  # batch norms over all ranks' samples
    balance: float = 0.5  # classes weigh 1 / frequency ** balance in the loss; 0: all equal
    pictures: int = 4  # how many pictures of the validation set the report shows


class ClimateFields(TrainingTask):
    """The segmentation task for the training loop."""

    name = "Climate"
    training: Fields
    evaluations: Mapping[str, Fields]

    def __init__(self, options: FieldOptions) -> None:
        self._options = options
        root = Path(options.data)
        statistics = root / "stats.h5"
        self.training = Fields(root / "train", statistics, seed=options.seed, turns=True)
        self.evaluations = {
            split: Fields(root / split, statistics, shuffle=False)
            for split in ("val", "shifted")
            if (root / split).exists()
        }
        for split, fields in self.evaluations.items():
            if fields.shape != self.training.shape:
                raise ValueError(
                    f"{root / split}: fields of shape {fields.shape}, but those for training have {self.training.shape}"
                )
        # 1 / sqrt(frequency), as in the program of Kurth et al. 2018: with 1 / frequency rare classes would dominate.
        # A smaller exponent is better for IoU, where a false storm pixel costs as much as a missed one.
        weights = self.training.frequencies() ** -options.balance
        self._weights = torch.tensor(weights / weights.mean(), dtype=torch.float32)
        self.about = (
            f"{len(self.training.paths)} fields of {self.training.shape[0]} x {self.training.shape[1]} pixels and "
            f"{self.training.shape[2]} channels in {root}. If the fields are generated, the results say nothing "
            "about climate."
        )

    def model(self) -> nn.Module:
        """Return the network."""
        options, channels = self._options, self.training.shape[2]
        if options.model == "deeplabv3+":
            made: nn.Module = DeepLabV3Plus(channels, len(CLASSES), options.width)
        elif options.model == "tiramisu":
            made = Tiramisu(channels, len(CLASSES), options.growth, first=2 * options.growth)
        else:
            raise ValueError(f"model={options.model!r}: want one of {', '.join(MODELS)}")
        if options.sync_norm and not options.plain:
            made = mt.convert_sync_batchnorm(made)
        return made.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return each field's weighted cross-entropy, averaged over its pixels."""
        return self._losses(_logits(model, batch), torch.as_tensor(batch["labels"]))

    def _losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels, self._weights.to(logits), reduction="none").mean((1, 2))

    def measure(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the training loss of each field, and a confusion matrix of the pixels of each group of fields.

        A field's group follows from its name, so that it is the same on any number of ranks.
        """
        labels, logits = torch.as_tensor(batch["labels"]), _logits(model, batch)
        counts = torch.zeros(JACKKNIFE_GROUPS, len(CLASSES) ** 2, dtype=torch.int64)
        for name, truth, guess in zip(batch["name"], labels.cpu(), logits.argmax(1).cpu(), strict=True):
            counts[zlib.crc32(str(name).encode()) % JACKKNIFE_GROUPS] += _confusion(truth, guess).flatten()
        return self._losses(logits, labels), counts.flatten()

    def scores(self, counts: Tensor) -> dict[str, float]:
        """Return the mean IoU, and each class's IoU, in percent."""
        return dict(zip(SCORES, _shares(_groups(counts).sum(0)).tolist(), strict=True))

    def intervals(self, counts: Tensor) -> dict[str, tuple[float, float]]:
        """Return the jackknife's intervals over fields, because pixels of one field are not independent."""
        return dict(zip(SCORES, jackknife_intervals(_groups(counts), _shares), strict=True))

    def chance(self, counts: Tensor) -> dict[str, float]:
        """Return the scores of predicting background everywhere."""
        matrix = _groups(counts).sum(0).reshape(len(CLASSES), -1)
        everywhere = np.zeros_like(matrix)
        everywhere[:, 0] = matrix.sum(1)
        return dict(zip(SCORES, _shares(everywhere.ravel()).tolist(), strict=True))

    def pictures(self, model: nn.Module) -> Iterator[tuple[str, Image.Image]]:
        """Yield pictures of moisture, truth and prediction side by side, for some fields not used in training."""
        fields = next(iter(self.evaluations.values()), None)
        if fields is None:
            return
        model.eval()
        for number in range(min(self._options.pictures, len(fields.paths))):
            sample = fields.sample(number)
            inputs = _input({"fields": sample["fields"][None]}, model_dtype(model))
            with torch.no_grad():
                guess = model(inputs.to(next(model.parameters()).device)).argmax(1)[0].cpu().numpy()
            moisture = sample["fields"][0]
            grey = np.uint8(255 * (moisture - moisture.min()) / max(np.ptp(moisture), 1e-9))
            shown = [np.repeat(grey[..., None], 3, 2), _painted(sample["labels"]), _painted(guess)]
            gap = np.full((len(grey), 4, 3), 255, np.uint8)
            yield (
                f"{sample['name']}: moisture, truth, prediction",
                Image.fromarray(np.hstack([shown[0], gap, shown[1], gap, shown[2]])[::-1]),
            )


def _input(batch: Batch, dtype: torch.dtype) -> Tensor:
    return torch.as_tensor(batch["fields"]).to(dtype).contiguous(memory_format=torch.channels_last)


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(_input(batch, model_dtype(model)))
    return logits if logits.dtype == torch.float64 else logits.float()


def _groups(counts: Tensor) -> NDArray[np.int64]:
    """Return the confusion matrix of each group of fields, flat: (JACKKNIFE_GROUPS, classes * classes)."""
    return counts.numpy().reshape(JACKKNIFE_GROUPS, -1)


def _shares(matrix: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the mean IoU and each class's IoU, in percent, of a flat confusion matrix; an absent class has 0."""
    square = matrix.reshape(len(CLASSES), -1)
    hit = square.diagonal()
    each = 100 * hit / np.maximum(square.sum(0) + square.sum(1) - hit, 1)
    return np.array([each.mean(), *each])


def _confusion(labels: Tensor, guesses: Tensor) -> Tensor:
    """Return a confusion matrix: how many pixels of class i (rows) were taken for class j, int64."""
    count = len(CLASSES)
    return torch.bincount((labels * count + guesses).flatten(), minlength=count**2).reshape(count, count)


def _painted(labels: Any) -> Any:
    """Return labels in colours; rivers are hatched, so that they differ from cyclones in grey, too."""
    painted = COLOURS[labels]
    rows, columns = np.indices(labels.shape)
    painted[(labels == 2) & ((rows + columns) % HATCH == 0)] = 255
    return painted


def main(words: list[str] | None = None) -> None:
    """Train, and write the results for the report."""
    options = parse_options(FieldOptions, words, "Find storms in climate fields.")
    task = ClimateFields(options)
    run = TrainingRun(task, options)
    progress = run.train()
    if run.rank == 0:
        folder = run.folder / PICTURES
        folder.mkdir(exist_ok=True)
        for number, (caption, picture) in enumerate(task.pictures(run.model)):
            picture.save(folder / f"{number}-{caption.replace(' ', '_')}.png")
    classes = [(name, {f"{split}, IoU, %": row[name] for split, row in progress.scores.items()}) for name in CLASSES]
    run.write_report(scores=SCORES[:1], model=options.model, classes=classes)


if __name__ == "__main__":
    main(sys.argv[1:])
