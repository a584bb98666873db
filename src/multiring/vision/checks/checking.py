"""`check_project`: find what is wrong with the pictures and labels of a project."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np

from multiring.errors import DataError
from multiring.vision.checks.grouping import AlikePictures, classes_of, likeness, split_units
from multiring.vision.checks.split_files import read_split, split_names
from multiring.vision.duplicates import NearPairs, connected
from multiring.vision.labels import Label, outside, to_json
from multiring.vision.pictures import OTHER_JPEG_ENDINGS, UNREAD_ENDINGS
from multiring.vision.project.folder import VisionProject
from multiring.vision.project.records import ImageRecord, Labelling, ScanResult
from multiring.vision.project.scanning import DATABASE

ERROR, WARNING, NOTE = "error", "warning", "note"
_SMALL, _SLIM, _IMBALANCED = 16, 10, 10
_UNREAD = UNREAD_ENDINGS | OTHER_JPEG_ENDINGS
_ENDINGS = {
    "BMP": {".bmp"}, "GIF": {".gif"}, "JPEG": {".jpg", ".jpeg"}, "PNG": {".png"}, "TIFF": {".tif", ".tiff"},
    "PPM": {".ppm", ".pgm", ".pnm"}, "WEBP": {".webp"},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckFinding:
    """Something that a check found.

    Attributes:
        kind: what was found, such as "equal files". All findings of a kind have the same severity.
        severity: "error": training with it gives wrong results. "warning": look at it. "note": good to know.
        text: a sentence.
        pictures: the pictures concerned, by path.
    """

    kind: str
    severity: str
    text: str
    pictures: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """The result of a check.

    Attributes:
        pictures: files that are there.
        usable: pictures that can be decoded.
        labelled: usable pictures with labels, "nothing in it" included.
        empty: of these, pictures with nothing in them.
        classes: pictures with each class.
        findings: what was found, errors first.
    """

    pictures: int
    usable: int
    labelled: int
    empty: int
    classes: Mapping[str, int]
    findings: tuple[CheckFinding, ...]

    @property
    def has_errors(self) -> bool:
        """Whether a finding is an error."""
        return any(each.severity == ERROR for each in self.findings)


def check_project(project: VisionProject, scan: ScanResult | None = None) -> CheckResult:
    """Check the pictures and labels that the project's last scan found.

    Args:
        project: the project.
        scan: the result of that scan, for the names that it refused.
    """
    images = project.images()
    labellings = {path: each for path, each in project.labellings().items() if each.labels is not None}
    alike = likeness(images)
    usable = [each for each in images if each.is_usable]
    findings = [
        *_unusable(images, labellings, scan),
        *_unread(project),
        *_inner_projects(project),
        *_outside(images, labellings),
        *_conflicts(images, alike, labellings),
        *_duplicates(images, alike),
        *_balance(project.classes(), {each.path: labellings[each.path] for each in usable if each.path in labellings}),
        *_videos(images, alike),
        *_divided(project, images, alike, labellings),
        *_oddities(images),
    ]
    labelled = [labellings[each.path] for each in usable if each.path in labellings]
    counts = Counter(name for each in labelled for name in classes_of(each))
    order = (ERROR, WARNING, NOTE)
    return CheckResult(
        pictures=sum(not each.is_missing for each in images),
        usable=len(usable),
        labelled=len(labelled),
        empty=sum(not each.labels for each in labelled),
        classes={name: counts[name] for name in project.classes()},
        findings=tuple(sorted(findings, key=lambda each: order.index(each.severity))),
    )


def _unread(project: VisionProject) -> Iterator[CheckFinding]:
    """Yield the files that people mean as pictures, but no scan reads."""
    paths = tuple(
        path.relative_to(project.folder).as_posix().encode("utf-8", "backslashreplace").decode()
        for path in sorted(project.folder.rglob("*"))
        if path.suffix.lower() in _UNREAD and path.is_file()
    )
    if paths:
        count = f"{len(paths)} file{'' if len(paths) == 1 else 's'}"
        text = f"{count} that multiring does not read: {_some(paths)}; save them as PNG or JPEG"
        yield CheckFinding(kind="format that is not read", severity=WARNING, text=text)


def _inner_projects(project: VisionProject) -> Iterator[CheckFinding]:
    """Yield the folders inside that are projects of their own."""
    for path in sorted(project.folder.rglob(DATABASE)):
        inner = path.parent.relative_to(project.folder).as_posix()
        if path.parent != project.folder and not any(part.startswith(".") for part in Path(inner).parts):
            text = (
                f"folder {inner!r} is a project of its own: its pictures count in this one, too, but not its labels; "
                "export them from there and import them here, or work with one of the two"
            )
            yield CheckFinding(kind="project inside", severity=WARNING, text=text)


def _unusable(
    images: Sequence[ImageRecord], labellings: Mapping[str, Labelling], scan: ScanResult | None
) -> Iterator[CheckFinding]:
    for each in images:
        if each.problem and not each.is_missing:
            yield CheckFinding(kind="unreadable", severity=ERROR, text=each.problem, pictures=(each.path,))
        if each.is_missing and each.path in labellings:
            text = f"{each.path!r} is gone; its labels are kept for the case that it comes back"
            yield CheckFinding(kind="missing", severity=WARNING, text=text, pictures=(each.path,))
    for name, reason in () if scan is None else scan.refused:
        yield CheckFinding(kind="refused name", severity=ERROR, text=f"{name!r}: {reason}")


def _outside(images: Sequence[ImageRecord], labellings: Mapping[str, Labelling]) -> Iterator[CheckFinding]:
    for image in images:
        found = labellings.get(image.path)
        if found is None or not image.is_usable:
            continue
        for label in found.labels or ():
            if how := outside(label, image.width, image.height):
                text = f"{image.path!r}: {label.class_name!r} leaves the picture: {how}"
                yield CheckFinding(kind="label outside", severity=ERROR, text=text, pictures=(image.path,))


def _conflicts(
    images: Sequence[ImageRecord], alike: AlikePictures, labellings: Mapping[str, Labelling]
) -> Iterator[CheckFinding]:
    """Yield duplicates whose labels differ: all of them for equal pictures, the classes for near ones."""
    for group in (*alike.equal_files, *alike.equal_pixels):
        yield from _conflict([images[each].path for each in group], labellings, _all_of, "equal pictures")
    pairs = zip(alike.near.first.tolist(), alike.near.second.tolist(), strict=True)
    differing = [
        (one, other)
        for one, other in pairs
        if any(_conflict([images[one].path, images[other].path], labellings, classes_of, "near duplicates"))
    ]
    for group in connected(len(images), differing):
        if len(group) > 1:
            yield from _conflict([images[each].path for each in group], labellings, classes_of, "near duplicates")


def _conflict(
    paths: Sequence[str], labellings: Mapping[str, Labelling], key: Callable[[Labelling], tuple[str, ...]], what: str
) -> Iterator[CheckFinding]:
    stated = {path: labellings[path] for path in paths if path in labellings}
    if len({key(each) for each in stated.values()}) > 1:
        told = "; ".join(f"{path!r}: {', '.join(classes_of(each)) or 'nothing'}" for path, each in stated.items())
        yield CheckFinding(
            kind="label conflict", severity=ERROR, text=f"{what} with other labels: {told}", pictures=tuple(stated)
        )


def _all_of(labelling: Labelling) -> tuple[str, ...]:
    labels: tuple[Label, ...] = labelling.labels or ()
    return tuple(sorted(json.dumps(to_json(each), sort_keys=True) for each in labels))


def _duplicates(images: Sequence[ImageRecord], alike: AlikePictures) -> Iterator[CheckFinding]:
    for kind, groups in (("equal files", alike.equal_files), ("equal pixels", alike.equal_pixels)):
        for group in groups:
            paths = tuple(images[each].path for each in group)
            yield CheckFinding(kind=kind, severity=WARNING, text=f"{len(paths)} {kind}: {_some(paths)}", pictures=paths)
    near = [
        (one, other)
        for one, other in zip(alike.near.first.tolist(), alike.near.second.tolist(), strict=True)
        if images[one].video is None or images[one].video != images[other].video
    ]
    pairs = Counter(one for one, _ in near)
    for group in connected(len(images), near):
        if len(group) > 1:
            paths = tuple(images[each].path for each in group)
            count = sum(pairs[each] for each in group)
            text = f"{len(paths)} near duplicates in {count} pair{'' if count == 1 else 's'}: {_some(paths)}"
            yield CheckFinding(kind="near duplicates", severity=WARNING, text=text, pictures=paths)


def _some(paths: Sequence[str]) -> str:
    shown = ", ".join(map(repr, paths[:4]))
    return shown if len(paths) <= 4 else f"{shown}, ..."


def _balance(classes: Sequence[str], labellings: Mapping[str, Labelling]) -> Iterator[CheckFinding]:
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for path, each in labellings.items():
        for name in classes_of(each):
            counts[name] += 1
            examples.setdefault(name, path)
    for name in classes:
        if counts[name] == 0:
            yield CheckFinding(kind="unused class", severity=NOTE, text=f"class {name!r} is in no label")
        if counts[name] == 1:
            text = f"class {name!r} is in one picture, so no split can train and test it"
            yield CheckFinding(kind="class of one picture", severity=WARNING, text=text, pictures=(examples[name],))
    if len(counts) > 1:
        (most, largest), (least, smallest) = counts.most_common()[0], counts.most_common()[-1]
        if largest >= _IMBALANCED * smallest:
            text = f"class {most!r} is in {largest} pictures, and class {least!r} in {smallest}"
            yield CheckFinding(kind="imbalance", severity=WARNING, text=text)


def _videos(images: Sequence[ImageRecord], alike: AlikePictures) -> Iterator[CheckFinding]:
    frames: dict[str, list[ImageRecord]] = {}
    for image in images:
        if image.video is not None and image.is_usable:
            frames.setdefault(image.video, []).append(image)
    near = Counter(
        images[one].video
        for one, other in zip(alike.near.first.tolist(), alike.near.second.tolist(), strict=True)
        if images[one].video is not None and images[one].video == images[other].video
    )
    for video, members in frames.items():
        paths = tuple(each.path for each in sorted(members, key=lambda each: each.frame or 0))
        text = (
            f"video {video!r}: {len(paths)} frames, {near[video]} pairs of near duplicates; a split keeps it together"
        )
        yield CheckFinding(kind="video", severity=NOTE, text=text, pictures=paths)


def _divided(
    project: VisionProject, images: Sequence[ImageRecord], alike: AlikePictures, labellings: Mapping[str, Labelling]
) -> Iterator[CheckFinding]:
    """Yield what a new split would keep together and an existing one has in two parts.

    Pictures change after a split was made: the third picture, which connects two others, may have come since.
    """
    nothing = np.zeros(0, np.int64)
    none_near = NearPairs(first=nothing, second=nothing, similarity=np.zeros(0, np.float32))
    for name in split_names(project):
        try:
            found = read_split(project, name)
        except DataError as error:
            yield CheckFinding(kind="damaged split", severity=ERROR, text=str(error))
            continue
        parts = {path: part for part, paths in found.parts.items() for path in paths}
        links = replace(alike, near=none_near) if found.divides_near else alike
        for unit in split_units(images, links, labellings, frozenset(parts)):
            examples = {parts[path]: path for path in reversed(unit.members)}
            if len(examples) > 1:
                told = ", ".join(f"{path!r} in {part!r}" for part, path in sorted(examples.items()))
                text = (
                    f"split {name!r} has pictures that belong together in several parts: {told}; so scores would be "
                    "of what was trained on. Make another split"
                )
                yield CheckFinding(kind="divided by a split", severity=WARNING, text=text, pictures=unit.members)


def _oddities(images: Sequence[ImageRecord]) -> Iterator[CheckFinding]:
    kinds: dict[str, Callable[[ImageRecord], bool]] = {
        "turned by EXIF": lambda each: each.is_turned,
        "transparent": lambda each: each.is_transparent,
        "more than 8 bits": lambda each: each.bits > 8,
        "CMYK": lambda each: each.mode == "CMYK",
        "several pictures in a file": lambda each: each.frames > 1,
        "smaller than 16 pixels": lambda each: min(each.width, each.height) < _SMALL,
        "longer than 10 times its width": lambda each: (
            max(each.width, each.height) > _SLIM * min(each.width, each.height)
        ),
        "ending of another format": lambda each: (
            PurePosixPath(each.path).suffix.lower() not in _ENDINGS.get(each.format, set())
        ),
    }
    for kind, is_odd in kinds.items():
        paths = tuple(each.path for each in images if each.is_usable and is_odd(each))
        if paths:
            yield CheckFinding(
                kind=kind,
                severity=NOTE,
                text=f"{len(paths)} picture{'s' * (len(paths) > 1)}: {_some(paths)}",
                pictures=paths,
            )
