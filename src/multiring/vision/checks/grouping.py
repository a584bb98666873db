"""Which pictures of a project belong together: duplicates, near duplicates, frames of a video, stated groups."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from multiring.vision.duplicates import NearPairs, chained, connected, equal_groups, near_pairs
from multiring.vision.labels import Label, to_json
from multiring.vision.project.records import ImageRecord, Labelling
from multiring.vision.splits import SplitUnit


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AlikePictures:
    """Pictures that are alike. Numbers are positions in the list of pictures.

    Attributes:
        equal_files: groups of files with the same bytes; pictures that cannot be decoded are in it, too.
        equal_pixels: groups of pictures with the same pixels, in files that differ.
        near: pairs of near duplicates. Of pictures with equal pixels, only the first is compared.
    """

    equal_files: list[tuple[int, ...]]
    equal_pixels: list[tuple[int, ...]]
    near: NearPairs


def likeness(images: Sequence[ImageRecord], *, near: bool = True) -> AlikePictures:
    """Compare all pictures of a project. Missing files are left out.

    Args:
        images: the pictures.
        near: find near duplicates, too.
    """
    files = [each.digest if each.digest and not each.is_missing else None for each in images]
    pixels = [each.pixels_digest if each.is_usable else None for each in images]
    seen: set[str] = set()
    firsts = []
    for position, key in enumerate(pixels):
        if near and key is not None and key not in seen:
            seen.add(key)
            firsts.append(position)
    found = near_pairs(
        [images[each].signature for each in firsts], [(images[each].width, images[each].height) for each in firsts]
    )
    places = np.array(firsts, np.int64)
    pairs = NearPairs(first=places[found.first], second=places[found.second], similarity=found.similarity)
    groups = [each for each in equal_groups(pixels) if len({files[member] for member in each}) > 1]
    return AlikePictures(equal_files=equal_groups(files), equal_pixels=groups, near=pairs)


def split_units(
    images: Sequence[ImageRecord], found: AlikePictures, labellings: Mapping[str, Labelling], paths: frozenset[str]
) -> list[SplitUnit]:
    """Return the pictures `paths` in units that no split may divide.

    Pictures that are not in `paths` connect others: two pictures that are near duplicates of a third one stay together.
    """
    links = [*chained(found.equal_files), *chained(found.equal_pixels)]
    links += zip(found.near.first.tolist(), found.near.second.tolist(), strict=True)
    kinds: tuple[Callable[[ImageRecord], str | None], ...] = (
        lambda image: image.pixels_digest if image.is_usable else None,
        lambda image: image.group,
        lambda image: image.video,
    )
    for key in kinds:
        links += chained(equal_groups([key(image) for image in images]))
    units = []
    for group in connected(len(images), links):
        members = [images[each].path for each in group if images[each].path in paths]
        if members:
            classes = sorted(name for path in members for name in classes_of(labellings.get(path)))
            units.append(SplitUnit(members=tuple(members), classes=tuple(classes)))
    return units


def classes_of(labelling: Labelling | None) -> tuple[str, ...]:
    """Return the classes in a picture's labels, each once and in order."""
    labels: tuple[Label, ...] = () if labelling is None or labelling.labels is None else labelling.labels
    return tuple(sorted({each.class_name for each in labels}))


def labels_digest(images: Sequence[ImageRecord], labellings: Mapping[str, Labelling]) -> str:
    """Return a digest of the labelled pictures' paths, files and labels: SHA-256 as hexadecimal digits."""
    lines = []
    for image in sorted(images, key=lambda each: each.path):
        found = labellings.get(image.path)
        if found is not None and found.labels is not None:
            lines.append(
                [image.path, image.digest, sorted(json.dumps(to_json(each), sort_keys=True) for each in found.labels)]
            )
    return hashlib.sha256(json.dumps(lines, ensure_ascii=False).encode()).hexdigest()
