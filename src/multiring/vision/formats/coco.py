"""COCO: annotations.json, with boxes, polygons, and masks as run lengths."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from multiring.errors import DataError
from multiring.vision.formats.label_sets import (
    LabelledPicture,
    LabelSet,
    checked,
    picture_below,
    placed,
    read_text,
    require_kinds,
)
from multiring.vision.labels import Box, Label, Mask, Polygon, outside
from multiring.vision.outlines import pixels_inside
from multiring.vision.run_lengths import RunLengths, decompressed, joined_runs, run_lengths_of

FILE, PICTURES = "annotations.json", "images"


def read_coco(source: Path, pictures: Path | None = None) -> LabelSet:
    """Read a COCO file.

    Args:
        source: the JSON file, or a folder with annotations.json.
        pictures: the folder that file names are relative to. Default: the folder `images` beside the file if there is
            one, else the file's folder.

    Raises:
        DataError: the file is malformed or contradicts itself; the text names the file and the place.
    """
    path = source / FILE if source.is_dir() else source
    root = pictures or (path.parent / PICTURES if (path.parent / PICTURES).is_dir() else path.parent)
    with placed(repr(str(path))):
        told = json.loads(read_text(path))
        images, annotations, categories = told["images"], told.get("annotations", []), told.get("categories", [])
    names: dict[Any, str] = {}
    for number, each in enumerate(categories):
        with placed(f"{str(path)!r}, categories[{number}]"):
            _add(names, each["id"], _name(each["name"]), "category")
    if len(set(names.values())) < len(names):
        twice = min(name for name in names.values() if list(names.values()).count(name) > 1)
        raise DataError(f"{str(path)!r}: two categories have the name {twice!r}: want one of each name")
    sizes: dict[Any, tuple[int, int]] = {}
    files: dict[Any, Mapping[str, Any]] = {}
    seen: dict[str, int] = {}
    for number, each in enumerate(images):
        place = f"{str(path)!r}, images[{number}]"
        with placed(place):
            _add(files, each["id"], each, "image")
            name = str(each["file_name"])
            if name in seen:
                raise DataError(f"{place}: picture {name!r} is also images[{seen[name]}]: want each picture once")
            seen[name] = number
            picture_below(root, name, place)
            sizes[each["id"]] = (int(each["width"]), int(each["height"]))
    labels: dict[Any, list[Label]] = {key: [] for key in files}
    known: dict[Any, int] = {}
    for number, each in enumerate(annotations):
        with placed(f"{str(path)!r}, annotations[{number}]"):
            if "id" in each:
                _add(known, each["id"], number, "annotation")
            if each["image_id"] not in files:
                raise DataError(f"image_id {each['image_id']!r} is the id of no image")
            if each["category_id"] not in names:
                raise DataError(f"category_id {each['category_id']!r} is the id of no category")
            labels[each["image_id"]].append(_label(each, names[each["category_id"]], sizes[each["image_id"]]))
    found = [
        LabelledPicture(
            path=str(each["file_name"]),
            width=sizes[key][0],
            height=sizes[key][1],
            labels=tuple(labels[key]),
            group=_text(each, "group"),
            video=_text(each, "video"),
            frame=each.get("frame"),
        )
        for key, each in files.items()
    ]
    return LabelSet(root=root, classes=tuple(names.values()), pictures=tuple(sorted(found, key=lambda each: each.path)))


def _text(told: Mapping[str, Any], name: str) -> str | None:
    """Return a name that other programs may write as a number."""
    found = told.get(name)
    if not isinstance(found, str | int | None):
        raise DataError(f"picture {str(told['file_name'])!r} has the {name} {str(found)[:100]}: want a text")
    return None if found is None else str(found)


def _add(values: dict[Any, Any], key: Any, value: Any, what: str) -> None:
    if not isinstance(key, int | str):
        raise DataError(f"id {key!r}: want a number")
    if key in values:
        raise DataError(f"id {key!r} is the id of two {what} entries: want each id once")
    values[key] = value


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise DataError(f"name {value!r}: want a text")
    return value


def _box_of(told: Mapping[str, Any]) -> tuple[float, float, float, float]:
    numbers = told["bbox"]
    if not isinstance(numbers, list) or len(numbers) != 4 or any(type(each) not in {int, float} for each in numbers):
        raise DataError(f"bbox {str(numbers)[:100]}: want four numbers, left, top, width and height")
    left, top, width, height = map(float, numbers)
    return left, top, width, height


def _require_same_place(told: Mapping[str, Any], label: Label) -> Label:
    """Return a polygon or a mask, unless the box that is stated with it is elsewhere."""
    bounds = label.bounds()
    if told.get("bbox") is None or bounds is None:
        return label
    left, top, width, height = _box_of(told)
    near = bounds[0] - 1 <= left + width and left <= bounds[2] + 1 and bounds[1] - 1 <= top + height
    if not (width >= 0 and height >= 0 and near and top <= bounds[3] + 1):
        raise DataError(
            f"bbox {told['bbox']} has nothing in common with the segmentation, which is in the box "
            f"{[bounds[0], bounds[1], bounds[2] - bounds[0], bounds[3] - bounds[1]]}"
        )
    return label


def _label(told: Mapping[str, Any], class_name: str, size: tuple[int, int]) -> Label:
    attributes = dict(told.get("attributes") or {})
    track = attributes.pop("track", None)
    common: dict[str, Any] = {
        "class_name": class_name,
        "track": None if track is None else str(track),
        "attributes": tuple((str(name), str(value)) for name, value in attributes.items()),
    }
    segmentation, is_crowd = told.get("segmentation"), bool(told.get("iscrowd", 0))
    if isinstance(segmentation, Mapping):
        height, width = map(int, segmentation["size"])
        if (width, height) != size:
            raise DataError(f"mask of {width} x {height} pixels on an image of {size[0]} x {size[1]}")
        counts = segmentation["counts"]
        numbers = decompressed(counts) if isinstance(counts, str) else list(map(int, counts))
        runs: RunLengths = joined_runs(width, height, numbers)
        mask = checked(Mask(**common, pixels=runs, is_crowd=is_crowd))
        return _require_same_place(told, mask)
    if segmentation:
        label: Polygon | Box = Polygon(**common, outlines=tuple(map(_outline, segmentation)))
        _require_same_place(told, checked(label))
    else:
        left, top, box_width, box_height = _box_of(told)
        label = Box(**common, left=left, top=top, width=box_width, height=box_height)
        checked(label)
    return _as_crowd(label, size) if is_crowd else label


def _as_crowd(label: Polygon | Box, size: tuple[int, int]) -> Label:
    """Return the mask of several objects that are not told apart: other labels cannot say that they are several."""
    width, height = size
    if how := outside(label, width, height):
        raise DataError(how)
    pixels = np.zeros((height, width), bool)
    for outline in label.outlines if isinstance(label, Polygon) else ():
        pixels |= pixels_inside(outline, width, height)
    if not pixels.any():  # of a box, all that it touches; an outline may be too thin to have a pixel's centre
        left, top, right, bottom = label.bounds()
        pixels[max(0, math.floor(top)) : math.ceil(bottom), max(0, math.floor(left)) : math.ceil(right)] = True
    return checked(
        Mask(
            class_name=label.class_name,
            track=label.track,
            attributes=label.attributes,
            pixels=run_lengths_of(pixels),
            is_crowd=True,
        )
    )


def _outline(numbers: Sequence[float]) -> tuple[tuple[float, float], ...]:
    if len(numbers) % 2:
        raise DataError(f"polygon of {len(numbers)} numbers: want x and y of each point")
    return tuple((float(x), float(y)) for x, y in zip(numbers[::2], numbers[1::2], strict=True))


def write_coco(target: Path, labels: LabelSet) -> None:
    """Write annotations.json. The pictures are in the folder `images` beside it."""
    (target / FILE).write_text(json.dumps(coco_values(labels), ensure_ascii=False), encoding="utf-8")


def coco_values(labels: LabelSet, scores: Mapping[str, Sequence[float]] | None = None) -> dict[str, Any]:
    """Return what a COCO file of labels has.

    Args:
        labels: the pictures and their labels.
        scores: the score of each label by picture, for predictions; each annotation has a "score" then.
    """
    ids = {name: number for number, name in enumerate(labels.classes, 1)}
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, picture in enumerate(labels.pictures, 1):
        require_kinds(picture, (Box, Polygon, Mask), "COCO")
        own = {"group": picture.group, "video": picture.video, "frame": picture.frame}
        images.append(
            {
                "id": number,
                "file_name": picture.path,
                "width": picture.width,
                "height": picture.height,
                **{name: value for name, value in own.items() if value is not None},
            }
        )
        for index, each in enumerate(picture.labels):
            score = {} if scores is None else {"score": scores[picture.path][index]}
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": ids[each.class_name],
                    **_told(each),
                    **score,
                }
            )
    categories = [{"id": number, "name": name} for name, number in ids.items()]
    return {"images": images, "annotations": annotations, "categories": categories}


def _told(label: Label) -> dict[str, Any]:
    bounds = label.bounds()
    assert bounds is not None  # noqa: S101 -- require_kinds has refused labels of whole pictures
    left, top, right, bottom = bounds
    told: dict[str, Any] = {"bbox": [left, top, right - left, bottom - top], "iscrowd": 0}
    told["area"] = told["bbox"][2] * told["bbox"][3]
    told["segmentation"] = []
    if isinstance(label, Box):
        told["bbox"] = [label.left, label.top, label.width, label.height]
    elif isinstance(label, Polygon):
        told["segmentation"] = [[number for point in outline for number in point] for outline in label.outlines]
        told["area"] = sum(map(_area, label.outlines))
    elif isinstance(label, Mask):
        told["iscrowd"] = int(label.is_crowd)
        told["area"] = label.pixels.area()
        told["segmentation"] = {
            "size": [label.pixels.height, label.pixels.width],
            "counts": list(label.pixels.runs),
        }
    attributes = dict(label.attributes)
    if label.track is not None:
        attributes["track"] = label.track
    return {**told, "attributes": attributes} if attributes else told


def _area(outline: Sequence[tuple[float, float]]) -> float:
    following = [*outline[1:], outline[0]]
    return abs(sum(x * v - u * y for (x, y), (u, v) in zip(outline, following, strict=True))) / 2
