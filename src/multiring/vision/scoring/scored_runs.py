"""Score a run's model on a part of its split, each sample once, and keep the scores beside the model."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from multiring._replacing import replace_file
from multiring.errors import ArgumentError, DataError
from multiring.vision.checks.split_files import read_split
from multiring.vision.fitting.detect_task import overlaps
from multiring.vision.fitting.samples import read_sample
from multiring.vision.fitting.segment_task import classes_of_pixels
from multiring.vision.fitting.targets import LabelledParts, LabelledSample, labelled_parts
from multiring.vision.labels import Mask
from multiring.vision.models.answers import predictions_of
from multiring.vision.models.description import ModelDescription
from multiring.vision.models.vision_model import VisionModel, load_model
from multiring.vision.project.folder import VisionProject
from multiring.vision.scoring.answer_metrics import BoxMetric, PixelMetric
from multiring.vision.scoring.figures import by_group, calibration, precision_recall

NOTHING_NAME = "nothing"
_KEY = "multiring_scores"
_IOU = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleScore:
    """The score of one sample.

    Attributes:
        path: the picture, or the first frame of the clip.
        group: its stated group, or "".
        score: 0 to 1. Of classify and act: the probability of the true class. Of detect: the F1 of the boxes above the
            threshold, at an IoU of 0.5. Of segment: the mean IoU of the classes in the picture.
        is_right: the answer is right; of detect and segment: the score is at least 0.5.
        truth: the true classes, in words.
        answer: the model's classes, in words.
    """

    path: str
    group: str
    score: float
    is_right: bool
    truth: str
    answer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunScores:
    """The scores of a model on a part of its split.

    Attributes:
        run: the run's name.
        part: the part of the split.
        kind: the kind of model.
        classes: the names of the rows of `confusion`; "nothing" may be one.
        weights: the digest of the model's weights.
        split: the digest of the split.
        labels: the digest of the labels that were scored.
        figures: scores in percent by name, the most important one first.
        by_class: of each class, scores in percent by name.
        confusion: true classes by answers: samples, or pixels; empty for detect.
        curves: of each class, points (recall, precision).
        calibration: rows (samples, mean confidence, accuracy); empty for detect and segment.
        groups: rows (group, samples, mean score) by stated groups.
        samples: the scores of the samples, in their order.
    """

    run: str
    part: str
    kind: str
    classes: tuple[str, ...]
    weights: str
    split: str
    labels: str
    figures: Mapping[str, float]
    by_class: Mapping[str, Mapping[str, float]]
    confusion: Sequence[Sequence[int]]
    curves: Mapping[str, Sequence[tuple[float, float]]]
    calibration: Sequence[tuple[int, float, float]]
    groups: Sequence[tuple[str, int, float]]
    samples: Sequence[SampleScore]


def score_run(folder: Path | str, run: str, part: str = "val") -> RunScores:
    """Score a run's model on a part of the split that it was trained with, and write runs/RUN/eval-PART.json.

    Every sample of the part counts once. Pictures are not resized beforehand: the model gets them as they are.

    Args:
        folder: the project's folder.
        run: the run's name in the folder runs.
        part: the part of the split.

    Raises:
        DataError: the run has no model, its split was replaced, or the part has no samples or classes that the model
            does not know.
    """
    folder = Path(folder)
    place = folder / "runs" / run
    model = load_model(place)
    data = samples_of(folder, model.description, part)
    scored = _SCORERS[model.description.kind](model, data, data.parts[part])
    described = model.description
    found = RunScores(
        run=run,
        part=part,
        kind=described.kind,
        weights=described.digests["weights"],
        split=data.split.digest,
        labels=data.labels_digest,
        groups=by_group([each.group for each in scored["samples"]], [each.score for each in scored["samples"]]),
        **scored,
    )
    text = json.dumps({_KEY: 1, **asdict(found)}, ensure_ascii=False) + "\n"
    path = place / f"eval-{part}.json"
    replace_file(path, text.encode(), is_ours=lambda data: f'"{_KEY}"'.encode() in data[:100], what="a file of scores")
    return found


def samples_of(folder: Path, described: ModelDescription, part: str) -> LabelledParts:
    """Return the samples of a part of the split that a model was trained with.

    Raises:
        DataError: as of `score_run`.
    """
    with VisionProject.open(folder) as project:
        split = read_split(project, described.split)
        if split.digest != described.digests.get("split"):
            raise DataError(
                f"split {described.split!r} is not the one that the model was trained with: its digest differs. Scores "
                "on it could be of pictures that the model was trained on"
            )
        data = labelled_parts(project, split, described.kind, [part])
    if unknown := sorted(set(data.classes) - set(described.classes)):
        raise DataError(
            f"class {unknown[0]!r} is in part {part!r}, but the model was not trained on it: train another model"
        )
    return data


def answers_for(model: VisionModel, folder: Path, sample: LabelledSample) -> dict[str, Any]:
    """Return a model's answers for one sample, as arrays with a first axis of 1."""
    pixels = torch.from_numpy(read_sample(folder, sample, model.description.frames))[None]
    with torch.no_grad():
        return {name: each.numpy() for name, each in model(pixels).items()}


def _score_classes(model: VisionModel, data: LabelledParts, samples: Sequence[LabelledSample]) -> dict[str, Any]:
    described = model.description
    has_nothing = described.has_nothing or data.has_nothing or described.threshold > 0
    names = (*described.classes, *[NOTHING_NAME] * has_nothing)
    probabilities, truths, guesses = [], [], []
    for sample in samples:
        answers = answers_for(model, data.folder, sample)
        row = answers["probabilities"][0].astype(np.float64)
        probabilities.append([*row, *[max(0.0, 1 - row.sum())] * has_nothing])
        [prediction] = predictions_of(described, answers)
        truths.append(described.classes.index(sample.class_name) if sample.labels else len(described.classes))
        guesses.append(
            described.classes.index(prediction.labels[0].class_name) if prediction.labels else len(described.classes)
        )
    sure, truth, guess = np.array(probabilities), np.array(truths), np.array(guesses)
    confusion = np.zeros((len(names), len(names)), np.int64)
    np.add.at(confusion, (truth, guess), 1)
    is_right = truth == guess
    totals, right = confusion.sum(1), confusion.diagonal()
    curves, by_class = {}, {}
    for number, name in enumerate(names):
        if not totals[number]:
            continue
        recall, precision, average = precision_recall(sure[:, number], truth == number)
        curves[name] = list(zip(recall.tolist(), precision.tolist(), strict=True))
        by_class[name] = {
            "recall": 100 * right[number] / totals[number],
            "precision": 100 * right[number] / max(1, confusion[:, number].sum()),
            "average precision": 100 * average,
        }
    calibrated = calibration(sure[np.arange(len(guess)), guess], is_right)
    figures = {
        "accuracy": 100 * is_right.mean(),
        "balanced accuracy": np.mean([each["recall"] for each in by_class.values()]),
        "mean average precision": np.mean([each["average precision"] for each in by_class.values()]),
        "calibration error": 100 * calibrated.error,
    }
    return {
        "classes": names,
        "figures": _plain(figures),
        "by_class": {name: _plain(each) for name, each in by_class.items()},
        "confusion": confusion.tolist(),
        "curves": curves,
        "calibration": calibrated.rows,
        "samples": tuple(
            SampleScore(
                path=sample.path,
                group=sample.group,
                score=float(row[true]),
                is_right=bool(true == one),
                truth=names[true],
                answer=f"{names[one]} {row[one]:.2f}",
            )
            for sample, row, true, one in zip(samples, sure, truth, guess, strict=True)
        ),
    }


def _score_boxes(model: VisionModel, data: LabelledParts, samples: Sequence[LabelledSample]) -> dict[str, Any]:
    described = model.description
    metric = BoxMetric(described)
    scored = []
    for sample in samples:
        answers = answers_for(model, data.folder, sample)
        metric.add(sample, answers)
        scored.append(_boxes_of_sample(sample, predictions_of(described, answers)[0].labels))
    figures, by_class, curves = metric.figures()
    return {
        "classes": described.classes,
        "figures": figures,
        "by_class": by_class,
        "confusion": (),
        "curves": curves,
        "calibration": (),
        "samples": tuple(scored),
    }


def _boxes_of_sample(sample: LabelledSample, labels: Sequence[Any]) -> SampleScore:
    """Return the F1 of a picture's boxes; 1 if nothing is in it and nothing was found."""
    true = [each for each in sample.labels if not (isinstance(each, Mask) and each.is_crowd)]
    right = 0
    for name in {each.class_name for each in true}:
        one, other = (
            np.array([each.bounds() for each in some if each.class_name == name], np.float64).reshape(-1, 4)
            for some in (labels, true)
        )
        matrix = overlaps(one, other)
        for row in matrix:
            if len(row) and row.max() >= _IOU:
                right += 1
                matrix[:, int(row.argmax())] = 0
    score = 2 * right / (len(true) + len(labels)) if true or labels else 1.0
    return SampleScore(
        path=sample.path,
        group=sample.group,
        score=score,
        is_right=score >= 0.5,
        truth=_counted(true),
        answer=_counted(labels),
    )


def _score_pixels(model: VisionModel, data: LabelledParts, samples: Sequence[LabelledSample]) -> dict[str, Any]:
    described = model.description
    metric = PixelMetric(described)
    scored = []
    for sample in samples:
        answers = answers_for(model, data.folder, sample)
        own = metric.add(sample, answers)
        truth = classes_of_pixels(sample.labels, described.classes, sample.width, sample.height)
        either = own.sum(0) + own.sum(1) - own.diagonal()
        score = float((own.diagonal()[either > 0] / either[either > 0]).mean()) if own.any() else 1.0
        names = (NOTHING_NAME, *described.classes)
        shown = [
            ", ".join(names[n] for n in np.unique(each) if 0 < n < len(names)) or NOTHING_NAME
            for each in (truth, answers["classes"][0])
        ]
        scored.append(
            SampleScore(
                path=sample.path,
                group=sample.group,
                score=score,
                is_right=score >= 0.5,
                truth=shown[0],
                answer=shown[1],
            )
        )
    found, confusion = metric.by_name(), metric.confusion
    figures = {metric.name: found.pop(metric.name), "pixels right": 100 * float(confusion.trace() / confusion.sum())}
    return {
        "classes": (NOTHING_NAME, *described.classes),
        "figures": figures,
        "by_class": {name.removeprefix("class "): {"IoU": value} for name, value in found.items()},
        "confusion": confusion.tolist(),
        "curves": {},
        "calibration": (),
        "samples": tuple(scored),
    }


def require_comparable(one: RunScores, other: RunScores) -> None:
    """Raise ArgumentError unless two runs were scored on the same samples and labels."""
    for what, first, second in (
        ("kind", one.kind, other.kind),
        ("part", one.part, other.part),
        ("labels", one.labels, other.labels),
    ):
        if first != second:
            raise ArgumentError(
                f"runs {one.run!r} and {other.run!r} cannot be compared: their {what} differ ({first[:16]} and "
                f"{second[:16]}). Want two runs of one split"
            )


def _plain(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def _counted(labels: Sequence[Any]) -> str:
    names = [each.class_name for each in labels]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(sorted(names))) or NOTHING_NAME


_SCORERS = {"classify": _score_classes, "act": _score_classes, "detect": _score_boxes, "segment": _score_pixels}
