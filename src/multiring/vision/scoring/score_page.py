"""Write the scores of a run as one self-contained HTML page, with pictures."""

import base64
import html
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multiring._replacing import replace_file
from multiring.data.readers.limits import library
from multiring.vision.fitting.samples import read_sample
from multiring.vision.fitting.segment_task import UNKNOWN, classes_of_pixels
from multiring.vision.fitting.targets import LabelledSample
from multiring.vision.labels import Box, Label
from multiring.vision.models.answers import predictions_of
from multiring.vision.models.detector import CentrePointDetector
from multiring.vision.models.preprocessing import normalise, resize_pictures
from multiring.vision.models.residual import PictureClassifier
from multiring.vision.models.vision_model import VisionModel, load_model
from multiring.vision.scoring.figures import sign_test
from multiring.vision.scoring.scored_runs import RunScores, answers_for, require_comparable, samples_of

_HEAD = "<!doctype html><html lang=en><head><meta charset=utf-8><meta name=generator content='multiring vision eval'>"
_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem 1rem 4rem; font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .4rem; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .15rem .8rem .15rem 0; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.pictures, .curves { display: flex; flex-wrap: wrap; gap: .8rem; } figure { margin: 0; max-width: 15rem; }
figcaption { font-size: .75rem; overflow-wrap: anywhere; } img { max-width: 100%; display: block; }
svg { width: 13rem; height: 13rem; } .wide { overflow-x: auto; }
"""
WORST = 12  # samples with pictures
_SIDE = 224  # pixels of a picture's longer side
_MOST_CLASSES = 40  # in the table of confusion
_TRUE, _FOUND = (0, 158, 115), (213, 94, 0)  # colours that colour-blind people tell apart; found boxes are dashed too


def write_score_page(folder: Path | str, scores: RunScores, other: RunScores | None = None) -> Path:
    """Write runs/RUN/eval-PART.html, and return its path.

    Args:
        folder: the project's folder.
        scores: of the run.
        other: scores of another run on the same samples, to compare with.

    Raises:
        ArgumentError: the other run was scored on other samples or labels.
        DataError: a picture cannot be read.
    """
    folder = Path(folder)
    if other is not None:
        require_comparable(scores, other)
    path = folder / "runs" / scores.run / f"eval-{scores.part}.html"
    page = "".join(_page(folder, scores, other)).encode()
    replace_file(path, page, is_ours=lambda found: found.startswith(_HEAD.encode()), what="a page of scores")
    return path


def _page(folder: Path, scores: RunScores, other: RunScores | None) -> Iterator[str]:
    title = html.escape(f"{scores.run}: scores of part {scores.part}")
    yield f"{_HEAD}<meta name=viewport content='width=device-width'><title>{title}</title><style>{_STYLE}</style>"
    yield f"</head><body><h1>{title}</h1>"
    what = "clips" if scores.kind == "act" else "pictures"
    yield f"<p>{len(scores.samples)} {what}, each scored once. Scores are in percent.</p>"
    yield _figures(scores, other)
    if scores.by_class:
        names = list(next(iter(scores.by_class.values())))
        rows = [(name, *(each[key] for key in names)) for name, each in scores.by_class.items()]
        yield "<h2>By class</h2>" + _table(["class", *names], rows)
    if scores.confusion:
        unit = "pixels" if scores.kind == "segment" else what
        yield f"<h2>Confusion</h2><p>True classes in rows, answers in columns: {unit}.</p>{_confusion(scores)}"
    if scores.curves:
        yield "<h2>Precision over recall</h2><div class=curves>"
        for name, points in list(scores.curves.items())[:_MOST_CLASSES]:
            yield f"<figure>{_curve(points)}<figcaption>{html.escape(name)}</figcaption></figure>"
        yield "</div>"
    if scores.calibration:
        rows = [(count, 100 * sure, 100 * right) for count, sure, right in scores.calibration]
        yield "<h2>Calibration</h2>" + _table([what, "mean confidence", "accuracy"], rows)
    if scores.groups:
        yield "<h2>By group</h2><p>The lowest first; the mean score of a sample.</p>"
        yield _table(["group", what, "score"], [(name, count, 100 * mean) for name, count, mean in scores.groups])
    yield from _worst(folder, scores)
    yield "</body></html>\n"


def _figures(scores: RunScores, other: RunScores | None) -> str:
    if other is None:
        return _table(["", "%"], list(scores.figures.items()))
    rows = [
        (name, value, other.figures[name], value - other.figures[name])
        for name, value in scores.figures.items()
        if name in other.figures
    ]
    pairs = list(zip(scores.samples, other.samples, strict=True))
    better = sum(one.is_right and not two.is_right for one, two in pairs)
    worse = sum(two.is_right and not one.is_right for one, two in pairs)
    text = (
        f"Only {html.escape(scores.run)} is right on {better} samples, only {html.escape(other.run)} on {worse}. If "
        f"both were equally good, a difference as large would have a probability of {sign_test(better, worse):.2g}."
    )
    return _table(["", scores.run, other.run, "difference"], rows) + f"<p>{text}</p>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th>{html.escape(each)}</th>" for each in heads)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<div class=wide><table><tr>{head}</tr>{body}</table></div>"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"<td class=number>{value:.2f}</td>"
    return f"<td class=number>{value}</td>" if isinstance(value, int) else f"<td>{html.escape(str(value))}</td>"


def _confusion(scores: RunScores) -> str:
    names = scores.classes
    if len(names) <= _MOST_CLASSES:
        return _table(["", *names], [(name, *row) for name, row in zip(names, scores.confusion, strict=True)])
    wrong = [
        (names[row], names[column], count)
        for row, counts in enumerate(scores.confusion)
        for column, count in enumerate(counts)
        if row != column and count
    ]
    wrong.sort(key=lambda each: (-each[2], each[:2]))
    return _table(["true", "answer", "number"], wrong[:_MOST_CLASSES])


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """Return a curve of precision over recall as SVG."""
    shown = " ".join(f"{10 + 100 * recall:.1f},{110 - 100 * precision:.1f}" for recall, precision in points)
    return (
        "<svg viewBox='0 0 120 120' role=img aria-label='precision over recall'>"
        "<rect x=10 y=10 width=100 height=100 fill=none stroke=currentColor stroke-opacity=.3 />"
        f"<polyline points='{shown}' fill=none stroke=currentColor stroke-width=1.5 />"
        "<text x=60 y=119 font-size=7 text-anchor=middle fill=currentColor>recall</text>"
        "<text x=3 y=60 font-size=7 text-anchor=middle fill=currentColor transform='rotate(-90 6 60)'>precision</text>"
        "</svg>"
    )


def _worst(folder: Path, scores: RunScores) -> Iterator[str]:
    model = load_model(folder / "runs" / scores.run)
    samples = {each.path: each for each in samples_of(folder, model.description, scores.part).parts[scores.part]}
    order = sorted(scores.samples, key=lambda each: (each.score, each.path))[:WORST]
    notes = {
        "classify": "The lowest probability of the true class first. Bright places speak for the answer.",
        "act": "The lowest probability of the true class first; frames of the clip.",
        "detect": "The lowest F1 first. Green: true boxes. Orange, dashed: answers. Bright places: centres.",
        "segment": "The lowest mean IoU first. Left: true classes. Right: answers.",
    }
    yield f"<h2>Worst samples</h2><p>{notes[model.description.kind]}</p><div class=pictures>"
    for each in order:
        caption = f"{each.path}: {each.truth}; answer: {each.answer}; score {100 * each.score:.0f}"
        picture = _shown(model, folder, samples[each.path])
        yield f"<figure>{_image(picture)}<figcaption>{html.escape(caption)}</figcaption></figure>"
    yield "</div>"


def _image(pixels: Any) -> str:
    image = library("PIL.Image", "vision").fromarray(pixels)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80)
    return f"<img alt='' src='data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}'>"


def _shown(model: VisionModel, folder: Path, sample: LabelledSample) -> Any:
    """Return a picture of a sample with the truth and the answer, uint8 (height, width, 3)."""
    kind = model.description.kind
    pixels = read_sample(folder, sample, model.description.frames)
    if kind == "act":
        return np.concatenate([_small(each, _SIDE // 2) for each in pixels[:: max(1, len(pixels) // 4)]], axis=1)
    small = _small(pixels, _SIDE)
    if kind == "segment":
        answers = answers_for(model, folder, sample)
        labels = predictions_of(model.description, answers)[0].labels
        both = [_painted(model, pixels, some) for some in (sample.labels, labels)]
        return np.concatenate([_small(each, _SIDE) for each in both], axis=1)
    heat = heat_map(model, pixels)
    if heat is not None:
        bright = library("PIL.Image", "vision").fromarray(np.uint8(255 * heat)).resize((small.shape[1], small.shape[0]))
        share = np.asarray(bright, np.float32)[..., None] / 255
        small = np.uint8(small * (0.45 + 0.55 * share))
    if kind == "detect":
        labels = predictions_of(model.description, answers_for(model, folder, sample))[0].labels
        small = _boxed(small, pixels.shape[1], sample.labels, labels)
    return small


def heat_map(model: VisionModel, pixels: Any) -> Any:
    """Return where a picture speaks for the model's answer, float32 (height, width) of the picture's shape, 0 to 1.

    Of a classifier, it is the class activation map (Zhou et al., CVPR 2016, arXiv:1512.04150) of the likeliest class;
    of a detector, the highest score of a centre. Other models have none: None.

    Args:
        model: the model.
        pixels: uint8 (height, width, 3).
    """
    described, network = model.description, model.network
    with torch.no_grad():
        square = resize_pictures(torch.from_numpy(np.ascontiguousarray(pixels))[None], described.size, described.fit)
        inputs = normalise(square, model.mean, model.std)
        if isinstance(network, PictureClassifier):
            features: Tensor = network.encoder(inputs)[-1]
            best = model.outputs(square).argmax(1)[0]
            weights = network.head.weight[best, : features.shape[1]]  # of the means of these features
            heat = (features[0] * weights[:, None, None]).sum(0)
            heat = (heat - heat.min()) / (heat.max() - heat.min()).clamp(min=1e-6)
        elif isinstance(network, CentrePointDetector):
            heat = network(inputs)[0, : len(described.classes)].sigmoid().amax(0)
        else:
            return None
    found = heat.numpy()
    if described.fit == "letterbox":
        height, width = pixels.shape[:2]
        rows, columns = (max(1, round(len(found) * each / max(height, width))) for each in (height, width))
        found = found[:rows, :columns]
    image_library = library("PIL.Image", "vision")
    image = image_library.fromarray(found).resize((pixels.shape[1], pixels.shape[0]), image_library.Resampling.BILINEAR)
    return np.asarray(image).clip(0, 1)


def _small(pixels: Any, side: int) -> Any:
    image = library("PIL.Image", "vision").fromarray(pixels)
    image.thumbnail((side, side))
    return np.asarray(image)


def _boxed(small: Any, width: int, truth: Sequence[Label], found: Sequence[Label]) -> Any:
    image = library("PIL.Image", "vision").fromarray(small)
    draw = library("PIL.ImageDraw", "vision").Draw(image)
    scale = small.shape[1] / width
    for labels, colour, is_dashed in ((truth, _TRUE, False), (found, _FOUND, True)):
        for bounds in (each.bounds() for each in labels):
            if bounds is None:
                continue
            left, top, right, bottom = (each * scale for each in bounds)
            for (x, y), (x2, y2) in (
                ((left, top), (right, top)),
                ((right, top), (right, bottom)),
                ((right, bottom), (left, bottom)),
                ((left, bottom), (left, top)),
            ):
                steps = 8 if is_dashed else 1
                for step in range(0, steps, 2):
                    ends = [(x + (x2 - x) * part / steps, y + (y2 - y) * part / steps) for part in (step, step + 1)]
                    draw.line(ends, fill=colour, width=2)
    return np.asarray(image)


def _painted(model: VisionModel, pixels: Any, labels: Sequence[Label]) -> Any:
    """Return a picture whose labelled pixels are tinted by class."""
    classes = classes_of_pixels(
        [each for each in labels if not isinstance(each, Box)],
        model.description.classes,
        pixels.shape[1],
        pixels.shape[0],
    )
    generator = np.random.default_rng(4)
    colours = generator.integers(60, 256, (UNKNOWN + 1, 3))
    tinted = np.where((classes > 0)[..., None], 0.4 * pixels + 0.6 * colours[classes], 0.6 * pixels)
    return tinted.astype(np.uint8)
