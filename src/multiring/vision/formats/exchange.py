"""Import labels and pictures into a project, and export them."""

import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from multiring._arguments import is_of, require_flag, require_path, shown
from multiring.errors import ArgumentError, DataError
from multiring.vision.formats import class_folders, coco, mask_files, tables, voc, yolo
from multiring.vision.formats.label_sets import LabelledPicture, LabelSet, as_box, picture_sizes, placed
from multiring.vision.labels import Label, distinct, require_class_name
from multiring.vision.pictures import ENDINGS
from multiring.vision.project.folder import VisionProject
from multiring.vision.project.scanning import RUNS, without_runs


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelFormat:
    """How a format is read and written.

    Attributes:
        read: returns the labels of a source, given the folder of the pictures or None.
        write: writes the files of labels into an empty folder.
        pictures: the folder of pictures that `read` looks for and an export fills; "" for the folder itself.
    """

    read: Callable[[Path, Path | None], LabelSet]
    write: Callable[[Path, LabelSet], None]
    pictures: str


_MOST_FRAME = 1 << 31
LABELLED = ("keep", "replace")  # what an import does with pictures that have other labels

FORMATS = {
    "coco": LabelFormat(read=coco.read_coco, write=coco.write_coco, pictures=coco.PICTURES),
    "csv": LabelFormat(read=tables.read_csv, write=tables.write_csv, pictures=tables.PICTURES),
    "imagefolder": LabelFormat(
        read=class_folders.read_class_folders, write=class_folders.write_class_folders, pictures=""
    ),
    "masks": LabelFormat(read=mask_files.read_masks, write=mask_files.write_masks, pictures=mask_files.PICTURES),
    "voc": LabelFormat(read=voc.read_voc, write=voc.write_voc, pictures=voc.PICTURES),
    "yolo": LabelFormat(read=yolo.read_yolo, write=yolo.write_yolo, pictures=yolo.PICTURES),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportResult:
    """What an import did.

    Attributes:
        pictures: labelled pictures.
        copied: of these, pictures that were copied into the project's folder.
        labels: the number of labels.
        change: the number of the change; one `undo` of its author takes the labels back.
        left_out: pictures beside them, outside of the project, that the files of labels do not have.
        repeated: labels of a picture that were equal to another one of it in every field, and were taken once.
    """

    pictures: int
    copied: int
    labels: int
    change: int
    left_out: int = 0
    repeated: int = 0


def import_labels(
    project: VisionProject,
    source: Path | str,
    format: str,  # noqa: A002 -- as in multiring.data
    author: str,
    *,
    pictures: Path | str | None = None,
    labelled: str = "",
) -> ImportResult:
    """Import labelled pictures. Everything is checked before the first file is copied.

    Pictures that are in the project's folder stay where they are. Others are copied to the same relative path. Labels
    that leave their picture are imported, and `check` reports them.

    Args:
        project: the project.
        source: the file or folder of the labels.
        format: a key of FORMATS, such as "coco".
        author: who is responsible for the labels.
        pictures: the folder of the pictures, if it is not where the format has it.
        labelled: what becomes of pictures that have other labels in the project: "keep" keeps these, "replace" replaces
            them, and "" is an error if there are any.

    Raises:
        ArgumentError: the format is unknown; or another file is in the place of a picture; or pictures have other
            labels, and `labelled` is "".
        DataError: the files of labels are malformed, contradict each other or the pictures, or lead out of the folder.
    """
    source = require_path("source", source)
    if not is_of(author, str) or not author.strip():
        raise ArgumentError(f"author {shown(author)}: want a name")
    if not is_of(labelled, str) or labelled not in {"", *LABELLED}:
        raise ArgumentError(f"labelled {labelled!r}: want one of {', '.join(LABELLED)}, or nothing")
    found = _read(source, format, None if pictures is None else require_path("pictures", pictures))
    stated = sum(len(each.labels) for each in found.pictures)
    once = tuple(replace(each, labels=distinct(each.labels)) for each in found.pictures)
    found = replace(found, pictures=once)
    own, root = project.folder.resolve(), found.root.resolve()
    prefix = ""
    copies: list[tuple[Path, Path]] = []
    if root.is_relative_to(own):
        prefix = "" if root == own else root.relative_to(own).as_posix() + "/"
    else:
        copies = list(_copies(found, own))
    sizes = picture_sizes(found.root, [each.path for each in found.pictures])
    for each in found.pictures:
        _require_size(sizes[each.path], each, str(source))
    project.scan()  # a picture that moved has its labels with it
    labels = {prefix + each.path: each.labels for each in found.pictures}
    kept = _kept(project, labels, labelled)
    for file, place in copies:
        place.parent.mkdir(parents=True, exist_ok=True)
        _copy(file, place)
    project.scan()
    for name in found.classes:
        project.add_class(name)
    # Before the labels: a split must not divide a video or a group, also if the import is killed here.
    project.set_groups({prefix + each.path: each.group for each in found.pictures if each.group is not None})
    project.set_frames(
        {
            prefix + each.path: (each.video, each.frame)
            for each in found.pictures
            if each.video is not None and each.frame is not None
        }
    )
    change = project.set_many_labels(
        {path: some for path, some in labels.items() if path not in kept}, author, outside_too=True
    )
    return ImportResult(
        pictures=len(labels) - len(kept),
        copied=len(copies),
        labels=sum(len(some) for path, some in labels.items() if path not in kept),
        change=change,
        left_out=0 if root == own else _pictures_in(root, own) - len(found.pictures),
        repeated=stated - sum(len(each.labels) for each in found.pictures),
    )


def _read(source: Path, format_name: str, pictures: Path | None) -> LabelSet:
    found = _format(format_name).read(source, pictures)
    if not found.pictures:
        raise DataError(f"{str(source)!r} has labels of no picture: want at least one")
    with placed(repr(str(source))):
        for name in found.classes:
            require_class_name(name)
        _require_frames(found)
    return found


def _require_frames(labels: LabelSet) -> None:
    """Raise DataError if a frame has no video, or a number below 0, or if two pictures are one frame."""
    firsts: dict[tuple[str, int], str] = {}
    for each in labels.pictures:
        if each.video is None and each.frame is None:
            continue
        if each.video is None or each.frame is None:
            given, missing = ("frame", "video") if each.video is None else ("video", "frame")
            raise DataError(f"picture {each.path!r} has a {given}, and no {missing}: give both, or neither")
        if type(each.frame) is not int or not 0 <= each.frame < _MOST_FRAME:
            raise DataError(
                f"picture {each.path!r} is the frame {each.frame!r}: want a whole number from 0 to {_MOST_FRAME - 1}"
            )
        first = firsts.setdefault((each.video, each.frame), each.path)
        if first != each.path:
            raise DataError(
                f"pictures {first!r} and {each.path!r} are both the frame {each.frame} of the video {each.video!r}: "
                "want one picture for a frame, because the frames' order would be unknown"
            )


def _kept(project: VisionProject, labels: Mapping[str, tuple[Label, ...]], labelled: str) -> set[str]:
    """Return the pictures that keep the labels that they have in the project, because they have others there."""
    own = project.labellings()
    others = {
        path: own[path]
        for path, some in labels.items()
        if path in own and own[path].labels is not None and Counter(own[path].labels) != Counter(some)
    }
    if others and not labelled:
        path, first = next(iter(others.items()))
        raise ArgumentError(
            f"{len(others)} of {len(labels)} pictures have other labels in the project already, such as {path!r} by "
            f"{first.author!r}: say by --labelled keep that these stay, or by --labelled replace that the imported "
            "ones replace them. Nothing was imported"
        )
    return set(others) if labelled == "keep" else set()


def _pictures_in(root: Path, own: Path) -> int:
    """Return how many files below a folder have a picture's ending, without those in the project's folder `own`."""
    count = 0
    for place, folders, names in os.walk(root):
        folders[:] = [each for each in without_runs(folders, names) if Path(place, each) != own]
        count += sum(Path(name).suffix.lower() in ENDINGS and not name.startswith(".") for name in names)
    return count


def _copies(found: LabelSet, own: Path) -> Iterator[tuple[Path, Path]]:
    """Yield a picture's file and its place in the project's folder `own`, for each that is not there yet."""
    for each in found.pictures:
        parts = each.path.split("/")
        if parts[0] == RUNS or any(part.startswith(".") for part in parts):
            raise ArgumentError(f"picture {each.path!r}: a project has none in {RUNS!r} and hidden folders: rename it")
        file, place = found.root / each.path, own / each.path
        if not place.exists():
            yield file, place
        elif place.read_bytes() != file.read_bytes():
            raise ArgumentError(f"{str(place)!r} is there already, with another content: rename one of them")


def _require_size(size: tuple[int, int], stated: LabelledPicture, source: str) -> None:
    if size != (stated.width, stated.height):
        raise DataError(
            f"{source!r} states {stated.width} x {stated.height} pixels for {stated.path!r}, which has "
            f"{size[0]} x {size[1]}"
        )


def export_labels(project: VisionProject, target: Path | str, format: str, *, boxes: bool = False) -> LabelSet:  # noqa: A002 -- as in multiring.data
    """Write the labelled pictures and their labels into a new folder.

    Pictures that are not labelled are left out.

    Args:
        project: the project, after a scan.
        target: the folder, which must be empty or missing.
        format: a key of FORMATS.
        boxes: replace polygons and masks by the boxes around them.

    Returns:
        What was written, with the paths in the project.

    Raises:
        ArgumentError: the format is unknown or does not hold a label, or the folder is not empty.
        DataError: the same, for a label that the format holds in part.
    """
    used, boxes = _format(format), require_flag("boxes", boxes)
    target = require_path("target", target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ArgumentError(f"{str(target)!r} is there and not empty: want a new folder")
    labellings = project.labellings()
    found = []
    for image in project.images():
        labels = labellings[image.path].labels if image.path in labellings else None
        if labels is None or not image.is_usable:
            continue
        found.append(
            LabelledPicture(
                path=image.path,
                width=image.width,
                height=image.height,
                labels=tuple(map(as_box, labels)) if boxes else labels,
                group=image.group,
                video=image.video,
                frame=image.frame,
            )
        )
    made = LabelSet(root=project.folder, classes=project.classes(), pictures=tuple(found))
    paths = {each.path: each.path for each in found}
    if format == "imagefolder":
        paths = class_folders.class_folder_paths(made)
    with _new_folder(target) as folder:
        used.write(folder, made)
        for path, place in paths.items():
            copy = folder / used.pictures / place
            copy.parent.mkdir(parents=True, exist_ok=True)
            _copy(project.folder / path, copy)
    return made


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Give a new folder beside `target`, which gets that name at the end. After an error, nothing is left."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}.new")
    folder.mkdir()
    try:
        yield folder
        if target.exists():
            target.rmdir()  # it is empty, or this raises
        folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _format(name: str) -> LabelFormat:
    if not is_of(name, str) or name not in FORMATS:
        raise ArgumentError(f"format {name!r}: want one of {', '.join(FORMATS)}")
    return FORMATS[name]


def _copy(file: Path, place: Path) -> None:
    """Copy a file to a place that is free. If that fails, as on a full disk, no part of the file is left there."""
    with file.open("rb") as read, place.open("xb") as written:
        try:
            shutil.copyfileobj(read, written)
        except BaseException:
            place.unlink(missing_ok=True)
            raise
