"""CSV: a line a label, with a heading. Coordinates are pixels from the upper left corner.

The columns are `path`, `class`, and if they are needed `left`, `top`, `width`, `height`, `track`, `group`, `video`,
`frame`. A line without a class says that nothing is in the picture. A line without coordinates is the class of the
whole picture. Other columns become attributes of the label.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from multiring.errors import ArgumentError, DataError
from multiring.vision.formats.label_sets import (
    LabelledPicture,
    LabelSet,
    checked,
    number_text,
    picture_below,
    picture_sizes,
    placed,
    read_text,
    require_kinds,
)
from multiring.vision.formats.voc import listed_classes, write_classes
from multiring.vision.labels import Box, Label

FILE, PICTURES, CLASSES = "labels.csv", "images", "classes.txt"
_PLACE = ("left", "top", "width", "height")
_OF_PICTURE = ("group", "video", "frame")
_COLUMNS = ("path", "class", *_PLACE, "track", *_OF_PICTURE)


def read_csv(source: Path, pictures: Path | None = None) -> LabelSet:
    """Read a CSV file, or labels.csv in a folder, and the order of the classes from classes.txt if it is beside it.

    Args:
        source: the file or the folder.
        pictures: the folder that paths are relative to. Default: the folder `images` beside the file if there is one,
            else the file's folder.

    Raises:
        DataError: a line is malformed or contradicts another one; the text names the file and the line.
    """
    path = source / FILE if source.is_dir() else source
    root = pictures or (path.parent / PICTURES if (path.parent / PICTURES).is_dir() else path.parent)
    # newline="" keeps line ends inside of quoted values.
    rows = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    place = repr(str(path))
    labels: dict[str, list[Label]] = {}
    empty: dict[str, int] = {}
    own: dict[str, tuple[str, ...]] = {}
    classes = dict.fromkeys(listed_classes(path.parent / CLASSES))
    with placed(place):
        heads = next(rows, [])
        if not {"path", "class"} <= set(heads) or len(set(heads)) < len(heads):
            raise DataError(f"has the columns {', '.join(heads) or 'of nothing'}: want path and class, each once")
    try:
        for row in rows:
            place = f"{str(path)!r}, line {rows.line_num}"
            if not row:
                continue
            with placed(place):
                if len(row) != len(heads):
                    raise DataError(f"has {len(row)} values: want {len(heads)}, one for each column of the heading")
                told = dict(zip(heads, row, strict=True))
                name = told["path"]
                _note(own, name, tuple(told.get(each, "") for each in _OF_PICTURE))
                if name not in labels:
                    picture_below(root, name, place)
                    labels[name] = []
                label = _label(told)
                if label is None:
                    empty[name] = rows.line_num
                else:
                    labels[name].append(label)
                    classes[label.class_name] = None
                if name in empty and labels[name]:
                    raise DataError(f"picture {name!r} has a label, and line {empty[name]} says that it has none")
    except csv.Error as error:
        raise DataError(f"{str(path)!r}, line {rows.line_num}: {error}") from error
    found = []
    for name, (width, height) in picture_sizes(root, sorted(labels)).items():
        group, video, frame = own[name]
        with placed(f"{str(path)!r}, picture {name!r}"):
            found.append(
                LabelledPicture(
                    path=name,
                    width=width,
                    height=height,
                    labels=tuple(labels[name]),
                    group=group or None,
                    video=video or None,
                    frame=int(frame) if frame else None,
                )
            )
    return LabelSet(root=root, classes=tuple(classes), pictures=tuple(found))


def _note(own: dict[str, tuple[str, ...]], name: str, values: tuple[str, ...]) -> None:
    if own.setdefault(name, values) != values:
        raise DataError(f"picture {name!r} has {values} as group, video and frame, and {own[name]} in an earlier line")


def _label(told: Mapping[str, str]) -> Label | None:
    numbers = [told.get(each, "") for each in _PLACE]
    others = tuple((name, value) for name, value in told.items() if name not in _COLUMNS and value)
    if not told["class"]:
        if any(numbers) or told.get("track") or others:
            raise DataError("has coordinates or attributes, and no class")
        return None
    if not any(numbers):
        return checked(Label(class_name=told["class"], track=told.get("track") or None, attributes=others))
    if not all(numbers):
        raise DataError(f"has the coordinates {dict(zip(_PLACE, numbers, strict=True))}: want all four, or none")
    left, top, width, height = map(float, numbers)
    return checked(
        Box(
            class_name=told["class"],
            track=told.get("track") or None,
            attributes=others,
            left=left,
            top=top,
            width=width,
            height=height,
        )
    )


def write_csv(target: Path, labels: LabelSet) -> None:
    """Write labels.csv and classes.txt. The pictures are in `images`."""
    write_classes(target / CLASSES, labels.classes)
    extra = dict.fromkeys(name for picture in labels.pictures for each in picture.labels for name, _ in each.attributes)
    if clash := sorted(set(extra) & set(_COLUMNS)):
        raise ArgumentError(f"attribute {clash[0]!r} has the name of a column of CSV: choose another format")
    with (target / FILE).open("x", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow([*_COLUMNS, *extra])
        for picture in labels.pictures:
            require_kinds(picture, (Label, Box), "CSV")
            frame = "" if picture.frame is None else str(picture.frame)
            own = [picture.group or "", picture.video or "", frame]
            if not picture.labels:
                lines.writerow([picture.path, "", "", "", "", "", "", *own, *("" for _ in extra)])
            for each in picture.labels:
                lines.writerow(
                    [picture.path, each.class_name, *_numbers(each), each.track or "", *own, *_of(each, extra)]
                )


def _numbers(label: Label) -> Sequence[str]:
    if not isinstance(label, Box):
        return ("", "", "", "")
    return tuple(map(number_text, (label.left, label.top, label.width, label.height)))


def _of(label: Label, extra: Mapping[str, None]) -> list[str]:
    values = dict(label.attributes)
    return [values.get(name, "") for name in extra]
