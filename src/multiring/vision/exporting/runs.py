"""Export the model of a run as model.onnx, if its answers are the trained model's."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from multiring.errors import ArgumentError, DataError
from multiring.training.options import read_options
from multiring.training.run_folder import OPTIONS
from multiring.vision.checks.split_files import ProjectSplit, read_split
from multiring.vision.exporting.exported_files import (
    ExportedModel,
    description_of,
    digest_of,
    require_export_place,
    write_exported,
)
from multiring.vision.exporting.graphs import exported_graph
from multiring.vision.exporting.parity import MOST_POINTS, AnswerComparison
from multiring.vision.exporting.sessions import ExportedSession, graph_tensors
from multiring.vision.fitting.classify_task import ACCURACY
from multiring.vision.fitting.fit_options import VisionOptions
from multiring.vision.fitting.samples import read_sample
from multiring.vision.fitting.targets import LabelledParts, LabelledSample, labelled_parts
from multiring.vision.models.answers import predictions_of
from multiring.vision.models.description import DESCRIPTION, ModelDescription
from multiring.vision.models.vision_model import VisionModel, load_model
from multiring.vision.pictures import Pixels
from multiring.vision.project.folder import VisionProject
from multiring.vision.scoring.answer_metrics import metric_for, one_answer

GRAPH = "model.onnx"
# Which dimensions of the pixels may have any size: all but the colours, and the frames of a clip.
_DYNAMIC = {"classify": (0, 1, 2), "detect": (0, 1, 2), "segment": (0, 1, 2), "act": (0, 2, 3)}
_BATCH = 8  # pictures of one size that the exported model gets at a time
_ALONE = 4  # pictures that the exported model gets one by one
_WAITING_PIXELS = 1 << 24
_NEAR_TIES = 2  # pictures whose answer another device may have rounded otherwise
_SIDE = 32  # of the pictures that the graph is traced with

_Waiting = tuple[LabelledSample, Pixels]


def export_run(project: VisionProject, run: str, *, path: Path | None = None, part: str = "val") -> ExportedModel:
    """Write the model of a run as an ONNX file with its preprocessing inside.

    The graph takes uint8 pixels of any number of pictures of one size, or of clips with the model's number of frames.
    Each picture or clip of a part of the split that has labels for the model's kind is read, and the file's answer is
    compared with the trained model's and with the labels.
    The figures state whether the labels are those of the training. If they are, the accuracy must be that of the
    training too, so that a description that was changed since is refused.

    Args:
        project: the project with the labels.
        run: the name of the run in the project's folder runs.
        path: the file to write. Default: model.onnx in the run's folder. Beside it, a JSON file is written.
        part: the part of the split to compare on.

    Raises:
        DataError: the run has no model, the split has no such part or is not the one that the model was trained with,
            a picture cannot be read or was changed, or answers differ or are not finite. Nothing was written; an
            earlier file is as it was.
        ArgumentError: a file that is no export is at `path`, or its folder does not exist.
    """
    folder = project.runs / run
    model = load_model(folder)
    description = model.description
    place = path or folder / GRAPH
    require_export_place(place)
    data = _labelled(project, description, part)
    graph = exported_graph(
        model, {"pixels": _sample(description)}, {"pixels": _DYNAMIC[description.kind]}, _output_names(model)
    )
    inputs, outputs = graph_tensors(graph)
    made = ExportedModel(
        kind=description.kind,
        digest=digest_of(graph),
        inputs=inputs,
        outputs=outputs,
        classes=description.classes,
        description=json.loads(description.to_json()),
    )
    comparison = _RunComparison(model, ExportedSession(graph, made))
    _compare_all(comparison, data, data.parts[part])
    figures = comparison.figures()
    told = _of_training(project, folder, description, part, data.split)
    _require_trained_metric(figures, told)
    left_out = dict(sorted(data.left_out.items()))
    parity = {
        "part": part,
        "metric": comparison.of_model.name,
        **figures,
        **told,
        "labels": data.labels_digest,
        "left_out": left_out,
    }
    made = replace(made, parity=parity)
    write_exported(place, graph, made)
    return made


def _labelled(project: VisionProject, description: ModelDescription, part: str) -> LabelledParts:
    """Return the samples to compare on, as a training and a scoring take them."""
    split = read_split(project, description.split)
    if (trained := description.digests.get("split", split.digest)) != split.digest:
        raise DataError(
            f"split {split.name!r} has the digest {split.digest[:16]}, and the model was trained with {trained[:16]}: "
            "want the same split"
        )
    if not split.parts.get(part):
        raise DataError(
            f"split {split.name!r} has no pictures in the part {part!r}, only in {', '.join(split.parts)}: the "
            "exported model is compared on one of them"
        )
    data = labelled_parts(project, split, description.kind, [part])
    if unknown := sorted(set(data.classes) - set(description.classes)):
        raise DataError(
            f"class {unknown[0]!r} is in part {part!r}, but the model was not trained on it: train another model"
        )
    return data


def _of_training(
    project: VisionProject, folder: Path, description: ModelDescription, part: str, split: ProjectSplit
) -> dict[str, Any]:
    """Return whether the labels are those of the training (None: not known), and its accuracy on this part, if any."""
    told: dict[str, Any] = {"labels_as_trained": None}
    try:
        options = read_options(folder / OPTIONS, VisionOptions) if (folder / OPTIONS).exists() else {}
    except (ArgumentError, ValueError, OSError):
        return told
    train, val = (str(options.get(name, default)) for name, default in (("train", "train"), ("val", "val")))
    if "labels" in description.digests:
        try:
            found = labelled_parts(project, split, description.kind, [each for each in (train, val) if each])
            told["labels_as_trained"] = found.labels_digest == description.digests["labels"]
        except DataError:
            return told  # pictures of the training may be elsewhere
    # The scores of the other kinds are no share of right pictures.
    if description.kind == "classify" and part == val and ACCURACY in description.scores:
        told["metric_of_training"] = float(description.scores[ACCURACY])
    return told


def _require_trained_metric(figures: Mapping[str, float], told: Mapping[str, Any]) -> None:
    """Raise DataError if a model is not as good on the same labels as it was at the end of its training."""
    if not told["labels_as_trained"] or "metric_of_training" not in told:
        return
    found, trained = figures["metric_of_model"], told["metric_of_training"]
    # The training may have run on a device that rounds otherwise, which decides near ties.
    most = max(MOST_POINTS, 100.0 * _NEAR_TIES / figures["pictures"])
    if not abs(found - trained) <= most:
        raise DataError(
            f"the run's model has an accuracy of {found:.2f} % on the labels with which it had {trained:.2f} % at the "
            f"end of its training: want at most {most:.2g} points between them; {DESCRIPTION} was changed since, so "
            "put the right one back or train again; no file was written"
        )


class _RunComparison:
    """Compares a trained model with its exported file, and has the metric of each."""

    def __init__(self, model: VisionModel, session: ExportedSession) -> None:
        self._model, self._session = model, session
        self._described = description_of(session.model, "the exported model")
        self._answers = AnswerComparison()
        self.of_model, self._of_export = metric_for(model.description), metric_for(model.description)

    def figures(self) -> dict[str, float]:
        """Return the figures for the JSON file, or raise a DataError as `AnswerComparison.figures` does."""
        return self._answers.figures(self.of_model.value(), self._of_export.value())

    def read(self, folder: Path, sample: LabelledSample) -> Pixels:
        """Read a picture, or the frames of a clip that the model takes."""
        return read_sample(folder, sample, self._described.frames)

    def add(self, same: Sequence[_Waiting]) -> None:
        """Add pictures of one size. The trained model gets each alone, the exported one gets them together."""
        arrays = self._session.run({"pixels": np.stack([pixels for _, pixels in same])})
        for number, ((sample, pixels), found) in enumerate(
            zip(same, predictions_of(self._described, arrays), strict=True)
        ):
            with torch.no_grad():
                answers = {name: each.numpy() for name, each in self._model(torch.from_numpy(pixels[None])).items()}
            [expected] = predictions_of(self._model.description, answers)
            if "probabilities" in answers:
                difference = float(np.abs(answers["probabilities"][0] - arrays["probabilities"][number]).max())
                self._answers.largest_difference = max(self._answers.largest_difference, difference)
            self.of_model.add(sample, answers)
            self._of_export.add(sample, one_answer(arrays, number))
            self._answers.add(sample.path, expected, found)


def _compare_all(comparison: _RunComparison, data: LabelledParts, samples: Sequence[LabelledSample]) -> None:
    """Compare the answers for all pictures.

    The exported model gets the first ones alone, and then pictures of one size together, as a server does.
    """
    waiting: dict[tuple[int, ...], list[_Waiting]] = {}
    for number, sample in enumerate(samples):
        pixels = comparison.read(data.folder, sample)
        if number < _ALONE:
            comparison.add([(sample, pixels)])
            continue
        same = waiting.setdefault(pixels.shape, [])
        same.append((sample, pixels))
        if len(same) == _BATCH:
            comparison.add(waiting.pop(pixels.shape))
        while sum(map(_size, waiting.values())) > _WAITING_PIXELS:
            comparison.add(waiting.pop(max(waiting, key=lambda shape: _size(waiting[shape]))))
    for same in waiting.values():
        comparison.add(same)


def _size(same: Sequence[_Waiting]) -> int:
    """Return how many pixels wait in a list of pictures of one size."""
    return sum(pixels.size // 3 for _, pixels in same)


def _sample(description: ModelDescription) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    frames = (description.frames,) if description.kind == "act" else ()
    return torch.randint(0, 256, (2, *frames, _SIDE, _SIDE + 8, 3), generator=generator).to(torch.uint8)


def _output_names(model: VisionModel) -> list[str]:
    with torch.no_grad():
        found: dict[str, Any] = model(_sample(model.description))
    return list(found)
