"""PNG masks: masks/NAME.png of class numbers, and classes.txt with lines "number name". 0 is the background."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.data.readers.limits import library
from multiring.errors import ArgumentError, DataError
from multiring.vision.formats.label_sets import (
    LabelledPicture,
    LabelSet,
    picture_sizes,
    placed,
    read_text,
    require_kinds,
)
from multiring.vision.formats.voc import by_stem, require_stems
from multiring.vision.labels import Label, Mask
from multiring.vision.pictures import DEFAULT_LIMITS, ENDINGS
from multiring.vision.run_lengths import run_lengths_of

LABELS, PICTURES, CLASSES = "masks", "images", "classes.txt"
_BACKGROUND, _MOST = "background", 255


def read_masks(source: Path, pictures: Path | None = None) -> LabelSet:
    """Read a folder with masks, images and classes.txt.

    A mask is a grey or palette PNG of 8 bits. Its values are the numbers of classes.txt, whatever the palette's colours
    are. All pixels of a class in a picture become one `Mask`. A mask of zeros means "nothing in it". A picture without
    a mask is not labelled and left out.

    Raises:
        DataError: a file is malformed, belongs to no picture, has another size than its picture or a number without a
            name.
    """
    root = pictures or source / PICTURES
    names = _names(source / CLASSES)
    stems = by_stem(root)
    files: dict[str, Path] = {}
    for path in sorted((source / LABELS).rglob("*")):
        if path.suffix.lower() in ENDINGS - {".png"}:
            raise DataError(f"{str(path)!r} is no PNG: want masks as PNG, which changes no number of a class")
        if path.suffix.lower() != ".png":
            continue
        stem = path.relative_to(source / LABELS).with_suffix("").as_posix()
        if stem not in stems:
            place = repr(str(path))
            raise DataError(f"{place} belongs to no picture: {str(root)!r} has no {stem!r} with a picture's ending")
        files[stems[stem]] = path
    found = []
    for name, (width, height) in picture_sizes(root, files).items():
        with placed(repr(str(files[name]))):
            values = _values(files[name])
            if values.shape != (height, width):
                raise DataError(f"has {values.shape[1]} x {values.shape[0]} pixels, and its picture {width} x {height}")
            labels = _labels(values, names)
        found.append(LabelledPicture(path=name, width=width, height=height, labels=labels))
    classes = tuple(name for _, name in sorted(names.items()))
    return LabelSet(root=root, classes=classes, pictures=tuple(sorted(found, key=lambda each: each.path)))


def _names(path: Path) -> dict[int, str]:
    names: dict[int, str] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        with placed(f"{str(path)!r}, line {number}"):
            value, _, name = line.partition(" ")
            if not value.isascii() or not value.isdigit():
                raise DataError(
                    f"{line!r}: want the number of the class in the masks, a space and the name, as '1 cat'"
                )
            if not 0 <= int(value) <= _MOST or not name.strip() or int(value) in names or name in names.values():
                raise DataError(f"{line!r}: want a number of 0 to {_MOST} and a name, each once")
            if int(value):
                names[int(value)] = name
    return names


def _values(path: Path) -> NDArray[np.uint8]:
    image_library: Any = library("PIL.Image", "vision")
    try:
        with image_library.open(path, formats=("PNG",)) as image:
            if image.width * image.height > DEFAULT_LIMITS.pixels:
                raise DataError(f"claims {image.width} x {image.height} pixels: want at most {DEFAULT_LIMITS.pixels}")
            if image.mode not in {"L", "P", "1"}:
                raise DataError(f"has the mode {image.mode!r}: want a grey or palette PNG of class numbers")
            found: NDArray[np.uint8] = np.array(image).astype(np.uint8)
            return found
    except (OSError, SyntaxError) as error:
        raise DataError(f"cannot be decoded: {error}") from error


def _labels(values: NDArray[np.uint8], names: dict[int, str]) -> tuple[Label, ...]:
    labels = []
    for number in np.unique(values).tolist():
        if number and number not in names:
            rows, columns = np.nonzero(values == number)
            raise DataError(f"has {number} at ({columns[0]}, {rows[0]}): want 0 or a number of {CLASSES}")
        if number:
            labels.append(Mask(class_name=names[number], pixels=run_lengths_of(values == number)))
    return tuple(labels)


def write_masks(target: Path, labels: LabelSet) -> None:
    """Write masks and classes.txt. The pictures are in `images`."""
    image_library: Any = library("PIL.Image", "vision")
    require_stems(labels)
    if len(labels.classes) > _MOST:
        raise ArgumentError(f"{len(labels.classes)} classes: PNG masks hold {_MOST} at most; choose COCO")
    numbers = {name: number for number, name in enumerate(labels.classes, 1)}
    lines = [f"0 {_BACKGROUND}\n"] if _BACKGROUND not in numbers else []
    lines += [f"{number} {name}\n" for name, number in numbers.items()]
    (target / CLASSES).write_text("".join(lines), encoding="utf-8")
    for picture in labels.pictures:
        require_kinds(picture, (Mask,), "PNG masks")
        values = np.zeros((picture.height, picture.width), np.uint8)
        for each in picture.labels:
            assert isinstance(each, Mask)  # noqa: S101 -- require_kinds has refused all others
            pixels = each.pixels.pixels()
            if each.is_crowd or values[pixels].any() or (values == numbers[each.class_name]).any():
                raise ArgumentError(
                    f"picture {picture.path!r} has masks of a crowd, that overlap, or of one class twice: PNG masks "
                    "hold one class a pixel; choose COCO"
                )
            values[pixels] = numbers[each.class_name]
        path = (target / LABELS / picture.path).with_suffix(".png")
        path.parent.mkdir(parents=True, exist_ok=True)
        image_library.fromarray(values).save(path)
