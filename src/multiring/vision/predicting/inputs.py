"""The pictures and videos that a prediction reads, in order."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from multiring.data.readers.limits import library
from multiring.errors import ArgumentError, DataError
from multiring.vision.pictures import ENDINGS, OTHER_JPEG_ENDINGS, UNREAD_ENDINGS, Pixels

VIDEO_ENDINGS = frozenset({".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".ogv", ".webm", ".wmv"})
_ENDINGS = ENDINGS | UNREAD_ENDINGS | OTHER_JPEG_ENDINGS | VIDEO_ENDINGS
_SHORT = 0.9  # of the frames that a video declares, and of its seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictionInput:
    """A picture or a video.

    Attributes:
        name: the path as the caller gave it, or the path below the folder that the caller gave, with "/".
        is_video: whether the file is a video.
        size: of the file in bytes.
        changed: when the file was changed, in ns since 1970.
        clip_frames: the frames of the clip that the whole video is for the model; 0 if each frame is a picture.
    """

    name: str
    is_video: bool
    size: int
    changed: int
    clip_frames: int = 0

    @property
    def noun(self) -> str:
        """What the file is called in its answer."""
        return "video" if self.is_video or self.clip_frames else "picture"

    @property
    def is_unread(self) -> bool:
        """Whether the file is a picture of a format that is not read, though some decoders read a thumbnail in it."""
        return Path(self.name).suffix.lower() in UNREAD_ENDINGS


def find_inputs(paths: Sequence[Path], *, clip_frames: int = 0) -> list[PredictionInput]:
    """Return the pictures and videos that files and folders have, in order.

    A file is taken whatever its ending; it is a video if its ending is a video's. Of a folder and those below it, files
    with endings of pictures and videos are taken, in the order of their names. Pictures of formats that are not read
    are among them, so that they are named. Names that begin with "." are not. Links to folders are followed.

    Args:
        paths: the files and folders.
        clip_frames: for a model of clips: the frames of its clips. Only videos are taken.

    Raises:
        ArgumentError: a path does not exist, a folder has no picture, or a file is named twice.
        DataError: a folder cannot be read, or a link leads back to a folder around it.
    """
    found: list[PredictionInput] = []
    for path in paths:
        if path.is_dir():
            inside = [each for each in _below(path) if each.is_video or not clip_frames]
            if not inside:
                what = f"no video, and the model takes clips of {clip_frames} frames" if clip_frames else "no picture"
                raise ArgumentError(f"folder {str(path)!r} has {what}{'' if clip_frames else ' and no video'}")
            found += inside
        elif path.is_file():
            found.append(_input(path))
        else:
            raise ArgumentError(f"{str(path)!r}: there is no such file or folder")
    if clip_frames:
        if pictures := [each.name for each in found if not each.is_video]:
            raise ArgumentError(f"{pictures[0]!r} is no video, and the model takes clips of {clip_frames} frames")
        found = [replace(each, is_video=False, clip_frames=clip_frames) for each in found]
    seen: set[str] = set()
    for each in found:
        if each.name in seen:
            raise ArgumentError(f"{each.name!r} is named twice: want each picture once")
        seen.add(each.name)
    return found


def _below(folder: Path) -> Iterator[PredictionInput]:
    for place, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        for linked in (Path(place, each) for each in folders if Path(place, each).is_symlink()):
            target, above = os.path.realpath(linked), (Path(place), *Path(place).parents)
            if any(Path(os.path.realpath(each)).is_relative_to(target) for each in above):
                raise DataError(f"folder {str(linked)!r} is a link to a folder around it: remove the link")
        for name in sorted(names):
            if Path(name).suffix.lower() in _ENDINGS and not name.startswith("."):
                yield _input(Path(place, name))


def _refuse(error: OSError) -> None:
    """Raise DataError for a folder that cannot be read: without it, its pictures would be missing silently."""
    raise DataError(
        f"folder {str(error.filename)!r} cannot be read: {error.strerror or error}; let it be read, or name the "
        "folders beside it"
    ) from error


def _input(path: Path) -> PredictionInput:
    try:
        path.as_posix().encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"{str(path)!r}: want a name in UTF-8; rename the file") from None
    is_video = path.suffix.lower() in VIDEO_ENDINGS
    try:
        found = path.stat()
    except OSError:  # a link to nothing, or a file that was removed just now; reading it tells
        return PredictionInput(name=path.as_posix(), is_video=is_video, size=-1, changed=-1)
    return PredictionInput(name=path.as_posix(), is_video=is_video, size=found.st_size, changed=found.st_mtime_ns)


def require_unchanged(each: PredictionInput) -> None:
    """Raise DataError if the file is not the one that `find_inputs` found.

    Raises:
        DataError: it has another size or another time of its last change, or is not there any more.
    """
    now = _input(Path(each.name))
    if (now.size, now.changed) != (each.size, each.changed):
        raise DataError(f"{each.name!r} was changed while the job ran: predict it again when it is complete")


def read_clip(path: Path, frames: int, every: int = 1) -> Pixels:
    """Return frames of a video, evenly spaced over it as in training: uint8 (frames, height, width, 3).

    Args:
        path: the video.
        frames: how many. Of a video with fewer, frames are repeated.
        every: only frames 0, every, 2 * every, ... count.

    Raises:
        DataError: the video cannot be decoded, or is damaged.
    """
    counted = Video(path)
    try:
        while counted.grab():
            pass
    finally:
        counted.close()
    have = -(-counted.frames // every)
    wanted = [int((place + 0.5) * have / frames) * every for place in range(frames)]
    found: dict[int, Pixels] = {}
    video = Video(path)
    try:
        while len(found) < len(set(wanted)):
            if not video.grab():
                raise DataError(
                    f"video {str(path)!r} ended after {video.frames} frames, and had {counted.frames} before"
                )
            if video.frames - 1 in wanted:
                found[video.frames - 1] = video.pixels()
    finally:
        video.close()
    if len({each.shape for each in found.values()}) > 1:
        raise DataError(f"video {str(path)!r} has frames of several sizes: want one size")
    return np.stack([found[each] for each in wanted])


class Video:
    """A video's frames, decoded by OpenCV. Close it after use.

    Attributes:
        frames: how many frames were read or passed over so far.
    """

    def __init__(self, path: Path) -> None:
        """Open a video.

        Raises:
            DataError: OpenCV does not read it.
        """
        self._cv2: Any = library("cv2", "vision")
        self._path = path
        self._capture = self._cv2.VideoCapture(str(path), self._cv2.CAP_FFMPEG)
        self.frames = 0
        self._at_ms = self._longest_ms = 0.0
        if not self._capture.isOpened():
            raise DataError(f"video {str(path)!r} cannot be decoded: OpenCV does not open it")

    def grab(self) -> bool:
        """Advance to the next frame. Return False at the end.

        Raises:
            DataError: the video has no frame, or ends long before its declared end.
        """
        if self._capture.grab():
            self.frames += 1
            at_ms = float(self._capture.get(self._cv2.CAP_PROP_POS_MSEC))
            self._longest_ms = max(self._longest_ms, at_ms - self._at_ms)
            self._at_ms = at_ms
            return True
        if not self.frames:
            raise DataError(f"video {str(self._path)!r} has no frame that OpenCV decodes")
        declared = int(self._capture.get(self._cv2.CAP_PROP_FRAME_COUNT))
        if self.frames < _SHORT * declared and self._ends_early(declared):
            raise DataError(f"video {str(self._path)!r} ends after {self.frames} of {declared} frames: it is damaged")
        return False

    def _ends_early(self, declared: int) -> bool:
        """Return whether the last frame is far from the declared end, in seconds.

        A video with fewer frames than it declares may be whole: an AVI file declares its ticks, and a tick without
        data shows the former frame again. Then frames are far apart, and the last one stays as long as others do.
        """
        rate = float(self._capture.get(self._cv2.CAP_PROP_FPS))
        if not rate > 0:
            return True
        end_ms = 1000 * declared / rate
        return end_ms - self._at_ms > max(self._longest_ms, (1 - _SHORT) * end_ms)

    def pixels(self) -> Pixels:
        """Return the frame as red, green and blue, uint8 (height, width, 3), turned as the file says.

        Raises:
            DataError: the frame cannot be decoded.
        """
        is_read, frame = self._capture.retrieve()
        if not is_read:
            raise DataError(f"video {str(self._path)!r}, frame {self.frames - 1}: it cannot be decoded")
        found: Pixels = self._cv2.cvtColor(frame, self._cv2.COLOR_BGR2RGB)
        return found

    def close(self) -> None:
        """Close the file."""
        self._capture.release()
