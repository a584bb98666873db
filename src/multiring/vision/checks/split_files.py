"""Make a project's splits, and keep them in runs/splits."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multiring._arguments import require_flag, require_seed, shown
from multiring._replacing import replace_file
from multiring.errors import ArgumentError, DataError
from multiring.vision.checks.grouping import labels_digest, likeness, split_units
from multiring.vision.project.folder import VisionProject
from multiring.vision.splits import split, split_digest

_KEY = "multiring_split"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectSplit:
    """A split of a project's labelled pictures.

    Attributes:
        name: the name of its file in runs/splits, without ".json".
        parts: the paths of each part's pictures, ascending.
        seed: the seed that it was made with.
        units: the number of groups that were not divided.
        labels_digest: a digest of the labelled pictures' paths, files and labels at that time.
        digest: a digest of which pictures are in which part.
        divides_near: near duplicates were not kept together.
    """

    name: str
    parts: Mapping[str, tuple[str, ...]]
    seed: int
    units: int
    labels_digest: str
    digest: str
    divides_near: bool = False


def make_split(
    project: VisionProject,
    shares: Mapping[str, float],
    *,
    seed: int = 0,
    name: str = "split",
    divide_near: bool = False,
) -> ProjectSplit:
    """Divide the labelled pictures into parts, and write runs/splits/NAME.json, which must not be there.

    Duplicates, near duplicates, frames of a video and stated groups stay on one side. The same labels, shares and seed
    give the same split.

    Args:
        project: the project, after a scan.
        shares: the wanted share of each part, such as {"train": 0.8, "val": 0.2}.
        seed: another seed gives another split.
        name: the split's name: letters, digits, "-" and "_".
        divide_near: near duplicates may be in two parts. For pictures of one product in one position, which all look
            alike and would be one group.

    Raises:
        ArgumentError: no picture is labelled, a part would be empty, the shares or the name are wrong, or there is a
            split of the name with other parts.
    """
    seed, divide_near = require_seed("seed", seed), require_flag("divide_near", divide_near)
    if not isinstance(name, str):
        raise ArgumentError(f"split {shown(name)}: want a name of letters, digits, '-' and '_'")
    if not name.replace("-", "a").replace("_", "a").isalnum() or not name.isascii():
        raise ArgumentError(f"split {name!r}: want a name of letters, digits, '-' and '_'")
    images = project.images()
    labellings = {path: each for path, each in project.labellings().items() if each.labels is not None}
    paths = frozenset(each.path for each in images if each.is_usable and each.path in labellings)
    if not paths:
        raise ArgumentError(f"{str(project.folder)!r} has no labelled picture: label or import some, then split")
    units = split_units(images, likeness(images, near=not divide_near), labellings, paths)
    parts = split(units, shares, seed)
    made = ProjectSplit(
        name=name,
        parts=parts,
        seed=seed,
        units=len(units),
        labels_digest=labels_digest([each for each in images if each.path in paths], labellings),
        digest=split_digest(parts),
        divides_near=divide_near,
    )
    _write(_path(project, name), made)
    return made


def read_split(project: VisionProject, name: str = "split") -> ProjectSplit:
    """Read a split of the project.

    Raises:
        DataError: there is none of the name, or its file is damaged.
    """
    path = _path(project, name)
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        parts = {part: tuple(paths) for part, paths in told["parts"].items()}
        found = ProjectSplit(
            name=name,
            parts=parts,
            seed=told["seed"],
            units=told["units"],
            labels_digest=told["labels_digest"],
            digest=told["digest"],
            divides_near=told.get("divides_near", False),
        )
    except FileNotFoundError:
        raise DataError(f"the project has no split {name!r}: make it with make_split") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{str(path)!r} is no split, or damaged: {type(error).__name__}: {error}") from error
    if split_digest(parts) != found.digest:
        raise DataError(f"{str(path)!r} was changed: its parts do not have its digest; make the split again")
    return found


def split_names(project: VisionProject) -> list[str]:
    """Return the names of the project's splits, ascending."""
    return sorted(each.stem for each in (project.runs / "splits").glob("*.json"))


def require_undivided(project: VisionProject, split: ProjectSplit) -> None:
    """Raise DataError if equal pictures, frames of a video or a stated group are in two parts of a split.

    `make_split` divides none of them, but a group or a video can be stated after it, and files can change. Near
    duplicates are not compared again; `check_project` does it.
    """
    parts = {path: part for part, paths in split.parts.items() for path in paths}
    firsts: dict[tuple[str, str], str] = {}
    for image in project.images():
        if image.path not in parts:
            continue
        keys = {"group": image.group, "video": image.video, "pixels": image.pixels_digest if image.is_usable else None}
        for what, key in keys.items():
            first = firsts.setdefault((what, key), image.path) if key is not None else image.path
            if parts[first] != parts[image.path]:
                raise DataError(
                    f"pictures {first!r} and {image.path!r} have the same {what}, but are in the parts "
                    f"{parts[first]!r} and {parts[image.path]!r} of split {split.name!r}, so that scores would be of "
                    "what was trained on: make another split"
                )


def _path(project: VisionProject, name: str) -> Path:
    folder = project.runs / "splits"
    folder.mkdir(exist_ok=True)
    return folder / f"{name}.json"


def _write(path: Path, made: ProjectSplit) -> None:
    told: dict[str, Any] = {
        _KEY: 1,
        "seed": made.seed,
        "units": made.units,
        "labels_digest": made.labels_digest,
        "digest": made.digest,
        "divides_near": made.divides_near,
        "parts": {part: list(paths) for part, paths in made.parts.items()},
    }
    text = json.dumps(told, ensure_ascii=False, indent=1) + "\n"
    # A run that trained on the split names it, so another split needs another name. The same one may be written again.
    replace_file(path, text.encode(), is_ours=lambda found: found == text.encode(), what="this split")
