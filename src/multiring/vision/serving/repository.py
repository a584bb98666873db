"""The models of a server, by name and version."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from multiring.errors import ArgumentError
from multiring.vision.exporting.exported_files import ModelTensor, description_of
from multiring.vision.exporting.sessions import ExportedSession
from multiring.vision.models.description import ModelDescription
from multiring.vision.serving.refusals import NOT_FOUND, RequestError
from multiring.vision.serving.tensors import DATATYPES

_NAME, _VERSION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"), re.compile(r"[1-9][0-9]{0,8}")
_GRAPH = "model.onnx"
_OF_PICTURES = frozenset({"classify", "detect", "segment"})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ServedModel:
    """A version of a model.

    Attributes:
        name: letters, digits, "_", "." and "-".
        version: a whole number above 0, as text.
        session: computes the outputs.
        description: what the trained model is; None for a user's own module.
    """

    name: str
    version: str
    session: ExportedSession
    description: ModelDescription | None

    @property
    def takes_pictures(self) -> bool:
        """Whether the model answers for pictures, and not only for tensors."""
        return self.description is not None and self.description.kind in _OF_PICTURES

    @property
    def has_dynamic_batch(self) -> bool:
        """Whether requests may be computed together."""
        model = self.session.model
        return all(each.shape and each.shape[0] is None for each in (*model.inputs, *model.outputs))


class ModelRepository:
    """Models by name and version."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        """Make a repository.

        Raises:
            ArgumentError: there is no model, or two of one name and version.
        """
        self._models: dict[str, dict[str, ServedModel]] = {}
        for each in models:
            versions = self._models.setdefault(each.name, {})
            if each.version in versions:
                raise ArgumentError(f"model {each.name!r} has the version {each.version} twice: give NAME:VERSION=FILE")
            versions[each.version] = each
        if not self._models:
            raise ArgumentError("no model to serve: want at least one file")

    def __iter__(self) -> Iterator[ServedModel]:
        for versions in self._models.values():
            yield from (versions[each] for each in sorted(versions, key=int))

    def versions(self, name: str) -> list[str]:
        """Return the versions of a model, ascending."""
        return sorted(self._models.get(name, ()), key=int)

    def get(self, name: str, version: str = "") -> ServedModel:
        """Return a version of a model; the highest if none is named.

        Raises:
            RequestError: there is none. The status is 404.
        """
        versions = self._models.get(name)
        if versions is None:
            raise RequestError(NOT_FOUND, f"there is no model {name[:100]!r}: want one of {', '.join(self._models)}")
        version = version or max(versions, key=int)
        if version not in versions:
            known = ", ".join(self.versions(name))
            raise RequestError(NOT_FOUND, f"model {name!r} has no version {version[:20]!r}: want one of {known}")
        return versions[version]


def open_repository(words: Iterable[str], *, threads: int = 0) -> ModelRepository:
    """Load models.

    Args:
        words: each is a file, NAME=FILE, NAME:VERSION=FILE, or a folder with files NAME/VERSION/model.onnx. The name of
            a file without a name is the file's, or its folder's if the file is model.onnx.
        threads: threads of a call. 0: as many as the machine has cores.

    Raises:
        ArgumentError: a word is malformed, or two models have one name and version.
        DataError: a file cannot be loaded.
    """
    return ModelRepository(each for word in words for each in _opened(word, threads))


def _opened(word: str, threads: int) -> Iterator[ServedModel]:
    name, is_named, text = word.rpartition("=")
    path = Path(text)
    if not is_named and path.is_dir():
        files = sorted(each for each in path.glob(f"*/*/{_GRAPH}") if _VERSION.fullmatch(each.parent.name))
        if not files:
            raise ArgumentError(f"folder {text!r} has no NAME/VERSION/{_GRAPH}, where VERSION is a number: give files")
        for each in files:
            yield _model(each.parent.parent.name, each.parent.name, each, threads)
        return
    own, _, version = name.partition(":")
    if not is_named:
        own = path.absolute().parent.name if path.name == _GRAPH else path.stem
    yield _model(own, version or "1", path, threads)


def _model(name: str, version: str, path: Path, threads: int) -> ServedModel:
    if not _NAME.fullmatch(name):
        raise ArgumentError(f"model {name!r}: want a name of letters, digits, '_', '.' and '-'; give NAME={path}")
    if not _VERSION.fullmatch(version):
        raise ArgumentError(f"model {name!r}, version {version!r}: want a whole number above 0")
    session = ExportedSession.open(path, threads=threads)
    found = session.model
    described = description_of(found, repr(str(path))) if found.description else None
    return ServedModel(name=name, version=version, session=session, description=described)


def metadata(repository: ModelRepository, model: ServedModel) -> dict[str, object]:
    """Return a model's metadata, as the protocol has them."""

    def tensor(each: ModelTensor) -> dict[str, object]:
        shape = [-1 if size is None else size for size in each.shape]
        return {"name": each.name, "datatype": DATATYPES[each.dtype], "shape": shape}

    found = model.session.model
    return {
        "name": model.name,
        "versions": repository.versions(model.name),
        "platform": "onnx_onnxruntime",
        "inputs": [tensor(each) for each in found.inputs],
        "outputs": [tensor(each) for each in found.outputs],
        "parameters": {
            "version": model.version,
            "kind": found.kind,
            "classes": list(found.classes),
            "digest": found.digest,
            "made": found.made,
            "takes_pictures": model.takes_pictures,
        },
    }
