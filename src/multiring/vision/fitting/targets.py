"""Turn a project's labels into the targets of a training, and refuse data that cannot be trained on."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from multiring.errors import DataError
from multiring.vision.checks.grouping import labels_digest
from multiring.vision.checks.split_files import ProjectSplit
from multiring.vision.labels import Label
from multiring.vision.project.folder import VisionProject
from multiring.vision.project.records import ImageRecord, Labelling

NOTHING = ""  # the class of a picture that somebody has seen, and nothing is in it
FEWEST = 2  # samples of a class
# Reasons to leave labelled pictures out.
UNSPLIT, ALONE = "in no part of the split", "frames without a neighbour of their class"


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledSample:
    """A picture with its labels, for a training or a scoring.

    Attributes:
        path: the picture, relative to the project's folder.
        digest: SHA-256 of its file.
        width: in pixels.
        height: in pixels.
        labels: its labels; empty if nothing is in the picture.
        class_name: of a whole picture, or NOTHING.
        group: the stated group, or "".
        frames: for a clip: each frame's picture and digest, in their order; the other attributes are the first one's.
    """

    path: str
    digest: str
    width: int
    height: int
    labels: tuple[Label, ...]
    class_name: str
    group: str
    frames: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledParts:
    """The samples of a split for a kind of model.

    Attributes:
        folder: the project's folder.
        classes: the classes that the samples have, in the project's order.
        parts: the samples of each part, by its name.
        has_nothing: a sample of some part has nothing in it.
        left_out: how many pictures were left out, by the reason. Of pictures in no part, only labelled ones count.
        labels_digest: of all samples' files and labels.
        split: the split.
    """

    folder: Path
    classes: tuple[str, ...]
    parts: Mapping[str, tuple[LabelledSample, ...]]
    has_nothing: bool
    left_out: Mapping[str, int]
    labels_digest: str
    split: ProjectSplit


def labelled_parts(project: VisionProject, split: ProjectSplit, kind: str, parts: Sequence[str]) -> LabelledParts:
    """Return the samples of some parts of a split.

    A picture without a labelling is left out; one that is labelled with nothing is a sample. A picture whose labels
    all are of another kind, such as a box where whole pictures are classified, says nothing for this kind and is left
    out. `left_out` counts both.

    Args:
        project: the project.
        split: the split.
        kind: the kind of model.
        parts: the names of the parts.

    Raises:
        DataError: a part is not in the split or has no sample; a picture cannot be read; or labels contradict each
            other. The message names the pictures.
    """
    images = {each.path: each for each in project.images()}
    labellings = project.labellings()
    found: dict[str, tuple[LabelledSample, ...]] = {}
    left_out: Counter[str] = Counter()
    for part in parts:
        if part not in split.parts:
            raise DataError(f"split {split.name!r} has no part {part!r}: want one of {', '.join(split.parts)}")
        _require_readable(project, part, split.parts[part], images)
        samples = _samples_of(split.parts[part], images, labellings, kind, left_out)
        if not samples:
            what = (
                "two neighbouring frames of one class"
                if kind == "act"
                else f"picture with labels for the kind {kind!r}"
            )
            raise DataError(f"part {part!r} of split {split.name!r} has no {what}: label some, or make another split")
        found[part] = tuple(samples)
    split_paths = {path for paths in split.parts.values() for path in paths}
    labelled = (path for path, each in labellings.items() if each.labels is not None and path in images)
    if unsplit := sum(images[path].is_usable and path not in split_paths for path in labelled):
        left_out[UNSPLIT] = unsplit
    every = [each for samples in found.values() for each in samples]
    if kind != "act":  # frames of two actions may be equal
        _require_consistent(every, images)
    used = {label.class_name for each in every for label in each.labels}
    classes = tuple(name for name in project.classes() if name in used)
    if not classes:
        raise DataError(f"no picture of split {split.name!r} has a label for the kind {kind!r}: label some")
    return LabelledParts(
        folder=project.folder,
        classes=classes,
        parts=found,
        has_nothing=any(not each.labels for each in every),
        left_out=left_out,
        labels_digest=labels_digest([images[path] for each in every for path in paths_of(each)], labellings),
        split=split,
    )


def _samples_of(
    paths: Sequence[str],
    images: Mapping[str, ImageRecord],
    labellings: Mapping[str, Labelling],
    kind: str,
    left_out: Counter[str],
) -> list[LabelledSample]:
    """Return the samples of a part, and count what is left out."""
    samples: list[LabelledSample] = []
    for path in paths:
        made = _sample(images[path], labellings.get(path), kind)
        if isinstance(made, str):
            left_out[made] += 1
        else:
            samples.append(made)
    if kind != "act":
        return samples
    found = clips(samples, images)
    if alone := len(samples) - sum(len(each.frames) for each in found):
        left_out[ALONE] += alone
    return found


def require_enough(data: LabelledParts, part: str, kind: str) -> None:
    """Raise DataError if a class, or "nothing" where it is an output, has too few samples in the part for training."""
    counts = Counter(name for each in data.parts[part] for name in {label.class_name for label in each.labels})
    what = "clip" if kind == "act" else "picture"
    for name in data.classes:
        if counts[name] < FEWEST:
            many = f"{counts[name]} {what}{'' if counts[name] == 1 else 's'}"
            raise DataError(
                f"class {name!r} has {many} in part {part!r} of split {data.split.name!r}: want at least {FEWEST}. "
                f"Label more {what}s of it and make another split, or remove its labels"
            )
    empty = sum(not each.labels for each in data.parts[part])
    if kind in {"classify", "act"} and data.has_nothing and empty < FEWEST:
        raise DataError(
            f"part {part!r} of split {data.split.name!r} has {empty} {what}{'' if empty == 1 else 's'} with "
            f"nothing in them: want at least {FEWEST}, as other parts have such {what}s, or none in any part. Label "
            "more of them and make another split, or remove their labels"
        )
    if len(data.classes) + data.has_nothing < 2 and not any(type(each) is not Label for each in _labels(data, part)):
        raise DataError(
            f"all {what}s are of the one class {data.classes[0]!r}: want a second class, or {what}s with nothing in "
            "them, to tell it from"
        )


def _labels(data: LabelledParts, part: str) -> list[Label]:
    return [label for each in data.parts[part] for label in each.labels]


def paths_of(sample: LabelledSample) -> tuple[str, ...]:
    """Return the paths of a sample's pictures: one, or those of a clip's frames."""
    return tuple(path for path, _ in sample.frames) or (sample.path,)


def clips(samples: Sequence[LabelledSample], images: Mapping[str, ImageRecord]) -> list[LabelledSample]:
    """Return the clips in frames of videos: neighbouring labelled frames of one class, at least two.

    A frame without a labelling, or with another class, ends a clip. Frames that were not kept as pictures do not.

    Raises:
        DataError: a picture is no frame of a video.
    """
    by_video: dict[str, list[LabelledSample]] = defaultdict(list)
    places: dict[str, dict[str, int]] = {}
    for image in images.values():
        if image.video is not None:
            places.setdefault(image.video, {})[image.path] = image.frame or 0
    for each in samples:
        video = images[each.path].video
        if video is None:
            raise DataError(
                f"picture {each.path!r} is no frame of a video: the kind 'act' needs frames, which `multiring vision "
                "frames`, an import or set_frame states"
            )
        by_video[video].append(each)
    found = []
    for video, labelled in sorted(by_video.items()):
        order = sorted(places[video], key=lambda path: (places[video][path], path))
        numbers = {path: number for number, path in enumerate(order)}
        ordered = sorted(labelled, key=lambda each: numbers[each.path])
        runs: list[list[LabelledSample]] = []
        for each in ordered:
            last = runs[-1][-1] if runs else None
            is_next = last is not None and numbers[each.path] == numbers[last.path] + 1
            if last is not None and is_next and last.class_name == each.class_name:
                runs[-1].append(each)
            else:
                runs.append([each])
        found += [
            replace(run[0], frames=tuple((each.path, each.digest) for each in run)) for run in runs if len(run) > 1
        ]
    return found


def _sample(image: ImageRecord, labelling: Labelling | None, kind: str) -> LabelledSample | str:
    """Return a picture as a sample, or the reason why it is left out."""
    if labelling is None or labelling.labels is None:
        return "not labelled"
    labels = tuple(each for each in labelling.labels if is_for(kind, each))
    if labelling.labels and not labels:
        return f"no label for the kind {kind}"
    names = sorted({each.class_name for each in labels})
    if kind in {"classify", "act"} and len(names) > 1:
        raise DataError(
            f"picture {image.path!r} has the classes {', '.join(map(repr, names))}: want one class a picture for the "
            f"kind {kind!r}; correct its labels"
        )
    return LabelledSample(
        path=image.path,
        digest=image.digest,
        width=image.width,
        height=image.height,
        labels=labels,
        class_name=names[0] if names else NOTHING,
        group=image.group or "",
    )


def is_for(kind: str, label: Label) -> bool:
    """Return whether a label says something to a kind of model."""
    return type(label) is Label if kind in {"classify", "act"} else type(label) is not Label


def _require_readable(
    project: VisionProject, part: str, paths: Sequence[str], images: Mapping[str, ImageRecord]
) -> None:
    bad = [path for path in paths if path not in images or not images[path].is_usable]
    if not bad:
        return
    record = images.get(bad[0])
    why = "is not in the project" if record is None else record.problem or "is missing"
    more = f", and so are {len(bad) - 1} more" if len(bad) > 1 else ""
    raise DataError(
        f"picture {bad[0]!r} of part {part!r} cannot be used: {why}{more}. Put the files back, or make another split; "
        f"`multiring vision check {project.folder}` lists them"
    )


def _require_consistent(samples: Sequence[LabelledSample], images: Mapping[str, ImageRecord]) -> None:
    """Raise DataError if equal pictures have labels of other classes."""
    by_pixels: dict[str, list[LabelledSample]] = defaultdict(list)
    for each in samples:
        by_pixels[images[each.path].pixels_digest].append(each)
    for equal in by_pixels.values():
        for other in equal[1:]:
            if {each.class_name for each in other.labels} != {each.class_name for each in equal[0].labels}:
                raise DataError(
                    f"pictures {equal[0].path!r} and {other.path!r} are equal, but their classes differ: "
                    f"{_classes(equal[0])} and {_classes(other)}. Correct one of them"
                )


def _classes(sample: LabelledSample) -> str:
    return ", ".join(sorted({repr(each.class_name) for each in sample.labels})) or "nothing"
