"""Nested values as JSON and named arrays, and back; nothing of it is code that loading would run.

In the JSON an object with one key that begins with "$" stands for what JSON has not: an array by the name under which
it is stored, a tuple, a dict whose keys are no strings.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from multiring.errors import ArgumentError

ARRAY, NUMPY, TUPLE, ITEMS, FLOAT = "$array", "$numpy", "$tuple", "$items", "$float"


class Stored(NamedTuple):
    """An array as bytes."""

    dtype: str  # by NumPy's name
    shape: tuple[int, ...]
    data: Any  # bytes, or what is seen as such


def array_of(stored: Stored) -> NDArray[Any]:
    """Return NumPy's array of the stored bytes; it has their memory."""
    kind = np.dtype(ml_dtypes.bfloat16 if stored.dtype == "bfloat16" else stored.dtype)
    return np.frombuffer(stored.data, kind).reshape(stored.shape)


class Arrays(Protocol):
    """What an adapter knows of its framework's arrays."""

    def is_array(self, value: Any) -> bool:
        """Return whether `value` is one of them."""

    def dump(self, array: Any) -> Stored:
        """Return an array's bytes, row by row."""

    def make(self, stored: Stored) -> Any:
        """Return an array of its own memory."""


class NumpyArrays:
    """NumPy's own, which every adapter has beside its framework's."""

    def is_array(self, value: Any) -> bool:
        """Return whether `value` is one of them."""
        return isinstance(value, np.ndarray)

    def dump(self, array: Any) -> Stored:
        """Return an array's bytes, row by row."""
        return Stored(array.dtype.name, array.shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    def make(self, stored: Stored) -> Any:
        """Return an array of its own memory."""
        return array_of(stored._replace(data=bytearray(stored.data)))


_NUMPY = NumpyArrays()


def flattened(value: Any, name: str, arrays: Arrays, stored: dict[str, Stored]) -> Any:
    """Return `value` as JSON has it, and put its arrays into `stored`.

    Args:
        value: made of dicts, lists, tuples, arrays, numbers, strings, booleans and None.
        name: what it is called in names and errors.
        arrays: of the framework.
        stored: by name; what is put in lies below `name`.

    Raises:
        ArgumentError: something in it is none of these.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {FLOAT: str(value)}
    for kind, tag in ((arrays, ARRAY), (_NUMPY, NUMPY)):
        if kind.is_array(value):
            stored[name] = kind.dump(value)
            return {tag: name}
    if isinstance(value, Mapping | list | tuple):
        return _flat_container(value, name, arrays, stored)
    raise ArgumentError(
        f"{name} is a {type(value).__name__}; want arrays, numbers, strings, booleans, None, and dicts, lists and "
        "tuples of these, or an object with state_dict and load_state_dict"
    )


def _flat_container(value: Any, name: str, arrays: Arrays, stored: dict[str, Stored]) -> Any:
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    found = [(key, flattened(each, f"{name}.{key}", arrays, stored)) for key, each in pairs]
    if isinstance(value, list | tuple):
        flat = [each for _, each in found]
        return flat if isinstance(value, list) else {TUPLE: flat}
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return dict(found)
    return {ITEMS: [[flattened(key, f"{name}'s keys", arrays, stored), each] for key, each in found]}


def unflattened(tree: Any, arrays: Arrays, stored: Mapping[str, Stored]) -> Any:
    """Return what `flattened` made `tree` and `stored` of.

    Raises:
        ArgumentError: the tree names an array that is not stored, or says something that this version does not know; or
            it is damaged.
    """
    if isinstance(tree, list):
        return [unflattened(each, arrays, stored) for each in tree]
    if not isinstance(tree, dict):
        return tree
    tag = next(iter(tree), "") if len(tree) == 1 else ""
    if not tag.startswith("$"):
        return {key: unflattened(each, arrays, stored) for key, each in tree.items()}
    try:
        return _tagged(tag, tree[tag], arrays, stored)
    except ArgumentError:
        raise
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"the checkpoint is damaged: {tag} of {str(tree[tag])[:40]}: {error}") from error


def _tagged(tag: str, body: Any, arrays: Arrays, stored: Mapping[str, Stored]) -> Any:
    if tag in {ARRAY, NUMPY}:
        if body not in stored:
            raise ArgumentError(f"the checkpoint's array {body!r} is named, and not there; want all of its files")
        return (arrays if tag == ARRAY else _NUMPY).make(stored[body])
    if tag == TUPLE:
        return tuple(unflattened(each, arrays, stored) for each in body)
    if tag == ITEMS:
        return {_hashable(unflattened(key, arrays, stored)): unflattened(each, arrays, stored) for key, each in body}
    if tag == FLOAT:
        return float(body)
    raise ArgumentError(f"the checkpoint has {tag!r}, which this version does not know; was it saved by a newer one?")


def names_in(tree: Any) -> Iterator[str]:
    """Yield the names of a tree's arrays, in its order."""
    if isinstance(tree, list):
        for each in tree:
            yield from names_in(each)
    elif isinstance(tree, dict):
        for key, each in tree.items():
            if key in {ARRAY, NUMPY}:
                yield each
            else:
                yield from names_in(each)


def first_difference(saved: Mapping[str, Stored], own: Mapping[str, Stored]) -> str:
    """Return how the arrays of a model's checkpoint differ from its own, by the first that does; "" if none does."""
    for key, mine in own.items():
        if key not in saved:
            return f"{key} is not in the checkpoint"
        theirs = saved[key]
        if theirs.shape != mine.shape:
            return f"{key} is of shape {theirs.shape} in the checkpoint, and of shape {mine.shape} here"
    more = next((key for key in saved if key not in own), None)
    return "" if more is None else f"{more} is in the checkpoint, and not here"


def _hashable(key: Any) -> Any:
    return tuple(map(_hashable, key)) if isinstance(key, Sequence) and not isinstance(key, str) else key
