"""The files of an exported model: NAME.onnx, and NAME.onnx.json with its digest, classes and figures."""

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from multiring._replacing import replace_files, require_replaceable
from multiring._version import VERSION
from multiring.errors import ArgumentError, DataError
from multiring.vision.models.description import ModelDescription

_KEY = "multiring_export"
# Written into the ONNX file's metadata, so that an export replaces nothing but an export.
MARK = "multiring.vision.exporting"
_WHAT = "an export"
_MOST_BYTES = 1 << 26  # of the JSON file


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTensor:
    """An input or an output of an exported model.

    Attributes:
        name: the name in the graph.
        dtype: NumPy's name of the type of its values, such as "uint8".
        shape: the size of each dimension; None where any size is allowed.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedModel:
    """What NAME.onnx.json states of an exported model.

    Attributes:
        kind: "classify", "detect", "segment" or "act"; "module" for a user's own module.
        digest: SHA-256 of the ONNX file as hexadecimal digits.
        inputs: the inputs, in order.
        outputs: the outputs, in order.
        classes: the names of the classes, in the order of the outputs; empty for a user's own module.
        description: the description of the trained model, as model.json has it.
        parity: how far the file's answers are from the trained model's.
        made: when, in UTC, as ISO 8601.
        version: the version of multiring that made the file.
    """

    kind: str
    digest: str
    inputs: tuple[ModelTensor, ...]
    outputs: tuple[ModelTensor, ...]
    classes: tuple[str, ...] = ()
    description: Mapping[str, Any] = field(default_factory=dict)
    parity: Mapping[str, Any] = field(default_factory=dict)
    made: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    version: str = VERSION


def digest_of(data: bytes) -> str:
    """Return the SHA-256 of a file's bytes, as hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def record_path(path: Path) -> Path:
    """Return the JSON file that belongs to an ONNX file."""
    return path.with_name(f"{path.name}.json")


def require_export_place(path: Path) -> None:
    """Raise ArgumentError if an export may not be written to `path`.

    Raises:
        ArgumentError: there is a folder, or a file that is no export, or the folder of `path` does not exist.
    """
    if not path.parent.is_dir():
        raise ArgumentError(f"{str(path)!r}: there is no folder {str(path.parent)!r}; make it, or give another name")
    require_replaceable(path, is_ours=_is_our_graph, what=_WHAT)
    require_replaceable(record_path(path), is_ours=_is_our_record, what=_WHAT)


def write_exported(path: Path, graph: bytes, model: ExportedModel) -> None:
    """Write both files, each atomically. An earlier export at `path` is replaced once both are on the disk.

    A reader that comes between the two renames refuses the files, because the digests differ.

    Raises:
        ArgumentError: a file that is no export is in the way. Nothing was written.
        OSError: a file cannot be written.
    """
    require_export_place(path)
    replace_files({path: graph, record_path(path): record_text(model).encode()}, is_ours=_is_ours, what=_WHAT)


def record_text(model: ExportedModel) -> str:
    """Return the text of the JSON file."""
    return json.dumps({_KEY: 1, **asdict(model)}, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def read_exported(path: Path) -> tuple[bytes, ExportedModel]:
    """Return the ONNX file's bytes and what its JSON file states.

    Raises:
        DataError: a file is missing or malformed, or the JSON file belongs to another ONNX file.
    """
    graph, beside = _read(path), record_path(path)
    if not beside.is_file():
        raise DataError(f"{str(path)!r} has no {beside.name} beside it: want both files that the export wrote")
    if beside.stat().st_size > _MOST_BYTES:
        raise DataError(f"{str(beside)!r} has {beside.stat().st_size} bytes: want at most {_MOST_BYTES}")
    try:
        model = _model(json.loads(_read(beside)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{str(beside)!r} is malformed: {type(error).__name__}: {error}; export again") from error
    if (found := digest_of(graph)) != model.digest:
        raise DataError(
            f"{str(path)!r} has the digest {found[:16]}, and {beside.name} states {model.digest[:16]}: the files do "
            "not belong together; export again, or copy both"
        )
    return graph, model


def description_of(exported: ExportedModel, what: str) -> ModelDescription:
    """Return the description of the trained model that an exported model's JSON file has.

    Raises:
        DataError: it has none, because the file is of a user's own module, or it contradicts the list of classes.
    """
    if not exported.description:
        raise DataError(f"{what} is an export of a module, without classes: want one of a run of `multiring vision`")
    description = ModelDescription.from_json(json.dumps(dict(exported.description)), what)
    if (description.kind, description.classes) != (exported.kind, exported.classes):
        raise DataError(f"{what} contradicts itself: its classes are not those of its description; export again")
    return description


def _model(told: Mapping[str, Any]) -> ExportedModel:
    if told.get(_KEY) != 1:
        raise ValueError(f"{_KEY} is {told.get(_KEY)!r}: want 1")
    return ExportedModel(
        kind=str(told["kind"]),
        digest=str(told["digest"]),
        inputs=tuple(map(_tensor, told["inputs"])),
        outputs=tuple(map(_tensor, told["outputs"])),
        classes=tuple(map(str, told["classes"])),
        description=dict(told["description"]),
        parity=dict(told["parity"]),
        made=str(told["made"]),
        version=str(told["version"]),
    )


def _tensor(told: Mapping[str, Any]) -> ModelTensor:
    shape = tuple(None if size is None else int(size) for size in told["shape"])
    return ModelTensor(name=str(told["name"]), dtype=str(told["dtype"]), shape=shape)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error


def _is_ours(found: bytes) -> bool:
    return _is_our_graph(found) or _is_our_record(found)


def _is_our_graph(found: bytes) -> bool:
    return MARK.encode() in found


def _is_our_record(found: bytes) -> bool:
    return found.lstrip().startswith(f'{{\n "{_KEY}"'.encode())
