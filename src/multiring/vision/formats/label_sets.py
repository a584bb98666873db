"""What all formats share: a set of labelled pictures, and words for errors."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from multiring.data.readers.limits import require_inside
from multiring.errors import ArgumentError, DataError
from multiring.vision.labels import Box, Label, require_label
from multiring.vision.pictures import ENDINGS, read_picture
from multiring.vision.project.scanning import without_runs

MOST_BYTES = 1 << 31  # of a file of labels
_SHOWN = 5  # pictures that an error names


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledPicture:
    """A picture and its labels, in a file of labels.

    Attributes:
        path: the picture's file, relative to the folder of pictures, with "/".
        width: pixels, after EXIF's rotation.
        height: pixels, after EXIF's rotation.
        labels: the labels; an empty tuple means "seen, nothing in it".
        group: the name of a group that no split divides.
        video: the name of the video that the picture is a frame of.
        frame: the frame's number.
    """

    path: str
    width: int
    height: int
    labels: tuple[Label, ...]
    group: str | None = None
    video: str | None = None
    frame: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelSet:
    """Labelled pictures, and their classes in order.

    Attributes:
        root: the folder of the pictures.
        classes: the names of all classes, also of those without a label.
        pictures: the labelled pictures, in the order of their paths.
    """

    root: Path
    classes: tuple[str, ...]
    pictures: tuple[LabelledPicture, ...]


def read_text(path: Path) -> str:
    """Return the text of a file of labels, which is UTF-8, with or without a byte order mark.

    Raises:
        DataError: the file is missing, too large or not UTF-8.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise DataError(f"{str(path)!r} has {path.stat().st_size} bytes: want at most {MOST_BYTES}")
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{str(path)!r} is not UTF-8 at byte {error.start}: save it as UTF-8") from error


def picture_below(root: Path, path: str, place: str) -> Path:
    """Return the file of a picture that a file of labels names.

    Args:
        root: the folder of the pictures.
        path: the name that the file of labels states.
        place: that file and the place in it, for error messages.

    Raises:
        DataError: the path or its link leads out of the folder, or there is no such file.
    """
    try:
        path.encode()
    except UnicodeEncodeError:
        raise DataError(f"{place} names {path!r}: want a name in UTF-8; rename the file") from None
    found = root / require_inside(place, path)
    if not Path(os.path.realpath(found)).is_relative_to(os.path.realpath(root)):
        raise DataError(f"{place} names {path!r}, a link that leads out of {str(root)!r}: copy the file into it")
    if not found.is_file():
        raise DataError(f"{place} names picture {path!r}, and {str(root)!r} has no such file")
    return found


def pictures_below(root: Path) -> Iterator[str]:
    """Yield the paths of the pictures below a folder, by their endings, in order.

    Raises:
        DataError: a link leads out of the folder, or a folder cannot be read.
    """
    for place, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = sorted(without_runs(folders, names))
        for linked in (Path(place, name) for name in folders):
            if not Path(os.path.realpath(linked)).is_relative_to(os.path.realpath(root)):
                raise DataError(f"{str(linked)!r} is a link that leads out of {str(root)!r}: copy the folder into it")
        for name in sorted(names):
            if Path(name).suffix.lower() in ENDINGS and not name.startswith("."):
                path = Path(place, name).relative_to(root).as_posix()
                picture_below(root, path, f"folder {str(root)!r}")
                yield path


def _refuse(error: OSError) -> None:
    raise DataError(f"folder {str(error.filename)!r} cannot be read: {error.strerror or error}") from error


@contextmanager
def placed(place: str) -> Iterator[None]:
    """Put the place in a file of labels before the text of an error about a value.

    Raises:
        DataError: the block raised one, or found a value of another kind.
    """
    try:
        yield
    except (DataError, ArgumentError) as error:
        text = str(error)
        raise DataError(text if text.startswith(place) else f"{place}: {text}") from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise DataError(f"{place}: malformed: {what}") from error


def checked(label: Label) -> Label:
    """Return a label that is not malformed.

    Raises:
        DataError: it is.
    """
    require_label(label)
    return label


def as_box(label: Label) -> Label:
    """Return the box around a label; the label itself if it is of the whole picture."""
    bounds = label.bounds()
    if bounds is None or isinstance(label, Box):
        return label
    left, top, right, bottom = bounds
    return Box(
        class_name=label.class_name,
        track=label.track,
        attributes=label.attributes,
        left=left,
        top=top,
        width=right - left,
        height=bottom - top,
    )


def require_kinds(picture: LabelledPicture, kinds: Sequence[type[Label]], format_name: str) -> None:
    """Raise ArgumentError if a picture has a label of a kind that a format does not hold."""
    for each in picture.labels:
        if type(each) not in kinds:
            names = ", ".join("class of a picture" if kind is Label else kind.__name__ for kind in kinds)
            own = "class of a picture" if type(each) is Label else type(each).__name__
            help_ = ", or export boxes around the labels" if Box in kinds and type(each) is not Label else ""
            raise ArgumentError(
                f"picture {picture.path!r} has a label of the kind {own}: {format_name} holds {names}; choose another "
                f"format{help_}"
            )


def number_text(value: float) -> str:
    """Return a number as text from which the same float is read: without ".0" for whole numbers."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))


def picture_sizes(root: Path, paths: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return the width and the height of each picture in pixels, after EXIF's rotation, by its path.

    Args:
        root: the folder of the pictures.
        paths: relative to it.

    Raises:
        DataError: pictures cannot be read. All are read before, so that the text has their number and the first ones.
    """
    sizes: dict[str, tuple[int, int]] = {}
    problems: list[str] = []
    for path in paths:
        try:
            picture = read_picture(root / path)
        except DataError as error:
            problems.append(str(error))
        else:
            sizes[path] = (picture.width, picture.height)
    if problems:
        more = len(problems) - _SHOWN
        told = "; ".join([*problems[:_SHOWN], *([f"and {more} more"] if more > 0 else [])])
        number = f"{len(problems)} pictures cannot be read: " if len(problems) > 1 else ""
        raise DataError(f"{number}{told}. Repair or remove what cannot be read, and import again")
    return sizes
