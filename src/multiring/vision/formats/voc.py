"""Pascal VOC: Annotations/NAME.xml with boxes, and JPEGImages.

VOC counts pixels from 1, and its last pixel is inside: a box from x to x + width has xmin = x + 1 and xmax = x + width.
"""

from pathlib import Path, PurePosixPath
from xml.etree import ElementTree as ET

from multiring.errors import ArgumentError, DataError
from multiring.vision.formats.label_sets import (
    LabelledPicture,
    LabelSet,
    checked,
    number_text,
    pictures_below,
    placed,
    read_text,
    require_kinds,
)
from multiring.vision.labels import Box, Label

LABELS, PICTURES, CLASSES = "Annotations", "JPEGImages", "classes.txt"
_KNOWN = {"name", "bndbox", "part", "actions", "point"}


def read_voc(source: Path, pictures: Path | None = None) -> LabelSet:
    """Read a folder with Annotations and JPEGImages, and the order of the classes from classes.txt if it is there.

    A picture without a file in Annotations is not labelled and left out.

    Raises:
        DataError: a file is malformed, belongs to no picture or contradicts another one; the text names it.
    """
    root = pictures or source / PICTURES
    stems = by_stem(root)
    found, classes = [], dict.fromkeys(listed_classes(source / CLASSES))
    for path in sorted((source / LABELS).rglob("*.xml")):
        stem = path.relative_to(source / LABELS).with_suffix("").as_posix()
        place = repr(str(path))
        if stem not in stems:
            raise DataError(f"{place} belongs to no picture: {str(root)!r} has no {stem!r} with a picture's ending")
        with placed(place):
            picture = _picture(path, stems.pop(stem))
        classes |= dict.fromkeys(each.class_name for each in picture.labels)
        found.append(picture)
    return LabelSet(root=root, classes=tuple(classes), pictures=tuple(sorted(found, key=lambda each: each.path)))


def by_stem(root: Path) -> dict[str, str]:
    """Return the pictures of a folder by their paths without the ending.

    Raises:
        DataError: two pictures differ only in their endings.
    """
    if not root.is_dir():
        raise DataError(f"{str(root)!r} is no folder: want the folder of the pictures")
    stems: dict[str, str] = {}
    for path in pictures_below(root):
        stem = PurePosixPath(path).with_suffix("").as_posix()
        if stem in stems:
            raise DataError(
                f"{str(root)!r} has {stems[stem]!r} and {path!r}, which would share one file of labels: rename one"
            )
        stems[stem] = path
    return stems


def listed_classes(path: Path) -> list[str]:
    """Return the names in a file with a class a line; none if there is no file."""
    return [line for line in read_text(path).splitlines() if line.strip()] if path.exists() else []


def _parsed(path: Path) -> ET.Element:
    text = read_text(path)
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise DataError("declares a document type or entities, which can expand without bound: remove them")
    try:
        return ET.fromstring(text)  # noqa: S314 -- without entities
    except ET.ParseError as error:
        raise DataError(f"is no XML: {error}") from error


def _picture(path: Path, picture: str) -> LabelledPicture:
    tree = _parsed(path)
    stated = tree.findtext("filename")
    if stated is not None and PurePosixPath(stated).stem != PurePosixPath(picture).stem:
        raise DataError(f"states filename {stated!r}, and its own name belongs to {picture!r}")
    labels = []
    for number, each in enumerate(tree.iterfind("object")):
        with placed(f"object {number}"):
            labels.append(_label(each))
    return LabelledPicture(
        path=picture,
        width=int(_text(tree, "size/width")),
        height=int(_text(tree, "size/height")),
        labels=tuple(labels),
    )


def _text(tree: ET.Element, name: str) -> str:
    found = tree.findtext(name)
    if found is None:
        raise DataError(f"has no {name}")
    return found


def _label(told: ET.Element) -> Label:
    left, top, right, bottom = (float(_text(told, f"bndbox/{name}")) for name in ("xmin", "ymin", "xmax", "ymax"))
    attributes = tuple((each.tag, each.text or "") for each in told if each.tag not in _KNOWN)
    track = next((value for name, value in attributes if name == "track"), None)
    return checked(
        Box(
            class_name=_text(told, "name"),
            track=track,
            attributes=tuple(pair for pair in attributes if pair[0] != "track"),
            left=left - 1,
            top=top - 1,
            width=right - left + 1,
            height=bottom - top + 1,
        )
    )


def write_voc(target: Path, labels: LabelSet) -> None:
    """Write Annotations and classes.txt. The pictures are in JPEGImages."""
    require_stems(labels)
    write_classes(target / CLASSES, labels.classes)
    (target / LABELS).mkdir(exist_ok=True)
    for picture in labels.pictures:
        require_kinds(picture, (Box,), "VOC")
        tree = ET.Element("annotation")
        _add(tree, "filename", PurePosixPath(picture.path).name)
        size = ET.SubElement(tree, "size")
        for name, value in (("width", picture.width), ("height", picture.height), ("depth", 3)):
            _add(size, name, str(value))
        for each in picture.labels:
            assert isinstance(each, Box)  # noqa: S101 -- require_kinds has refused all others
            _add_object(tree, each)
        path = (target / LABELS / picture.path).with_suffix(".xml")
        path.parent.mkdir(parents=True, exist_ok=True)
        ET.indent(tree)
        path.write_text(ET.tostring(tree, "unicode") + "\n", encoding="utf-8")


def require_stems(labels: LabelSet) -> None:
    """Raise ArgumentError if two pictures would share a file of labels."""
    stems: dict[str, str] = {}
    for picture in labels.pictures:
        stem = PurePosixPath(picture.path).with_suffix("").as_posix()
        if stem in stems:
            raise ArgumentError(f"{stems[stem]!r} and {picture.path!r} would share one file of labels: rename one")
        stems[stem] = picture.path


def write_classes(path: Path, classes: tuple[str, ...]) -> None:
    """Write a file with a class a line."""
    path.write_text("".join(f"{each}\n" for each in classes), encoding="utf-8")


def _add(tree: ET.Element, name: str, text: str) -> None:
    ET.SubElement(tree, name).text = text


def _add_object(tree: ET.Element, box: Box) -> None:
    told = ET.SubElement(tree, "object")
    _add(told, "name", box.class_name)
    for name, value in (*box.attributes, *((("track", box.track),) if box.track is not None else ())):
        if not name.isidentifier() or name in _KNOWN:
            raise ArgumentError(
                f"attribute {name!r} of class {box.class_name!r}: VOC wants a name of letters and digits"
            )
        _add(told, name, value)
    place = ET.SubElement(told, "bndbox")
    corners = (box.left + 1, box.top + 1, box.left + box.width, box.top + box.height)
    for name, value in zip(("xmin", "ymin", "xmax", "ymax"), corners, strict=True):
        _add(place, name, number_text(value))
