"""Export the model of a run as model.onnx, if its answers are the trained model's."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from multiring.errors import DataError, UnsupportedError
from multiring.vision.checks.split_files import read_split
from multiring.vision.exporting.exported_files import (
    ExportedModel,
    description_of,
    digest_of,
    require_export_place,
    write_exported,
)
from multiring.vision.exporting.graphs import exported_graph
from multiring.vision.exporting.parity import AnswerComparison
from multiring.vision.exporting.sessions import ExportedSession, graph_tensors
from multiring.vision.labels import Label
from multiring.vision.models.answers import Prediction, predictions_of
from multiring.vision.models.description import ModelDescription
from multiring.vision.models.vision_model import VisionModel, load_model
from multiring.vision.pictures import Pixels, read_picture
from multiring.vision.project.folder import VisionProject

GRAPH = "model.onnx"
_DYNAMIC = {"classify": (0, 1, 2), "detect": (0, 1, 2), "segment": (0, 1, 2)}
_BATCH = 8  # pictures of one size that the exported model gets at a time
_SIDE = 32  # of the pictures that the graph is traced with


def export_run(project: VisionProject, run: str, *, path: Path | None = None, part: str = "val") -> ExportedModel:
    """Write the model of a run as an ONNX file with its preprocessing inside.

    The graph takes uint8 pixels of any number of pictures of one size. Each picture of a part of the split is read,
    and the file's answer is compared with the trained model's and with the labels.

    Args:
        project: the project with the labels.
        run: the name of the run in the project's folder runs.
        path: the file to write. Default: model.onnx in the run's folder. Beside it, a JSON file is written.
        part: the part of the split to compare on.

    Raises:
        DataError: the run has no model, the split has no such part or is not the one that the model was trained with,
            a picture cannot be read, or answers differ. Nothing was written; an earlier file is as it was.
        ArgumentError: a file that is no export is at `path`.
    """
    folder = project.runs / run
    model = load_model(folder)
    description = model.description
    if description.kind not in _DYNAMIC:
        raise UnsupportedError(f"a model of the kind {description.kind!r}: want one of {', '.join(_DYNAMIC)}")
    place = path or folder / GRAPH
    require_export_place(place)
    pictures = _labelled(project, description, part)
    graph = exported_graph(model, {"pixels": _sample()}, {"pixels": _DYNAMIC[description.kind]}, _output_names(model))
    inputs, outputs = graph_tensors(graph)
    made = ExportedModel(
        kind=description.kind,
        digest=digest_of(graph),
        inputs=inputs,
        outputs=outputs,
        classes=description.classes,
        description=json.loads(description.to_json()),
    )
    comparison = _compared(project, model, ExportedSession(graph, made), pictures)
    figures = {"part": part, **comparison.figures(accuracy)}
    made = replace(made, parity=figures)
    write_exported(place, graph, made)
    return made


def accuracy(truths: Sequence[tuple[Label, ...]], answers: Sequence[Prediction]) -> float:
    """Return the share, in percent, of pictures whose classes are those of the labels."""
    right = [
        {each.class_name for each in truth} == {each.class_name for each in answer.labels}
        for truth, answer in zip(truths, answers, strict=True)
    ]
    return 100.0 * sum(right) / len(right)


def _labelled(project: VisionProject, description: ModelDescription, part: str) -> dict[str, tuple[Label, ...]]:
    """Return the labels of the pictures to compare on, by path."""
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
    labellings = project.labellings()
    labels = {path: labellings[path].labels for path in split.parts[part] if path in labellings}
    found = {path: each for path, each in labels.items() if each is not None}
    if missing := sorted(set(split.parts[part]) - set(found)):
        raise DataError(
            f"picture {missing[0]!r} of the part {part!r} is not labelled any more: label it, or split anew"
        )
    return found


def _compared(
    project: VisionProject, model: VisionModel, session: ExportedSession, pictures: Mapping[str, tuple[Label, ...]]
) -> AnswerComparison:
    """Compare the answers for all pictures.

    The trained model gets each picture alone, as it is read. The exported one gets pictures of one size together, as
    a server does.
    """
    comparison = AnswerComparison()
    waiting: dict[tuple[int, ...], list[tuple[str, Pixels]]] = {}
    for path in pictures:
        pixels = read_picture(project.folder / path).pixels
        same = waiting.setdefault(pixels.shape, [])
        same.append((path, pixels))
        if len(same) == _BATCH:
            _compare(comparison, model, session, waiting.pop(pixels.shape), pictures)
    for same in waiting.values():
        _compare(comparison, model, session, same, pictures)
    return comparison


def _compare(
    comparison: AnswerComparison,
    model: VisionModel,
    session: ExportedSession,
    same: Sequence[tuple[str, Pixels]],
    pictures: Mapping[str, tuple[Label, ...]],
) -> None:
    arrays = session.run({"pixels": np.stack([pixels for _, pixels in same])})
    described = description_of(session.model, "the exported model")
    for number, ((path, pixels), found) in enumerate(zip(same, predictions_of(described, arrays), strict=True)):
        with torch.no_grad():
            answers = {name: each.numpy() for name, each in model(torch.from_numpy(pixels[None])).items()}
        [expected] = predictions_of(model.description, answers)
        if "probabilities" in answers:
            difference = float(np.abs(answers["probabilities"][0] - arrays["probabilities"][number]).max())
            comparison.largest_difference = max(comparison.largest_difference, difference)
        comparison.add(path, pictures[path], expected, found)


def _sample() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (2, _SIDE, _SIDE + 8, 3), generator=generator).to(torch.uint8)


def _output_names(model: VisionModel) -> list[str]:
    with torch.no_grad():
        found: dict[str, Any] = model(_sample())
    return list(found)
