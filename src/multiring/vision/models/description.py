"""The description of a trained model: the file model.json beside its weights."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from multiring._replacing import replace_file
from multiring._version import VERSION
from multiring.errors import DataError

KINDS = ("classify", "detect", "segment", "act")
FITS = ("stretch", "letterbox")
SYMMETRIES = (1, 2, 4, 8)
WEIGHTS, DESCRIPTION = "model.safetensors", "model.json"
DIGESTS = ("labels", "split", "weights", "base")
# In format 1, a model of the kind "act" had an encoder stage that nothing used. Formats 1 and 2 have no symmetries.
_FORMAT = 3
_FUNCTION = ("kind", "classes", "size", "fit", "frames", "mean", "std", "architecture", "arguments", "has_nothing")
_KEY = "multiring_model"
_MOST_SIDE, _MOST_FRAMES, _MOST_CLASSES = 4096, 1024, 255


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDescription:
    """What a trained model is, without its weights.

    Attributes:
        kind: "classify", "detect", "segment" or "act".
        classes: the names, in the order of the outputs.
        size: the side in pixels of the square that the network sees.
        fit: how a picture becomes that square: "stretch" each side to it, or "letterbox": keep the proportions, and
            fill the right or the lower end with black.
        frames: the frames of a clip that the network sees; 1 unless the kind is "act".
        mean: of red, green and blue in 0 to 1; subtracted.
        std: of red, green and blue in 0 to 1; divided by.
        architecture: the network's name.
        arguments: the network's arguments by name.
        has_nothing: the network has a last output for "nothing is in the picture". See `VisionModel`.
        symmetries: how many symmetric pictures of a picture the network sees for an answer, which is the mean over
            them. 1: the picture alone; 2: it and its mirror image; 4: its turns by 90 degrees; 8: the turns of both.
            More than 1 is for the kind "classify" only.
        threshold: the lowest score of an answer.
        digests: SHA-256 as hexadecimal digits: of the "labels" and the "split" that it was trained on, of the file of
            "weights", and of the file of pretrained weights, "base", if there was one.
        split: the name of the split.
        scores: the scores of the validation part in percent, by name; empty if there was no such part.
        seed: the seed of the training.
        base: the name of the file of pretrained weights that the training began with; "" if there was none.
        when: the time of writing, in UTC, as ISO 8601.
        multiring: the version that wrote it.

    Raises:
        DataError: a value has the wrong type, or is out of its range.
    """

    kind: str
    classes: tuple[str, ...]
    size: int
    architecture: str
    arguments: Mapping[str, int | float | bool | str] = field(default_factory=lambda: MappingProxyType({}))
    fit: str = "stretch"
    frames: int = 1
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.25, 0.25, 0.25)
    has_nothing: bool = False
    symmetries: int = 1
    threshold: float = 0.0
    digests: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    split: str = ""
    scores: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int = 0
    base: str = ""
    when: str = ""
    multiring: str = VERSION

    def __post_init__(self) -> None:
        for each in fields(self):
            _require_type(each.name, getattr(self, each.name))
        _require("kind", self.kind, self.kind in KINDS, f"one of {', '.join(KINDS)}")
        _require("fit", self.fit, self.fit in FITS, f"one of {', '.join(FITS)}")
        is_named = bool(self.classes) and all(each.strip() for each in self.classes)
        _require("classes", self.classes, is_named, "at least one, each with a name")
        _require("classes", self.classes, len(set(self.classes)) == len(self.classes), "each name once")
        # Maps of places come from five halvings of the resolution, and classes of pixels are bytes.
        is_whole = self.kind in {"classify", "act"} or self.size % 32 == 0
        _require("size", self.size, is_whole, f"a multiple of 32 pixels for the kind {self.kind}")
        has_room = self.kind != "segment" or len(self.classes) < _MOST_CLASSES
        _require("classes", self.classes, has_room, f"fewer than {_MOST_CLASSES} for the kind segment")
        _require("size", self.size, 8 <= self.size <= _MOST_SIDE, f"8 to {_MOST_SIDE} pixels")
        is_clip = 1 < self.frames <= _MOST_FRAMES
        is_frames = is_clip if self.kind == "act" else self.frames == 1
        _require("frames", self.frames, is_frames, f"2 to {_MOST_FRAMES} for the kind act, else 1")
        _require("std", self.std, min(self.std) > 0, "numbers above 0")
        _require("threshold", self.threshold, 0 <= self.threshold <= 1, "0 to 1")
        has_sense = not self.has_nothing or self.kind in {"classify", "act"}
        _require("has_nothing", self.has_nothing, has_sense, "true only for the kinds classify and act")
        has_views = self.symmetries == 1 or (self.kind == "classify" and self.symmetries in SYMMETRIES)
        _require("symmetries", self.symmetries, has_views, "1, 2, 4 or 8 for the kind classify, else 1")
        for name, digest in self.digests.items():
            is_digest = name in DIGESTS and re.fullmatch("[0-9a-f]{64}", digest) is not None
            _require(f"digest {name!r}", digest, is_digest, f"64 hexadecimal digits, of {', '.join(DIGESTS)}")

    @property
    def outputs(self) -> int:
        """The number of the network's outputs: the classes, and "nothing" if it is one."""
        return len(self.classes) + self.has_nothing

    @property
    def function_digest(self) -> str:
        """SHA-256 of all values that decide what the weights compute; as hexadecimal digits."""
        told = {name: value for name, value in asdict(_plain(self)).items() if name in _FUNCTION}
        if self.symmetries > 1:  # files of weights from before there were symmetries have a digest without them
            told["symmetries"] = self.symmetries
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        """Return the text of model.json."""
        return json.dumps({_KEY: _FORMAT, **asdict(_plain(self))}, ensure_ascii=False, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, what: str = "the description of the model") -> "ModelDescription":
        """Return the description that `to_json` wrote.

        Args:
            text: the text.
            what: the name of its file for errors.

        Raises:
            DataError: it is no description, or is of a newer multiring, or a value is wrong.
        """
        try:
            told = json.loads(text)
        except ValueError as error:
            raise DataError(f"{what} is no JSON: {error}") from error
        if not isinstance(told, dict) or _KEY not in told:
            raise DataError(f"{what} does not describe a model: want a file that `multiring vision train` wrote")
        version = told.pop(_KEY)
        if version == 1 and told.get("kind") == "act":
            raise DataError(f"{what} has the format 1: models of the kind 'act' were different then; train it again")
        if version not in {1, 2, _FORMAT}:
            raise DataError(
                f"{what} has the format {version!r}, not {_FORMAT}: a newer multiring wrote it; update multiring"
            )
        names = {each.name for each in fields(cls)}
        required = {"kind", "classes", "size", "architecture"}
        if wrong := sorted((set(told) - names) | (required - set(told))):
            raise DataError(f"{what}: {wrong[0]!r} is {'unknown' if wrong[0] in told else 'missing'}")
        try:
            return cls(**{name: _of_json(name, value) for name, value in told.items()})
        except DataError as error:
            raise DataError(f"{what}: {error}") from None


def read_description(folder: Path | str) -> ModelDescription:
    """Read the model.json of a run's folder.

    Raises:
        DataError: there is none, or it is damaged.
    """
    path = Path(folder) / DESCRIPTION
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(
            f"{str(folder)!r} has no {DESCRIPTION}: want the folder of a run that `multiring vision train` finished"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{str(path)!r} cannot be read: {error}") from error
    return ModelDescription.from_json(text, repr(str(path)))


def write_description(folder: Path, description: ModelDescription) -> None:
    """Write the model.json of a run's folder."""
    data = description.to_json().encode()
    replace_file(folder / DESCRIPTION, data, is_ours=_is_ours, what="the description of a model")


def _is_ours(data: bytes) -> bool:
    return f'"{_KEY}"'.encode() in data[:200]


def _plain(described: ModelDescription) -> Any:
    """Return a description whose mappings are dicts, which `asdict` copies."""
    values = {each.name: getattr(described, each.name) for each in fields(described)}
    values |= {name: dict(value) for name, value in values.items() if isinstance(value, Mapping)}
    return ModelDescription(**values)


def _require(name: str, value: object, holds: bool, wanted: str) -> None:  # noqa: FBT001 -- a condition
    if not holds:
        raise DataError(f"{name}={value!r}: want {wanted}")


def _of_json(name: str, value: Any) -> Any:
    """Return a field's value from JSON, which has no tuples, and may have 1 for 1.0."""
    if name == "classes" and isinstance(value, list):
        return tuple(value)
    if name in {"mean", "std"} and isinstance(value, list):
        return tuple(float(each) if type(each) is int else each for each in value)
    return float(value) if name == "threshold" and type(value) is int else value


def _require_type(name: str, value: Any) -> None:
    """Raise DataError unless a field's value has the field's type, and its numbers are finite."""
    if name in {"classes", "mean", "std"}:
        wanted: type = str if name == "classes" else float
        is_right = isinstance(value, tuple) and all(type(each) is wanted for each in value)
        is_right = is_right and (name == "classes" or len(value) == 3)
        numbers = list(value) if is_right else []
    elif name in {"digests", "scores", "arguments"}:
        types = {"digests": (str,), "scores": (float, int), "arguments": (int, float, bool, str)}[name]
        is_right = isinstance(value, Mapping) and all(
            isinstance(key, str) and type(each) in types for key, each in value.items()
        )
        numbers = list(value.values()) if is_right else []
    else:
        kinds = {"size": int, "frames": int, "symmetries": int, "seed": int, "threshold": float, "has_nothing": bool}
        is_right, numbers = type(value) is kinds.get(name, str), [value]
    if not is_right or not all(math.isfinite(each) for each in numbers if type(each) is float):
        raise DataError(f"{name}={value!r}: the type or a number is wrong; see ModelDescription in docs/vision.md")
