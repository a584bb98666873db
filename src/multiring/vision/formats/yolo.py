"""YOLO: data.yaml with the classes, and labels/NAME.txt with boxes and polygons relative to the picture's size."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multiring.data.readers.limits import library
from multiring.errors import DataError
from multiring.vision.formats.label_sets import (
    LabelledPicture,
    LabelSet,
    checked,
    picture_sizes,
    placed,
    read_text,
    require_kinds,
)
from multiring.vision.formats.voc import by_stem, require_stems
from multiring.vision.labels import Box, Label, Polygon

LABELS, PICTURES, CLASSES = "labels", "images", "data.yaml"


def read_yolo(source: Path, pictures: Path | None = None) -> LabelSet:
    """Read a folder with data.yaml, labels and images.

    A picture without a file in `labels` is not labelled and left out. An empty file means "nothing in it". Each picture
    is decoded, because the labels are relative to its size.

    Raises:
        DataError: a file is malformed, belongs to no picture or names a class that data.yaml does not have.
    """
    root = pictures or source / PICTURES
    classes = _classes(source / CLASSES)
    stems = by_stem(root)
    files: dict[str, Path] = {}
    for path in sorted((source / LABELS).rglob("*.txt")):
        stem = path.relative_to(source / LABELS).with_suffix("").as_posix()
        if stem not in stems:
            raise DataError(
                f"{str(path)!r} belongs to no picture: {str(root)!r} has no {stem!r} with a picture's ending"
            )
        files[stems[stem]] = path
    found = []
    for name, size in picture_sizes(root, files).items():
        path, labels = files[name], []
        for number, line in enumerate(read_text(path).splitlines(), 1):
            if line.strip():
                with placed(f"{str(path)!r}, line {number}"):
                    labels.append(_label(line.split(), classes, size))
        found.append(LabelledPicture(path=name, width=size[0], height=size[1], labels=tuple(labels)))
    return LabelSet(root=root, classes=tuple(classes), pictures=tuple(sorted(found, key=lambda each: each.path)))


def _classes(path: Path) -> list[str]:
    yaml: Any = library("yaml", "vision")
    with placed(repr(str(path))):
        try:
            # All scalars are texts: else, the classes "no" and "010" would become False and 8.
            told = yaml.load(read_text(path), Loader=yaml.BaseLoader)
        except yaml.YAMLError as error:
            raise DataError(f"is no YAML: {' '.join(str(error).split())[:200]}") from error
        names = told["names"]
        if isinstance(names, dict):
            numbered = {int(number): name for number, name in names.items()}
            if sorted(numbered) != list(range(len(names))):
                raise DataError(f"names has the numbers {sorted(numbered)}: want 0 to {len(names) - 1}")
            names = [numbered[number] for number in range(len(names))]
        if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
            raise DataError(f"names is {str(names)[:100]!r}: want a list of names, or names by number")
        classes: list[str] = names
        if len(set(classes)) < len(classes):
            raise DataError("names has a class twice: want each name once")
        if "nc" in told and int(told["nc"]) != len(classes):
            raise DataError(f"nc is {told['nc']}, and names has {len(classes)} classes")
        return classes


def _label(words: Sequence[str], classes: Sequence[str], size: tuple[int, int]) -> Label:
    number = int(words[0])
    if not 0 <= number < len(classes):
        raise DataError(f"class {number}: want 0 to {len(classes) - 1}, the classes of {CLASSES}")
    values = [float(each) for each in words[1:]]
    width, height = size
    if len(values) == 4:
        x, y, w, h = values
        return checked(
            Box(
                class_name=classes[number],
                left=(x - w / 2) * width,
                top=(y - h / 2) * height,
                width=w * width,
                height=h * height,
            )
        )
    if len(values) < 6 or len(values) % 2:
        raise DataError(f"{len(values)} numbers after the class: want 4 of a box, or x and y of at least 3 points")
    points = tuple((x * width, y * height) for x, y in zip(values[::2], values[1::2], strict=True))
    return checked(Polygon(class_name=classes[number], outlines=(points,)))


def write_yolo(target: Path, labels: LabelSet) -> None:
    """Write data.yaml and labels. The pictures are in `images`."""
    require_stems(labels)
    # A list of JSON is one of YAML.
    names = json.dumps(list(labels.classes), ensure_ascii=False)
    text = f"path: .\ntrain: {PICTURES}\nval: {PICTURES}\nnc: {len(labels.classes)}\nnames: {names}\n"
    (target / CLASSES).write_text(text, encoding="utf-8")
    (target / LABELS).mkdir(exist_ok=True)
    numbers = {name: number for number, name in enumerate(labels.classes)}
    for picture in labels.pictures:
        require_kinds(picture, (Box, Polygon), "YOLO")
        lines = []
        for each in picture.labels:
            values = _relative(each, picture)
            lines.append(" ".join([str(numbers[each.class_name]), *map(repr, values)]) + "\n")
        path = (target / LABELS / picture.path).with_suffix(".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines), encoding="utf-8")


def _relative(label: Label, picture: LabelledPicture) -> list[float]:
    width, height = picture.width, picture.height
    if isinstance(label, Box):
        x, y = label.left + label.width / 2, label.top + label.height / 2
        return [x / width, y / height, label.width / width, label.height / height]
    assert isinstance(label, Polygon)  # noqa: S101 -- require_kinds has refused all others
    if len(label.outlines) > 1:
        raise DataError(
            f"picture {picture.path!r} has a polygon of {len(label.outlines)} outlines: YOLO holds one outline an "
            "object; choose COCO, or export boxes around the labels"
        )
    return [value for x, y in label.outlines[0] for value in (x / width, y / height)]
