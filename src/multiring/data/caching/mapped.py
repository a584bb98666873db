"""cached: any map-style data set, its samples kept on this host's disk from the first epoch on."""

import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from multiring.data.caching.blocks import QUOTA_BYTES, BlockCache
from multiring.data.packing.manifest import xxh3
from multiring.data.readers.arrays import array_of
from multiring.data.readers.limits import Limits, damage_told, library
from multiring.data.readers.opening import tell
from multiring.errors import ArgumentError, DataError
from multiring.settings import Settings
from multiring.settings import cache_folder as users_cache

_MODES = ("L", "RGB", "RGBA")  # whose arrays say the mode
_COUNT = struct.Struct("<I")


def cache_folder(settings: Settings | None = None) -> Path:
    """Return where this user's cache is: MULTIRING_DATA_CACHE, or a folder of multiring's in the user's cache."""
    chosen = (settings or Settings.from_environment()).data_cache
    return Path(chosen) if chosen else users_cache() / "data"


def cached(dataset: Any, cache: str | Path | None = None, *, quota_bytes: int = QUOTA_BYTES) -> "CachedSamples":
    """Return a data set whose samples are read from this host's disk once they have been read.

    A script changes one line: `dataset = cached(dataset)`. What is kept is what the data set gives, so that random
    augmentation belongs on top of it: a data set that gives something else each time is refused.

    Args:
        dataset: with a length, and samples by number: arrays, tensors, numbers, text, bytes, images of Pillow's, None,
            and tuples, lists and dicts of those.
        cache: the folder; the user's own by default (MULTIRING_DATA_CACHE).
        quota_bytes: the most that the folder may hold.

    Raises:
        ArgumentError: it has no samples, or a sample is another one when it is read again.
        DataError: a sample holds what cannot be kept.
    """
    return CachedSamples(dataset, Path(cache) if cache is not None else cache_folder(), quota_bytes)


class CachedSamples:
    """A data set, its samples kept; see `cached`."""

    def __init__(self, dataset: Any, folder: Path, quota_bytes: int) -> None:
        self.dataset = dataset
        self._made_of = (folder, quota_bytes)
        self._cache = BlockCache(folder, quota_bytes, tell)
        self._key, self._models = self._identified()

    def _identified(self) -> tuple[str, dict[str, Any]]:
        """Return what tells the data set from others: its type, its length, and three samples of it."""
        count = len(self.dataset)
        if not count:
            raise ArgumentError("a data set without samples cannot be cached")
        models: dict[str, Any] = {}
        digests = []
        for number in sorted({0, count // 2, count - 1}):
            first, again = (packed(self.dataset[number], models) for _ in range(2))
            if first != again:
                raise ArgumentError(
                    f"sample {number} is another one each time it is read: random augmentation. Cache the data set "
                    "below it, and augment what comes out"
                )
            digests.append(xxh3(first))
        kind = type(self.dataset)
        return f"map-{xxh3(f'{kind.__module__}.{kind.__qualname__} {count} {digests}'.encode()):016x}", models

    def __len__(self) -> int:
        """Return how many samples there are."""
        return len(self.dataset)

    def __getitem__(self, number: int) -> Any:
        """Return a sample, equal to what the data set gives."""
        place = range(len(self))[number]
        data = self._cache.get(self._key, place, lambda: packed(self.dataset[place], self._models))
        if not self._models and b'"like"' in data:
            packed(self.dataset[place], self._models)  # what tensors are made like
        return unpacked(data, self._models)

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "_made_of": self._made_of, "_key": self._key, "_models": self._models}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._cache = BlockCache(*self._made_of, tell)


def packed(sample: Any, models: dict[str, Any]) -> bytes:
    """Return a sample's bytes: its structure as JSON, and its arrays and bytes behind that, each with its length.

    Args:
        sample: of the kinds that `cached` takes.
        models: is given one tensor of each kind there is, by which tensors are made when it is read.

    Raises:
        DataError: it holds something else.
    """
    parts: list[bytes] = []
    head = json.dumps(_taken_apart(sample, parts, models)).encode()
    return b"".join(piece for each in (head, *parts) for piece in (_COUNT.pack(len(each)), each))


def unpacked(data: bytes, models: dict[str, Any]) -> Any:
    """Return the sample whose bytes these are."""
    pieces = []
    place = 0
    while place < len(data):
        (size,) = _COUNT.unpack_from(data, place)
        pieces.append(memoryview(data)[place + _COUNT.size : place + _COUNT.size + size])
        place += _COUNT.size + size
    with damage_told("a cached sample", ValueError, KeyError, IndexError, TypeError):
        return _put_together(json.loads(bytes(pieces[0])), pieces[1:], models)


def _taken_apart(value: Any, parts: list[bytes], models: dict[str, Any]) -> Any:
    """Return what JSON can say of a value, its arrays and bytes put behind the others in `parts`."""
    if value is None or isinstance(value, bool | int | float | str):
        return {"plain": value}
    if type(value) in {tuple, list}:
        return {type(value).__name__: [_taken_apart(each, parts, models) for each in value]}
    if isinstance(value, dict) and all(isinstance(each, str) for each in value):
        return {"dict": {key: _taken_apart(each, parts, models) for key, each in value.items()}}
    told = _part_of(value, models)
    parts.append(told.pop("data"))
    return told | {"part": len(parts) - 1}


def _part_of(value: Any, models: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes of a value that is one piece of memory, and what kind it is of."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, bytes):
        return {"kind": "bytes", "data": value}
    if kind.startswith("PIL.") and value.mode in _MODES:
        return {"kind": "image", "data": _npy(np.asarray(value))}
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return {"kind": "scalar" if isinstance(value, np.generic) else "array", "data": _npy(np.asarray(value))}
    if hasattr(value, "new_tensor") and hasattr(value, "numpy"):
        models.setdefault(kind, value)
        return {"kind": "tensor", "like": kind, "data": _npy(value.detach().numpy())}
    raise DataError(f"a sample holds a {kind}, which cannot be kept without a pickle")


def _put_together(told: dict[str, Any], parts: list[memoryview], models: dict[str, Any]) -> Any:
    """Return the value that was taken apart."""
    (name, found), *_ = told.items()
    if name in {"tuple", "list"}:
        made = [_put_together(each, parts, models) for each in found]
        return tuple(made) if name == "tuple" else made
    if name == "dict":
        return {key: _put_together(each, parts, models) for key, each in found.items()}
    if name == "plain":
        return found
    data = bytes(parts[told["part"]])
    return data if found == "bytes" else _made(told, array_of("a cached sample", data, Limits()).copy(), models)


def _made(told: dict[str, Any], array: Any, models: dict[str, Any]) -> Any:
    if told["kind"] == "tensor":
        return models[told["like"]].new_tensor(array)
    if told["kind"] == "image":
        return library("PIL.Image").fromarray(array)
    return array[()] if told["kind"] == "scalar" else array


def _npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(array).reshape(array.shape), allow_pickle=False)
    return file.getvalue()
