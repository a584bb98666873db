"""What a project returns: values of a picture, a labelling and a change."""

from dataclasses import dataclass

from multiring.vision.labels import Label


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRecord:
    """What a project knows of a picture.

    Attributes:
        path: the file, relative to the project's folder, with "/".
        digest: SHA-256 of the file as hexadecimal digits; "" if it cannot be read.
        problem: why the picture cannot be used, or "". If there is a problem, all later attributes have no meaning,
            except the group, the video and the frame.
        width: pixels, after EXIF's rotation.
        height: pixels, after EXIF's rotation.
        format: the file's format by its content, such as "JPEG".
        mode: Pillow's name for how the colours are stored, such as "CMYK".
        bits: bits of a stored value.
        frames: the number of pictures in the file, of which the first counts.
        is_transparent: some pixel is not opaque.
        is_turned: EXIF rotates or mirrors the picture.
        pixels_digest: SHA-256 of the decoded pixels. Files of other formats can have the same pixels.
        signature: the value of `signature_of`.
        is_missing: the file was there and is gone; its labels are kept.
        group: the name of a group that no split may divide, such as a patient.
        video: the name of the video that the picture is a frame of.
        frame: the frame's number in the video.
    """

    path: str
    digest: str
    problem: str
    width: int
    height: int
    format: str
    mode: str
    bits: int
    frames: int
    is_transparent: bool
    is_turned: bool
    pixels_digest: str
    signature: bytes
    is_missing: bool
    group: str | None
    video: str | None
    frame: int | None

    @property
    def is_usable(self) -> bool:
        """Whether the file is there and is a picture."""
        return not self.problem and not self.is_missing


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelling:
    """The labels of a picture, as somebody stated them at a time.

    Attributes:
        labels: the labels. An empty tuple means "seen, nothing in it". None means "not labelled".
        author: who made the change.
        time: when, in UTC, as ISO 8601.
        change: the number of the change. Later changes have larger numbers.
    """

    labels: tuple[Label, ...] | None
    author: str
    time: str
    change: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanResult:
    """What a scan of the folder found, by paths relative to the folder.

    Attributes:
        added: new pictures.
        changed: files whose content is new.
        moved: pairs (former path, path) of pictures that keep their labels.
        missing: pictures whose files are gone.
        unreadable: files that cannot be used, also from former scans.
        refused: names that cannot be in a project, with the reason.
    """

    added: tuple[str, ...]
    changed: tuple[str, ...]
    moved: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]
    unreadable: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureSummary:
    """What a list of pictures shows of one, which is read without its labels.

    Attributes:
        path: the file, relative to the project's folder, with "/".
        digest: SHA-256 of the file as hexadecimal digits; "" if it cannot be read.
        problem: why the picture cannot be used, or "".
        is_missing: the file was there and is gone.
        width: pixels, after EXIF's rotation; 0 if there is a problem.
        height: pixels, after EXIF's rotation; 0 if there is a problem.
        video: the name of the video that the picture is a frame of.
        frame: the frame's number in the video.
        labels: the number of labels. 0 means "seen, nothing in it", and None means "not labelled".
        author: who made the last change of the labels; "" if nobody ever labelled the picture.
        change: the number of that change; 0 if there is none.
    """

    path: str
    digest: str
    problem: str
    is_missing: bool
    width: int
    height: int
    video: str | None
    frame: int | None
    labels: int | None
    author: str
    change: int
