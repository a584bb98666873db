"""Convert nested values to JSON and named arrays, and back. Loading never runs code from the file.

In the JSON, an object with a single key that begins with "$" represents a value that JSON lacks. Examples are an array
(its stored name, type and shape), a tuple, and a dict whose keys are not strings. Array names are chosen for human
readers. The tree alone says where each array belongs, so different keys cannot collide. Saving rejects values that
could not be restored exactly.
"""

import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from multiring._frontend.checkpoint.arrays import (
    NUMPY,
    Arrays,
    Kind,
    Outgoing,
    numpy_kind,
    scalar_bytes,
    scalar_of,
    shape_of,
    shown,
)
from multiring.errors import ArgumentError

ARRAY, NUMPY_ARRAY, SCALAR = "$array", "$numpy", "$scalar"
TUPLE, ITEMS, ORDERED, STATE, COUNTER, DEFAULT, DEQUE = (
    "$tuple",
    "$items",
    "$ordered",
    "$state",
    "$counter",
    "$default",
    "$deque",
)
FLOAT, INT, COMPLEX, BYTES, TEXT, SPECIAL = "$float", "$int", "$complex", "$bytes", "$text", "$special"
MOST_DEEP = 100
_JSON_INT = 1 << 63
_NAME_LENGTH = 200
_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "none": None,
    **{each.__name__: each for each in (bool, dict, float, int, list, str, tuple)},
}
_WANTED = (
    "want arrays, numbers, strings, booleans, None, and dicts, lists and tuples of these, or an object with state_dict "
    "and load_state_dict"
)


class Special(NamedTuple):
    """Converts values of one type of a framework to plain values, and back."""

    plain: Callable[[Any], Any]
    value: Callable[[Any], Any]


class Ref(NamedTuple):
    """A tree's reference to an array."""

    name: str
    is_numpy: bool
    kind: Kind
    shape: tuple[int, ...]


class Flattener:
    """Turns values into trees, and collects their arrays in `arrays`, by name."""

    def __init__(self, arrays: Arrays, special: Mapping[type, Special] | None = None) -> None:
        self.arrays: dict[str, Outgoing] = {}
        self._arrays = arrays
        self._special = special or {}

    def tree(self, value: Any, name: str, depth: int = 0) -> Any:
        """Return `value` in a form for JSON, and collect its arrays.

        Args:
            value: consists of dicts, lists, tuples, arrays, numbers, strings, booleans and None.
            name: the value's name, for names of arrays and for errors.
            depth: the number of containers around the value.

        Raises:
            ArgumentError: a value inside could not be restored exactly.
        """
        if depth > MOST_DEEP:
            raise ArgumentError(
                f"{shown(name)} is nested deeper than {MOST_DEEP} levels, or contains itself: want fewer levels"
            )
        if isinstance(value, np.generic):
            return {SCALAR: [numpy_kind(value.dtype, name), scalar_bytes(value).hex()]}
        for known, tag in ((self._arrays, ARRAY), (NUMPY, NUMPY_ARRAY)):
            if known.is_array(value):
                return {tag: self._kept(known.outgoing(value, name), name)}
        kind = type(value)
        if kind in _PLAIN:
            return _PLAIN[kind](value)
        if kind in _CONTAINERS:
            return _CONTAINERS[kind](self, value, name, depth)
        if kind in self._special:
            plain = self.tree(self._special[kind].plain(value), name, depth + 1)
            return {SPECIAL: [kind.__name__, plain]}
        near = next((each for each in (*_CONTAINERS, *_PLAIN) if isinstance(value, each)), None)
        if near is not None or isinstance(value, Mapping):
            raise ArgumentError(
                f"{shown(name)} is a {kind.__name__}, which would be loaded as a {(near or dict).__name__}: want "
                f"{(near or dict).__name__}(value)"
            )
        raise ArgumentError(f"{shown(name)} is a {kind.__name__}; {_WANTED}")

    def _kept(self, outgoing: Outgoing, name: str) -> list[Any]:
        key = free = _key_of(name)
        number = 1
        while free in self.arrays or free == "__metadata__":
            number += 1
            free = f"{key}#{number}"
        self.arrays[free] = outgoing
        return [free, outgoing.kind, list(outgoing.shape)]

    def _each(self, values: Any, name: str, depth: int) -> list[Any]:
        return [self.tree(each, f"{name}.{number}", depth + 1) for number, each in enumerate(values)]

    def pairs(self, value: Mapping[Any, Any], name: str, depth: int) -> Any:
        """Return a mapping as a JSON object, or as a list of pairs.

        It is an object if all keys are plain strings.
        """
        if all(type(key) is str and not key.startswith("$") and not _has_surrogates(key) for key in value):
            return {key: self.tree(each, f"{name}.{key}", depth + 1) for key, each in value.items()}
        return [
            [self._key(key, name, depth + 1), self.tree(each, f"{name}.{_said(key)}", depth + 1)]
            for key, each in value.items()
        ]

    def _key(self, key: Any, name: str, depth: int) -> Any:
        for known in (self._arrays, NUMPY):
            if known.is_array(key):
                raise ArgumentError(f"{shown(name)} has an array among its keys; want numbers, strings or tuples")
        return self.tree(key, f"{name}'s key {_said(key)}", depth)

    def dict(self, value: dict[Any, Any], name: str, depth: int) -> Any:
        """Return the tree of a dict."""
        pairs = self.pairs(value, name, depth)
        return pairs if isinstance(pairs, dict) else {ITEMS: pairs}

    def ordered(self, value: "OrderedDict[Any, Any]", name: str, depth: int) -> Any:
        """Return the tree of an OrderedDict, with the metadata that state_dicts of torch's modules have."""
        pairs = self.pairs(value, name, depth)
        metadata = getattr(value, "_metadata", None)
        if metadata is None:
            return {ORDERED: pairs}
        return {STATE: [pairs, self.tree(dict(metadata), f"{name}._metadata", depth + 1)]}

    def defaults(self, value: "defaultdict[Any, Any]", name: str, depth: int) -> Any:
        """Return the tree of a defaultdict whose factory is a built-in type or None."""
        factory = next((key for key, each in _FACTORIES.items() if each is value.default_factory), None)
        if factory is None:
            raise ArgumentError(
                f"{shown(name)} is a defaultdict with factory {value.default_factory}: want dict(value)"
            )
        return {DEFAULT: [factory, self.pairs(value, name, depth)]}

    def deque(self, value: "deque[Any]", name: str, depth: int) -> Any:
        """Return the tree of a deque."""
        return {DEQUE: [value.maxlen, self._each(value, name, depth)]}


_CONTAINERS: dict[type, Callable[[Flattener, Any, str, int], Any]] = {
    dict: Flattener.dict,
    list: Flattener._each,  # noqa: SLF001 -- private to this module
    tuple: lambda made, value, name, depth: {TUPLE: made._each(value, name, depth)},  # noqa: SLF001
    OrderedDict: Flattener.ordered,
    Counter: lambda made, value, name, depth: {COUNTER: made.pairs(value, name, depth)},
    defaultdict: Flattener.defaults,
    deque: Flattener.deque,
}


def _flat_float(value: float) -> Any:
    if math.isnan(value):
        return {FLOAT: struct.pack("<d", value).hex()}  # hexadecimal, to keep the bits of the NaN
    return value if math.isfinite(value) else {FLOAT: str(value)}


_PLAIN: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: lambda value: value if -_JSON_INT <= value < _JSON_INT else {INT: hex(value)},
    float: _flat_float,
    str: lambda value: {TEXT: value.encode("utf-32-le", "surrogatepass").hex()} if _has_surrogates(value) else value,
    complex: lambda value: {COMPLEX: struct.pack("<dd", value.real, value.imag).hex()},
    bytes: lambda value: {BYTES: value.hex()},
}


def _has_surrogates(text: str) -> bool:
    """Return whether a text has surrogates; JSON would merge a pair of them into one character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _said(key: Any) -> str:
    return key if isinstance(key, str) else repr(key)[:_NAME_LENGTH]


def _key_of(name: str) -> str:
    """Return an array's name in the file, shortened and printable, because other programs may reject other names."""
    if len(name) > _NAME_LENGTH:
        name = f"{name[: _NAME_LENGTH - 40]}...{name[-37:]}"
    return name if name.isprintable() else "".join(each if each.isprintable() else "?" for each in name)


def refs_in(tree: Any, depth: int = 0) -> Iterator[Ref]:
    """Yield a tree's references to arrays, in the order of the tree.

    Raises:
        ArgumentError: the tree is damaged.
    """
    if depth > 4 * MOST_DEEP:
        raise ArgumentError("the checkpoint is damaged: its values are nested too deeply")
    if isinstance(tree, list):
        for each in tree:
            yield from refs_in(each, depth + 1)
        return
    if not isinstance(tree, dict):
        return
    for key, each in tree.items():
        if len(tree) == 1 and key in {ARRAY, NUMPY_ARRAY}:
            yield ref_of(key, each)
        elif len(tree) == 1 and key == SCALAR:
            continue
        else:
            yield from refs_in(each, depth + 1)


def ref_of(tag: str, body: Any) -> Ref:
    """Return the reference to an array from the value of its tag.

    Raises:
        ArgumentError: the value is damaged.
    """
    try:
        name, kind, shape = body
        if not isinstance(name, str) or not isinstance(kind, str | list):
            raise TypeError(f"{name!r} of type {kind!r}")  # noqa: TRY301 -- handled below, like other errors here
        return Ref(name, tag == NUMPY_ARRAY, kind, shape_of(shape))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"the checkpoint is damaged: {tag} of {str(body)[:40]}: {error}") from error


def resolved(tree: Any, described: Callable[[Any], tuple[Kind, tuple[int, ...]]]) -> Any:
    """Add types and shapes to a tree of multiring 0.2, which has only the names of its arrays."""
    if isinstance(tree, list):
        return [resolved(each, described) for each in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1 and next(iter(tree)) in {ARRAY, NUMPY_ARRAY}:
        ((tag, name),) = tree.items()
        kind, shape = described(name)
        return {tag: [name, kind, list(shape)]}
    return {key: resolved(each, described) for key, each in tree.items()}


def entries_of(tree: Any) -> dict[Any, Any]:
    """Return the entries of a tree that represents a mapping with strings as keys.

    The result is empty for any other tree.
    """
    if not isinstance(tree, dict):
        return {}
    if len(tree) == 1:
        (tag,) = tree
        if tag == STATE and isinstance(tree[tag], list) and tree[tag]:
            return tree[tag][0] if isinstance(tree[tag][0], dict) else {}
        if tag == ORDERED:
            return tree[tag] if isinstance(tree[tag], dict) else {}
        if tag.startswith("$"):
            return {}
    return tree


class Builder:
    """Turns trees back into values.

    Args:
        made: the arrays by name.
        special: conversions of the framework's types.
    """

    def __init__(self, made: Mapping[str, Any], special: Mapping[type, Special] | None = None) -> None:
        self._made = made
        self._special = {kind.__name__: each for kind, each in (special or {}).items()}

    def value(self, tree: Any) -> Any:
        """Return the value that the tree represents.

        Raises:
            ArgumentError: the tree refers to a missing array, has a tag that this version does not know, or is damaged.
        """
        if isinstance(tree, list):
            return [self.value(each) for each in tree]
        if not isinstance(tree, dict):
            return tree
        tag = next(iter(tree), "") if len(tree) == 1 else ""
        if not tag.startswith("$"):
            return {key: self.value(each) for key, each in tree.items()}
        try:
            return self._tagged(tag, tree[tag])
        except ArgumentError:
            raise
        except (TypeError, ValueError, KeyError, AttributeError, struct.error) as error:
            raise ArgumentError(f"the checkpoint is damaged: {tag} of {str(tree[tag])[:40]}: {error}") from error

    def _tagged(self, tag: str, body: Any) -> Any:
        if tag in {ARRAY, NUMPY_ARRAY}:
            ref = ref_of(tag, body)
            if ref.name not in self._made:
                raise ArgumentError(f"the checkpoint's array {ref.name!r} is missing; want all files of the checkpoint")
            return self._made[ref.name]
        if tag == SPECIAL:
            name, plain = body
            return self._special[name].value(self.value(plain))
        read = _READ.get(tag)
        if read is None:
            raise ArgumentError(
                f"the checkpoint has {tag!r}, which this version does not know; was it saved by a newer one?"
            )
        return read(self, body)

    def pairs(self, body: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the keys and values of a mapping."""
        if isinstance(body, dict):
            for key, each in body.items():
                yield key, self.value(each)
            return
        for key, each in body:
            yield _hashable(self.value(key)), self.value(each)

    def state(self, body: Any) -> "OrderedDict[Any, Any]":
        """Return a state_dict with its metadata."""
        pairs, metadata = body
        found: OrderedDict[Any, Any] = OrderedDict(self.pairs(pairs))
        vars(found)["_metadata"] = OrderedDict(self.value(metadata))  # the attribute in which torch stores the metadata
        return found


_READ: dict[str, Callable[[Builder, Any], Any]] = {
    TUPLE: lambda made, body: tuple(made.value(each) for each in body),
    ITEMS: lambda made, body: dict(made.pairs(body)),
    ORDERED: lambda made, body: OrderedDict(made.pairs(body)),
    STATE: Builder.state,
    COUNTER: lambda made, body: Counter(dict(made.pairs(body))),
    DEFAULT: lambda made, body: defaultdict(_FACTORIES[body[0]], made.pairs(body[1])),
    DEQUE: lambda made, body: deque((made.value(each) for each in body[1]), body[0]),
    SCALAR: lambda _, body: scalar_of(body[0], bytes.fromhex(body[1])),
    FLOAT: lambda _, body: _float_of(body),
    INT: lambda _, body: int(body, 16),
    COMPLEX: lambda _, body: complex(*struct.unpack("<dd", bytes.fromhex(body))),
    BYTES: lambda _, body: bytes.fromhex(body),
    TEXT: lambda _, body: bytes.fromhex(body).decode("utf-32-le", "surrogatepass"),
}


def _float_of(text: str) -> float:
    if len(text) == 16:  # the bits of a NaN
        (value,) = struct.unpack("<d", bytes.fromhex(text))
        return float(value)
    return float(text)


def _hashable(key: Any) -> Any:
    """Return a key with lists turned into tuples: multiring 0.2 saved tuples as lists."""
    return tuple(map(_hashable, key)) if isinstance(key, list) else key
