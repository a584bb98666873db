"""Transforms that crop and mirror a record's image, with the random generator of its sample.

A data set with one of them as its `transform` decodes of a JPEG what the crop needs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from multiring._arguments import is_number, require_flag, require_function, require_whole, shown
from multiring.data.jpeg import Region
from multiring.data.readers.limits import library
from multiring.errors import ArgumentError

Record = dict[str, Any]
Transform = Callable[[Record, np.random.Generator], Record]

_MOST_SIDE = 1 << 16  # pixels; a square of this side has more than data.readers.limits.Limits allow a picture
_TRIALS = 10  # of a random shape that fits into the image


@runtime_checkable
class CropsFirst(Protocol):
    """A transform that begins with a crop, so that an image need not be decoded whole.

    Calling it must be the same as `region`, `cut` and `finish`. A loader calls `region` for some samples before it
    calls `finish` for the first of them, so neither may depend on the calls for other samples.
    """

    @property
    def field(self) -> str:
        """The record's field that holds the image."""
        ...

    def __call__(self, record: Record, generator: np.random.Generator) -> Record:
        """Return the record for the training, from a record with the whole image."""
        ...

    def region(self, height: int, width: int, generator: np.random.Generator) -> Region:
        """Return what to keep of an image of `height` x `width` pixels."""
        ...

    def finish(self, record: Record, generator: np.random.Generator) -> Record:
        """Return the record for the training. Its image is cropped."""
        ...


def cut(image: NDArray[Any], region: Region) -> NDArray[Any]:
    """Return the region of an image (height, width, ...). What exceeds the image mirrors its edges.

    Raises:
        ArgumentError: it is no image, or it is empty.
    """
    if image.ndim < 2 or not min(image.shape[:2]):
        raise ArgumentError(f"an image of shape {image.shape}: want (height, width, ...)")
    bottom, right = region.top + region.height, region.left + region.width
    lacking = [max(0, end - each) for end, each in zip((bottom, right), image.shape[:2], strict=True)]
    if any(lacking):
        image = np.pad(image, [(0, each) for each in lacking] + [(0, 0)] * (image.ndim - 2), mode="symmetric")
    return image[region.top : bottom, region.left : right]


def only_crop(transform: object) -> "RandomCrop | CenterCrop | None":
    """Return the transform if it makes nothing of an image but the crop itself, perhaps mirrored; otherwise None.

    Then the crop may be decoded where the batch will have it. Another transform could return the crop in two fields.
    """
    found = transform if type(transform) in {RandomCrop, CenterCrop} else None
    return found if found is None or found.then is None else None  # type: ignore[attr-defined, return-value]


class _Crop:
    """What crops have in common: they cut, then perhaps mirror, then finish."""

    __slots__ = ()
    field: str
    then: Transform | None

    def __call__(self, record: Record, generator: np.random.Generator) -> Record:
        """Crop the record's image."""
        image = record.get(self.field)
        if image is None:
            raise ArgumentError(f"field={self.field!r}: the record has the fields {', '.join(map(repr, record))}")
        record[self.field] = cut(image, self.region(*_size(image), generator))
        return self.finish(record, generator)

    def region(self, height: int, width: int, generator: np.random.Generator) -> Region:
        """Return what to keep of an image of `height` x `width` pixels."""
        raise NotImplementedError

    def mirrors(self, generator: np.random.Generator) -> bool:  # noqa: ARG002 -- some crops draw it
        """Return whether the crop is mirrored left to right. This is drawn after the region."""
        return False

    def finish(self, record: Record, generator: np.random.Generator) -> Record:
        """Return the record for the training. Its image is cropped."""
        if self.mirrors(generator):
            record[self.field] = record[self.field][:, ::-1]
        return record if self.then is None else self.then(record, generator)


@dataclass(frozen=True, slots=True)
class RandomCrop(_Crop):
    """Cuts a square at a random position out of an image.

    A smaller image is first extended by mirroring its edges.

    Attributes:
        size: the square's side in pixels.
        mirrored: whether the square is mirrored left to right with probability 1/2.
        field: the record's field that holds the image (height, width, channels).
        then: a transform of the record with the square.

    Raises:
        ArgumentError: `size` is not a whole number from 1 on, or another argument has a wrong type.
    """

    size: int
    mirrored: bool = False
    field: str = "image"
    then: Transform | None = None

    def __post_init__(self) -> None:
        _require_crop(self)

    def region(self, height: int, width: int, generator: np.random.Generator) -> Region:
        """Return a square at a random position."""
        top = int(generator.integers(max(0, height - self.size) + 1))
        left = int(generator.integers(max(0, width - self.size) + 1))
        return Region(top, left, self.size, self.size)

    def mirrors(self, generator: np.random.Generator) -> bool:
        """Return whether it is the square's turn to be mirrored."""
        return self.mirrored and bool(generator.integers(2))


@dataclass(frozen=True, slots=True)
class CenterCrop(_Crop):
    """Cuts the middle square of `size` pixels out of an image, for evaluation.

    Attributes:
        size: the square's side in pixels.
        field: the record's field that holds the image (height, width, channels).
        then: a transform of the record with the square.

    Raises:
        ArgumentError: `size` is not a whole number from 1 on, or another argument has a wrong type.
    """

    size: int
    field: str = "image"
    then: Transform | None = None

    def __post_init__(self) -> None:
        _require_crop(self)

    def region(self, height: int, width: int, generator: np.random.Generator) -> Region:  # noqa: ARG002 -- as CropsFirst
        """Return the square in the middle."""
        top, left = max(0, height - self.size) // 2, max(0, width - self.size) // 2
        return Region(top, left, self.size, self.size)


@dataclass(frozen=True, slots=True)
class RandomResizedCrop(_Crop):
    """Cuts a random rectangle out of an image, and resizes it to a square by Pillow's bilinear filter.

    The area is a random share of the image's, and the ratio of width to height is random, too, on a logarithmic scale.
    If ten random rectangles do not fit into the image, the largest one in the middle is taken whose ratio is allowed.
    This is the usual augmentation for photographs (Szegedy et al., https://arxiv.org/abs/1409.4842, section 6).

    Attributes:
        size: the square's side in pixels.
        scale: the least and the largest share of the area.
        ratio: the least and the largest ratio of width to height.
        mirrored: whether the square is mirrored left to right with probability 1/2.
        field: the record's field that holds the image (height, width, 3), of uint8.
        then: a transform of the record with the square.

    Raises:
        ArgumentError: `size` is not a whole number from 1 on, a bound of `scale` or `ratio` is not positive, the first
            exceeds the second, a share exceeds 1, or another argument has a wrong type.
    """

    size: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    mirrored: bool = False
    field: str = "image"
    then: Transform | None = None

    def __post_init__(self) -> None:
        _require_crop(self)
        if not _are_bounds(self.scale) or self.scale[1] > 1:
            raise ArgumentError(f"scale={shown(self.scale)}: want two shares of the area with 0 < first <= second <= 1")
        if not _are_bounds(self.ratio):
            raise ArgumentError(
                f"ratio={shown(self.ratio)}: want two ratios of width to height with 0 < first <= second"
            )

    def region(self, height: int, width: int, generator: np.random.Generator) -> Region:
        """Return a random rectangle."""
        for _ in range(_TRIALS):
            area = height * width * generator.uniform(*self.scale)
            shape = math.exp(generator.uniform(math.log(self.ratio[0]), math.log(self.ratio[1])))
            rows, columns = round(math.sqrt(area / shape)), round(math.sqrt(area * shape))
            if 0 < rows <= height and 0 < columns <= width:
                top, left = generator.integers(height - rows + 1), generator.integers(width - columns + 1)
                return Region(int(top), int(left), rows, columns)
        rows = min(height, max(1, round(width / self.ratio[0])))
        columns = min(width, max(1, round(height * self.ratio[1])))
        return Region((height - rows) // 2, (width - columns) // 2, rows, columns)

    def mirrors(self, generator: np.random.Generator) -> bool:
        """Return whether it is the square's turn to be mirrored."""
        return self.mirrored and bool(generator.integers(2))

    def finish(self, record: Record, generator: np.random.Generator) -> Record:
        """Resize the rectangle, and mirror it if it is its turn."""
        images: Any = library("PIL.Image")
        picture = images.fromarray(np.ascontiguousarray(record[self.field]))
        record[self.field] = np.asarray(picture.resize((self.size, self.size), images.Resampling.BILINEAR))
        return _Crop.finish(self, record, generator)


def _require_crop(crop: Any) -> None:
    """Raise ArgumentError for options of a crop that would fail, or be wrong, at the first image."""
    require_whole("size", crop.size, 1, _MOST_SIDE)
    if not isinstance(crop.field, str):
        raise ArgumentError(f"field={shown(crop.field)}: want the name of the record's field that holds the image")
    if crop.then is not None:
        require_function("then", crop.then, "a transform of the record, or None")
    require_flag("mirrored", getattr(crop, "mirrored", False))


def _are_bounds(pair: Any) -> bool:
    """Return whether `pair` is two numbers above 0, the second not below the first."""
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(map(is_number, pair)):
        return False
    return bool(0 < pair[0] <= pair[1] < math.inf)


def _size(image: NDArray[Any]) -> tuple[int, int]:
    height, width = (*image.shape, 0, 0)[:2]
    return height, width
