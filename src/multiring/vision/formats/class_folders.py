"""ImageFolder: a folder a class, with the pictures of the class in it."""

from pathlib import Path, PurePosixPath

from multiring.errors import ArgumentError, DataError
from multiring.vision.formats.label_sets import LabelledPicture, LabelSet, picture_sizes, pictures_below, require_kinds
from multiring.vision.labels import Label
from multiring.vision.project.folder import VisionProject
from multiring.vision.project.scanning import RUNS

_PARTS = {"train", "training", "val", "valid", "validation", "test", "testing"}  # of other programs' splits


def read_class_folders(source: Path, pictures: Path | None = None) -> LabelSet:
    """Read a folder with a folder a class. Pictures may be in deeper folders, too.

    Raises:
        DataError: there is no such folder, no picture in it, one outside of all classes, or one that cannot be read. Or
            the folders are the parts of a split, with the classes in them.
    """
    root = pictures or source
    if not root.is_dir():
        raise DataError(f"{str(root)!r} is no folder: want a folder with a folder for each class")
    own = RUNS if VisionProject.is_project(root) else None  # results, and no class
    names = (each.name for each in root.iterdir() if each.is_dir())
    classes = sorted(each for each in names if each != own and not each.startswith("."))
    labels: dict[str, Label] = {}
    for path in pictures_below(root):
        parts = PurePosixPath(path).parts
        if len(parts) < 2:
            raise DataError(f"{str(root / path)!r} is in no folder of a class: move it into one")
        if parts[0] not in classes:
            continue  # a hidden folder, or that of results
        labels[path] = Label(class_name=parts[0])
    if not labels:
        raise DataError(f"{str(root)!r} has no picture: want pictures in a folder for each class")
    if {each.lower() for each in classes} <= _PARTS and all(len(PurePosixPath(path).parts) > 2 for path in labels):
        raise DataError(
            f"the folders of {str(root)!r} are parts of a split, with the classes in them: {', '.join(classes)}. "
            f"Import each part by itself, such as {str(root / classes[0])!r}"
        )
    found = [
        LabelledPicture(path=path, width=width, height=height, labels=(labels[path],))
        for path, (width, height) in picture_sizes(root, sorted(labels)).items()
    ]
    return LabelSet(root=root, classes=tuple(classes), pictures=tuple(found))


def class_folder_paths(labels: LabelSet) -> dict[str, str]:
    """Return where ImageFolder puts each picture: in its class's folder, by its former path.

    Raises:
        ArgumentError: a picture has not exactly one class, a class's name cannot be a folder's, or two pictures would
            get one path.
    """
    paths: dict[str, str] = {}
    for picture in labels.pictures:
        require_kinds(picture, (Label,), "ImageFolder")
        if len(picture.labels) != 1:
            raise ArgumentError(
                f"picture {picture.path!r} has {len(picture.labels)} classes: ImageFolder holds one a picture; choose "
                "CSV"
            )
        name = picture.labels[0].class_name
        if "/" in name or "\\" in name or name.startswith("."):
            raise ArgumentError(f"class {name!r} cannot be the name of a folder: rename it, or choose CSV")
        parts = PurePosixPath(picture.path).parts
        paths[picture.path] = picture.path if parts[0] == name and len(parts) > 1 else f"{name}/{picture.path}"
    taken: dict[str, str] = {}
    for path, place in paths.items():
        if place in taken:
            raise ArgumentError(f"{taken[place]!r} and {path!r} would both become {place!r}: rename one")
        taken[place] = path
    return paths


def write_class_folders(target: Path, labels: LabelSet) -> None:
    """Make the folders of all classes, also of those without a picture."""
    for name in labels.classes:
        if "/" not in name and "\\" not in name and not name.startswith("."):
            (target / name).mkdir(exist_ok=True)
