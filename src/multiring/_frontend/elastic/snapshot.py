"""A value in one array of bytes: pickled, with its arrays as they are, so that they are copied once and fast."""

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring._frontend.object_collectives import pickler_class

Bytes = NDArray[np.uint8]
_ALIGNMENT = 64
_viewers: list[Callable[[Any], Any]] = []


def add_viewer(view: Callable[[Any], Any]) -> None:
    """Make arrays of a framework go into snapshots without being pickled.

    Args:
        view: returns an array's form as `__reduce__` does, with a `pickle.PickleBuffer` of its memory; or
            NotImplemented for other objects.
    """
    _viewers.append(view)


class Outline:
    """A value that is about to be copied into an array; its arrays are not copied yet.

    Raises:
        Exception: as pickling does.
    """

    def __init__(self, value: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        _pickler()(stream, protocol=5, buffer_callback=buffers.append).dump(value)
        parts = [np.frombuffer(stream.getbuffer(), np.uint8)]
        parts += [np.frombuffer(each.raw(), np.uint8) for each in buffers]
        sizes = np.array([len(parts), *map(len, parts)], np.int64)
        self._parts = [sizes.view(np.uint8), *parts]
        self.size_bytes = sum(_room(each) for each in self._parts)

    def copy_into(self, array: Bytes) -> None:
        """Copy the value into the first `size_bytes` bytes of `array`."""
        at = 0
        for each in self._parts:
            array[at : at + len(each)] = each
            at += _room(each)


def value_in(array: Bytes, *, shares: bool = False) -> Any:
    """Return a value that was copied into `array`.

    Unpickling is safe here for the reason that multiring._frontend.object_collectives gives.

    Args:
        array: the memory.
        shares: whether the value's arrays stay in `array`. Otherwise they have their own memory.
    """
    count = int(array[:8].view(np.int64)[0])
    sizes = array[8 : 8 * (count + 1)].view(np.int64).tolist()
    at, parts = _padded(8 * (count + 1)), []
    for size in sizes:
        parts.append(array[at : at + size])
        at += _padded(size)
    buffers = parts[1:] if shares else [bytearray(each) for each in parts[1:]]
    return pickle.loads(parts[0].tobytes(), buffers=buffers)  # noqa: S301 -- see above


def _room(part: Bytes) -> int:
    return _padded(len(part))


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _pickler() -> Any:
    class SnapshotPickler(pickler_class()):  # type: ignore[misc] # found at run time
        def reducer_override(self, obj: Any) -> Any:
            for view in _viewers:
                found = view(obj)
                if found is not NotImplemented:
                    return found
            return super().reducer_override(obj)

    return SnapshotPickler
