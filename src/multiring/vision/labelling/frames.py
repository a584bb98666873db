"""Make the frames of a video pictures of a project."""

import secrets
import shutil
from pathlib import Path
from typing import Any

from multiring.data.readers.limits import library
from multiring.errors import ArgumentError, StateError
from multiring.vision.predicting.inputs import VIDEO_ENDINGS, Video
from multiring.vision.project.folder import VisionProject

_FOLDER_ENDING = ".frames"


def videos_without_frames(folder: Path) -> list[str]:
    """Return the videos in a project's folder whose frames are no pictures yet, as paths with "/"."""
    found = []
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder)
        if path.suffix.lower() in VIDEO_ENDINGS and inner.parts[0] != "runs" and path.is_file():
            is_hidden = any(part.startswith(".") for part in inner.parts)
            if not is_hidden and not _place(path).exists():
                found.append(inner.as_posix())
    return found


def make_frames(project: VisionProject, video: str, every: int = 1) -> tuple[str, ...]:
    """Decode a video into pictures beside it, and return their paths.

    The pictures are JPEG files of quality 95 in the folder VIDEO.frames, named by the numbers of the frames. They
    belong to the video, so that no split divides them. If the process is killed before it has stated that, the next
    call states it.

    Args:
        project: the project.
        video: the file, relative to the project's folder.
        every: take every so manieth frame.

    Raises:
        ArgumentError: the path leads out of the folder, or `every` is below 1.
        DataError: the video cannot be decoded.
        StateError: the frames are there already.
    """
    if every < 1:
        raise ArgumentError(f"every {every}th frame: want a number of at least 1")
    root = project.folder.resolve()
    path = (root / video).resolve()
    if not path.is_relative_to(root) or path.suffix.lower() not in VIDEO_ENDINGS:
        raise ArgumentError(f"video {video!r}: want a file inside the folder, with one of {' '.join(VIDEO_ENDINGS)}")
    video = path.relative_to(root).as_posix()
    place = _place(path)
    if left := _unstated(project, place, video):
        return left
    if place.exists():
        raise StateError(f"{str(place)!r} is there already: the video has frames; remove the folder to make them anew")
    image_library: Any = library("PIL.Image", "vision")
    # A hidden folder is no part of the project until all frames are in it.
    beside = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.new")
    beside.mkdir()
    numbers = []
    try:
        decoder = Video(path)
        try:
            while decoder.grab():
                number = decoder.frames - 1
                if number % every == 0:
                    frame = image_library.fromarray(decoder.pixels())
                    frame.save(beside / f"{number:06}.jpg", quality=95, subsampling=0)
                    numbers.append(number)
        finally:
            decoder.close()
        beside.rename(place)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    project.scan()
    inner = place.relative_to(root).as_posix()
    frames = {f"{inner}/{number:06}.jpg": (video, number) for number in numbers}
    project.set_frames(frames)
    return tuple(frames)


def _unstated(project: VisionProject, place: Path, video: str) -> tuple[str, ...]:
    """State the frames of a video that were made before the process was killed, and return their paths."""
    if not place.is_dir() or project.frames_of(video):
        return ()
    inner = place.relative_to(project.folder.resolve()).as_posix()
    numbers = sorted(int(each.stem) for each in place.glob("*.jpg") if each.stem.isdecimal() and each.stem.isascii())
    frames = {f"{inner}/{number:06}.jpg": (video, number) for number in numbers}
    project.scan()
    project.set_frames(frames)
    return tuple(frames)


def _place(video: Path) -> Path:
    return video.with_name(video.name + _FOLDER_ENDING)
