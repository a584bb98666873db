"""Boxes and polygons of a track between the frames in which somebody drew them."""

from collections.abc import Mapping
from dataclasses import replace

from multiring.vision.labels import Box, Label, Polygon

# A label with this attribute was computed. One that a person moves loses it, and so becomes a frame to compute from.
INTERPOLATED = ("interpolated", "1")
# After a label with this attribute, the object is not seen.
LAST = ("last", "1")


def track_label(label: Label, track: str) -> bool:
    """Return whether a label is one of a track that can be interpolated."""
    return label.track == track and isinstance(label, Box | Polygon)


def between(one: Label, other: Label, share: float) -> Label | None:
    """Return the label between two labels of a track, with the first one's class.

    Args:
        one: the earlier label.
        other: the later label.
        share: how far towards the later one, 0 to 1.

    Returns:
        The label, marked as computed. None if the labels are of different kinds, or polygons with different numbers of
        points.
    """
    marks = (*(each for each in one.attributes if each not in (INTERPOLATED, LAST)), INTERPOLATED)

    def mixed(first: float, second: float) -> float:
        return first + (second - first) * share

    if isinstance(one, Box) and isinstance(other, Box):
        return replace(
            one,
            left=mixed(one.left, other.left),
            top=mixed(one.top, other.top),
            width=mixed(one.width, other.width),
            height=mixed(one.height, other.height),
            attributes=marks,
        )
    if isinstance(one, Polygon) and isinstance(other, Polygon):
        if [len(each) for each in one.outlines] != [len(each) for each in other.outlines]:
            return None
        outlines = tuple(
            tuple(
                (mixed(x, other_x), mixed(y, other_y))
                for (x, y), (other_x, other_y) in zip(outline, other_outline, strict=True)
            )
            for outline, other_outline in zip(one.outlines, other.outlines, strict=True)
        )
        return replace(one, outlines=outlines, attributes=marks)
    return None


def is_drawn(label: Label) -> bool:
    """Return whether a person stated the label, so that others are computed from it."""
    return INTERPOLATED not in label.attributes


def label_at(drawn: Mapping[int, Label], frame: int) -> Label | None:
    """Return what a track proposes for a frame.

    Args:
        drawn: the labels that people stated, by the number of the frame.
        frame: the number of the frame.

    Returns:
        Between two stated labels: the one between. After the last: the last one, unless it ends the track. Before the
        first, after an end, or in a frame with a stated label: None.
    """
    if frame in drawn:
        return None
    before = max((each for each in drawn if each < frame), default=None)
    after = min((each for each in drawn if each > frame), default=None)
    if before is None or LAST in drawn[before].attributes:
        return None
    if after is None:
        kept = tuple(each for each in drawn[before].attributes if each != INTERPOLATED)
        return replace(drawn[before], attributes=kept)
    return between(drawn[before], drawn[after], (frame - before) / (after - before))


def filled(drawn: Mapping[int, Label], frames: frozenset[int]) -> dict[int, Label]:
    """Return the computed labels of a track, by frame, for the frames between stated labels."""
    found = {}
    last = max(drawn, default=-1)
    for frame in sorted(frames):
        made = label_at(drawn, frame) if frame < last else None
        if made is not None:
            found[frame] = made
    return found
