"""Checks of what a caller states about pictures.

SQLite would keep a value of another kind, find nothing by it, or refuse it by its type alone.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from multiring._arguments import require_text, require_whole, shown
from multiring.errors import ArgumentError
from multiring.vision.labels import Label

MOST_NUMBER = (1 << 63) - 1  # that SQLite holds


def stated_groups(groups: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return groups of pictures, all of which are texts.

    Raises:
        ArgumentError: one is not.
    """
    return {
        require_text("picture", path): None if group is None else require_text("group", group)
        for path, group in groups.items()
    }


def stated_frames(frames: Mapping[str, tuple[str, int] | None]) -> dict[str, tuple[str, int] | None]:
    """Return frames of videos, all of which are texts and whole numbers.

    Raises:
        ArgumentError: one is not.
    """
    return {require_text("picture", path): None if of is None else _frame(*of) for path, of in frames.items()}


def stated_labels(labels: Mapping[str, Iterable[Label] | None]) -> dict[str, tuple[Label, ...] | None]:
    """Return the labels of pictures as tuples.

    Raises:
        ArgumentError: the labels of a picture are no list.
    """
    return {path: _labels(require_text("picture", path), some) for path, some in labels.items()}


def stated_names(path: str | None, video: str | None) -> tuple[str | None, str | None]:
    """Return the names of a picture and of a video, each of which may be None.

    Raises:
        ArgumentError: one is neither a text nor None.
    """
    return (
        None if path is None else require_text("picture", path),
        None if video is None else require_text("video", video),
    )


def stated_change(change: int | None) -> int | None:
    """Return the number of a change, or None. SQLite takes NaN for None, which has a meaning here.

    Raises:
        ArgumentError: it is neither.
    """
    return None if change is None else require_whole("change", change, 1, MOST_NUMBER)


def _frame(video: str, number: int) -> tuple[str, int]:
    return require_text("video", video), require_whole("frame", number, 0, MOST_NUMBER)


def _labels(path: str, labels: Any) -> tuple[Label, ...] | None:
    if labels is None:
        return None
    if isinstance(labels, str | bytes) or not isinstance(labels, Iterable):
        raise ArgumentError(f"labels of picture {path!r}: {shown(labels)}: want a list of labels, or None")
    return tuple(labels)
