"""Messages between two ranks, as in MPI: objects and arrays.

The receiver does not need the size or the type of a message.
"""

import math
import pickle
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from multiring._frontend.errors import internal_errors
from multiring._runtime import Group
from multiring._runtime.arrays import numpy_dtype

_ANY = -1  # stands for MPI's ANY_TAG; MPI libraries use various numbers below 0


@dataclass(frozen=True, slots=True)
class _Header:
    tag: int
    is_object: bool  # the message is one array, which contains a pickle
    is_tuple: bool
    arrays: tuple[tuple[tuple[int, ...], str], ...]  # the shape and the type of each array


class Messages:
    """Sends and receives messages between the ranks of a group.

    Messages of one sender and one tag stay in order.

    Pickles come from ranks of the same job only; see _frontend/object_collectives.py.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._early: dict[int, list[tuple[_Header, Any]]] = defaultdict(list)  # sender -> messages of unwanted tags

    def send(self, data: Any, dest: int, tag: int) -> None:
        """Send an array, or a tuple or list of arrays, to rank `dest`."""
        is_tuple = isinstance(data, tuple | list)
        arrays = [np.asarray(each, order="C") for each in (data if is_tuple else [data])]
        named = tuple((each.shape, each.dtype.name) for each in arrays)
        self._send(_Header(tag, is_object=False, is_tuple=is_tuple, arrays=named), arrays, dest)

    def send_object(self, value: Any, dest: int, tag: int) -> None:
        """Send an object that can be pickled to rank `dest`."""
        array = np.frombuffer(bytearray(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)), np.uint8)
        self._send(_Header(tag, is_object=True, is_tuple=False, arrays=((array.shape, "uint8"),)), [array], dest)

    def receive(self, source: int, tag: int | None) -> Any:
        """Return the next message of `source` with `tag`, or with any tag for None.

        A message is an array, a tuple of arrays, or an object.
        """
        early = self._early[source]
        for place, (header, found) in enumerate(early):
            if _fits(header, tag):
                del early[place]
                return found
        while True:
            header, found = self._next(source)
            if _fits(header, tag):
                return found
            early.append((header, found))

    def _send(self, header: _Header, arrays: list[Any], dest: int) -> None:
        words = np.frombuffer(bytearray(pickle.dumps(header)), np.uint8)
        with internal_errors(f"send to rank {self._group.ranks[dest]}"):
            self._group.send(np.array([len(words)]), dest)
            for each in (words, *arrays):
                if each.size:
                    self._group.send(each, dest)

    def _next(self, source: int) -> tuple[_Header, Any]:
        with internal_errors(f"recv from rank {self._group.ranks[source]}"):
            size = np.empty(1, np.int64)
            self._group.recv(size, source)
            words = np.empty(int(size[0]), np.uint8)
            self._group.recv(words, source)
            header: _Header = pickle.loads(words.tobytes())  # noqa: S301 -- see the class
            arrays = [np.empty(shape, numpy_dtype(dtype)) for shape, dtype in header.arrays]
            for each in arrays:
                if math.prod(each.shape):
                    self._group.recv(each, source)
        if header.is_object:
            return header, pickle.loads(arrays[0].tobytes())  # noqa: S301 -- see the class
        return header, tuple(arrays) if header.is_tuple else arrays[0]


def _fits(header: _Header, tag: int | None) -> bool:
    return tag is None or tag <= _ANY or header.tag == tag
