"""The values of a vision project: labels of pictures. They know nothing of files or of storage.

Coordinates are pixels of the picture as `read_picture` returns it, after its rotation by EXIF. The origin is the upper
left corner of the upper left pixel, so a picture of width w spans 0 to w. Values may be fractions of a pixel.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from multiring._arguments import is_number, shown
from multiring.errors import ArgumentError, DataError
from multiring.vision.run_lengths import RunLengths

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """What every label has, and all that the label of a whole picture has.

    Attributes:
        class_name: the class.
        track: the name of the object that the label follows through the frames of a video.
        attributes: pairs (name, value) that a file format has beside its boxes, such as ("difficult", "1").

    Raises:
        DataError: a value is of another kind, such as text for a coordinate.
    """

    class_name: str
    track: str | None = None
    attributes: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        _require_types(self)

    def bounds(self) -> tuple[float, float, float, float] | None:
        """Return the smallest left, top, right and bottom around the label; None for the whole picture."""
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Box(Label):
    """A rectangle, by its upper left corner and its size in pixels."""

    left: float
    top: float
    width: float
    height: float

    def bounds(self) -> tuple[float, float, float, float]:
        """Return left, top, right and bottom."""
        return self.left, self.top, self.left + self.width, self.top + self.height


@dataclass(frozen=True, kw_only=True, slots=True)
class Polygon(Label):
    """The area inside one or several outlines, each of at least three points (x, y).

    Several outlines are the visible parts of one object. Attributes of COCO's kind, such as holes, do not exist: an
    object with a hole is a `Mask`.
    """

    outlines: tuple[tuple[Point, ...], ...]

    def bounds(self) -> tuple[float, float, float, float]:
        """Return the smallest left, top, right and bottom around all points."""
        xs, ys = zip(*(point for outline in self.outlines for point in outline), strict=True)
        return min(xs), min(ys), max(xs), max(ys)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mask(Label):
    """A set of pixels.

    Attributes:
        is_crowd: the pixels belong to several objects that are not told apart.
    """

    pixels: RunLengths
    is_crowd: bool = False

    def bounds(self) -> tuple[float, float, float, float]:
        """Return the smallest left, top, right and bottom around the pixels; zeros if there are none."""
        return self.pixels.bounds()


def require_class_name(name: str) -> None:
    """Raise ArgumentError if a class cannot have the name.

    Raises:
        ArgumentError: the name is no text, has no visible character, a control character, or a space at an end: a class
            " cat" would be another one than "cat", and nobody would see it.
    """
    if not isinstance(name, str):
        raise ArgumentError(f"class {shown(name)}: want a name")
    if not name.strip() or not name.isprintable():
        raise ArgumentError(f"class {name!r}: want a name with visible characters, and no control characters")
    if name != name.strip():
        raise ArgumentError(f"class {name!r} has a space at an end, which nobody sees: want {name.strip()!r}")


def distinct(labels: Iterable[Label]) -> tuple[Label, ...]:
    """Return labels in their order, each once: labels that are equal in every field say nothing new."""
    return tuple(dict.fromkeys(labels))


def require_label(label: Label) -> None:
    """Raise DataError if a label is malformed by itself, whatever its picture's size.

    Raises:
        DataError: a number is not finite or no number, a box has no area, an outline has fewer than three points, a
            mask has no pixel, the class has no name, or `label` is none.
    """
    if not isinstance(label, Label):
        raise DataError(f"{shown(label)} is no label: want a Label, Box, Polygon or Mask")
    if not label.class_name.strip():
        raise DataError(f"class {label.class_name!r}: want a name with at least one visible character")
    numbers: Iterable[float] = ()
    if isinstance(label, Box):
        numbers = (label.left, label.top, label.width, label.height)
        if not (label.width > 0 and label.height > 0):
            raise DataError(f"box of {label.width:g} x {label.height:g} pixels: want a width and a height above 0")
    elif isinstance(label, Polygon):
        numbers = (number for outline in label.outlines for point in outline for number in point)
        if not label.outlines or min(map(len, label.outlines)) < 3:
            raise DataError("polygon: want at least one outline, and three points in each")
    elif isinstance(label, Mask) and not label.pixels.area():
        raise DataError("mask without a pixel: want at least one, or no label")
    for number in numbers:
        if not math.isfinite(number):
            raise DataError(f"coordinate {number}: want a finite number of pixels")


def _require_types(label: Label) -> None:
    """Raise DataError if a value of a label is of another kind; lists become tuples, so that labels can be compared.

    Files with such values could be written, but not read again.
    """
    if not isinstance(label.class_name, str):
        raise DataError(f"class {shown(label.class_name)}: want a name")
    if label.track is not None and not isinstance(label.track, str):
        raise DataError(f"track {shown(label.track)}: want the name of an object, or None")
    pairs = _tuples(label.attributes, 2)
    if pairs is None or not all(len(pair) == 2 and all(isinstance(each, str) for each in pair) for pair in pairs):
        raise DataError(f"attributes {shown(label.attributes)}: want pairs of texts")
    object.__setattr__(label, "attributes", pairs)
    if isinstance(label, Box):
        _require_numbers(label.left, label.top, label.width, label.height)
    elif isinstance(label, Polygon):
        outlines = _tuples(label.outlines, 3)
        if outlines is None or not all(len(point) == 2 for outline in outlines for point in outline):
            raise DataError(f"outlines {shown(label.outlines)}: want outlines of points (x, y)")
        _require_numbers(*(number for outline in outlines for point in outline for number in point))
        object.__setattr__(label, "outlines", outlines)
    elif isinstance(label, Mask):
        if not isinstance(label.pixels, RunLengths):
            raise DataError(f"pixels {shown(label.pixels)}: want RunLengths, as from run_lengths_of")
        if not isinstance(label.is_crowd, bool):
            raise DataError(f"is_crowd={shown(label.is_crowd)}: want True or False")


def _tuples(values: Any, depth: int) -> tuple[Any, ...] | None:
    """Return nested lists or tuples as tuples, `depth` levels of them; None for anything else."""
    if not isinstance(values, tuple | list):
        return None
    if depth == 1:
        return tuple(values)
    found = tuple(_tuples(each, depth - 1) for each in values)
    return None if None in found else found


def _require_numbers(*coordinates: Any) -> None:
    for each in coordinates:
        if not is_number(each):
            raise DataError(f"coordinate {shown(each)}: want a number of pixels")


def outside(label: Label, width: int, height: int) -> str:
    """Return how a label leaves its picture, or "" if it lies inside.

    A mask must have the picture's size. Half a pixel is allowed, because several file formats round coordinates.
    """
    if isinstance(label, Mask):
        found = label.pixels
        is_inside = (found.width, found.height) == (width, height)
        return "" if is_inside else f"mask of {found.width} x {found.height} on a picture of {width} x {height} pixels"
    bounds = label.bounds()
    if bounds is None:
        return ""
    left, top, right, bottom = bounds
    if left >= -0.5 and top >= -0.5 and right <= width + 0.5 and bottom <= height + 0.5:
        return ""
    kind = type(label).__name__.lower()
    return f"{kind} from ({left:g}, {top:g}) to ({right:g}, {bottom:g}) on a picture of {width} x {height} pixels"


def to_json(label: Label) -> dict[str, Any]:
    """Return a label as values that JSON holds. `from_json` returns an equal label."""
    told: dict[str, Any] = {"class": label.class_name}
    if label.track is not None:
        told["track"] = label.track
    if label.attributes:
        told["attributes"] = [list(pair) for pair in label.attributes]
    if isinstance(label, Box):
        told["box"] = [_plain(each) for each in (label.left, label.top, label.width, label.height)]
    elif isinstance(label, Polygon):
        told["polygon"] = [[[_plain(each) for each in point] for point in outline] for outline in label.outlines]
    elif isinstance(label, Mask):
        told["mask"] = {"size": [label.pixels.width, label.pixels.height], "runs": list(label.pixels.runs)}
        if label.is_crowd:
            told["crowd"] = True
    return told


def _plain(number: Any) -> Any:
    """Return a number of NumPy, which JSON does not hold, as the equal number of Python."""
    return number.item() if hasattr(number, "dtype") else number


def from_json(told: Mapping[str, Any]) -> Label:
    """Return the label of `to_json`.

    Raises:
        DataError: a field is missing or has a value of another kind.
    """
    try:
        common: dict[str, Any] = {
            "class_name": str(told["class"]),
            "track": None if told.get("track") is None else str(told["track"]),
            "attributes": tuple((str(name), str(value)) for name, value in told.get("attributes", ())),
        }
        if "box" in told:
            left, top, width, height = map(float, told["box"])
            return Box(**common, left=left, top=top, width=width, height=height)
        if "polygon" in told:
            return Polygon(**common, outlines=tuple(map(points_of, told["polygon"])))
        if "mask" in told:
            width, height = told["mask"]["size"]
            runs = RunLengths(width=int(width), height=int(height), runs=tuple(map(int, told["mask"]["runs"])))
            return Mask(**common, pixels=runs, is_crowd=bool(told.get("crowd", False)))
        return Label(**common)
    except DataError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"label {str(told)[:200]!r} is malformed: {type(error).__name__}: {error}") from error


def points_of(pairs: Sequence[Sequence[float]]) -> tuple[Point, ...]:
    """Return the points of an outline from pairs (x, y)."""
    return tuple((float(x), float(y)) for x, y in pairs)
