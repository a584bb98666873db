"""Saved values come back with their types and bits; values that cannot be saved are rejected by name."""

import enum
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.support.checkpoint_trees import loaded, same, saved

from multiring.errors import ArgumentError

ML_TYPES: list[Any] = [
    each
    for name in dir(ml_dtypes)
    if isinstance(each := getattr(ml_dtypes, name), type) and issubclass(each, np.generic)
]
NUMPY_TYPES: list[Any] = [
    *("?", "b", "B", "h", "H", "i", "I", "l", "L", "q", "Q", "e", "f", "d", "F", "D"),
    *(f"{order}{kind}" for order in "<>" for kind in ("i2", "u4", "i8", "f2", "f4", "f8", "c8", "c16", "U3", "M8[ns]")),
    *("S5", "m8[s]", "V7", "U0"),
    *([("a", ">i4"), ("b", "f8", (2,))], [("x", [("y", "u1"), ("z", "U2")])]),
]


def each_layout(dtype: "np.dtype[Any]") -> Iterator[Any]:
    """Yield arrays of a type with random bits, in several shapes and layouts, and a scalar."""
    generator = np.random.default_rng(1)
    for shape in ((), (0,), (3,), (2, 0, 3), (4, 5)):
        array = np.zeros(shape, dtype)
        if array.nbytes and "U" not in str(dtype):
            array = np.frombuffer(generator.bytes(array.nbytes), np.uint8).view(dtype).reshape(shape)
        yield from (array, np.asfortranarray(array), array[::-1] if array.ndim else array, array.T)
    if isinstance(scalar := np.zeros(1, dtype)[0], np.generic):
        yield scalar


def test_every_type_of_array_and_scalar_comes_back(tmp_path: Path) -> None:
    value = {str(kind): list(each_layout(np.dtype(kind))) for kind in (*ML_TYPES, *NUMPY_TYPES)}
    assert len(value) == len(ML_TYPES) + len(NUMPY_TYPES)
    found = loaded(saved(tmp_path / "c", value))
    assert list(found) == list(value)
    assert [kind for kind, each in value.items() if not same(found[kind], each)] == []


def test_other_readers_read_what_they_know(tmp_path: Path) -> None:
    arrays = {f"a{number}": np.arange(6).astype(kind) for number, kind in enumerate(("?", "u2", "f2", "f4", "i8"))}
    arrays["odd"] = np.arange(3, dtype=">i4")
    saved(tmp_path / "c", arrays)
    (file,) = (tmp_path / "c").rglob("*.safetensors")
    found = load_file(file)
    for name, array in arrays.items():
        assert same(found[f"all.{name}"], array if name != "odd" else array.view(np.uint8).reshape(3, 4))


class Color(enum.IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")  # noqa: PYI024 -- what programs have
REFUSED = {
    "objects": (np.array([{}, 1], object), "all.x is an array of objects"),
    "fields of objects": (np.zeros(1, [("a", "O")]), "all.x is an array of objects"),
    "masked": (np.ma.masked_array([1, 2], [True, False]), "all.x is a MaskedArray, which would be loaded as a plain"),
    "records": (np.rec.array([(1, 2.0)], "i4,f8"), "all.x is a recarray"),
    "longdouble": (np.ones(1, np.longdouble), "all.x is of type .*, whose bits differ between processors"),
    "long scalar": (np.longdouble(1), "all.x is of type"),
    "set": ({1}, "all.x is a set; want arrays"),
    "function": (print, "all.x is a builtin_function_or_method; want"),
    "enum": (Color.RED, r"all.x is a Color, which would be loaded as a int: want int\(value\)"),
    "named tuple": (Point(1, 2), r"all.x is a Point, which would be loaded as a tuple: want tuple\(value\)"),
    "dict of a kind": (type("Own", (dict,), {})(a=1), "all.x is a Own, which would be loaded as a dict"),
    "default": (defaultdict(lambda: 1), "all.x is a defaultdict with factory"),
    "array as key": ({(): {(1, Color.RED): 1}}, "key .* is a Color"),
    "text of any length": (np.zeros(1, np.dtypes.StringDType()) if hasattr(np.dtypes, "StringDType") else {1}, "all.x"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_come_back_as_something_else_is_refused(what: str, tmp_path: Path) -> None:
    value, text = REFUSED[what]
    with pytest.raises(ArgumentError, match=text):
        saved(tmp_path / "c", {"x": value})


def test_what_contains_itself_is_refused(tmp_path: Path) -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ArgumentError, match="deeper than 100 levels, or contains itself"):
        saved(tmp_path / "c", value)


HOSTILE = [
    *(
        "",
        ".",
        "..",
        "/",
        "a",
        "a.b",
        "a.b.c",
        "b",
        "c",
        "\0",
        "a\0b",
        "\n",
        "a/b",
        "../x",
        "$array",
        "$tuple",
        "$items",
    ),
    *(
        "a#2",
        "all.a",
        "__metadata__",
        "é",
        "e\u0301",
        "\ud83d\ude00",
        "\U0001f600",
        "\ud800",
        "1",
        "True",
        "None",
        "1.0",
    ),
    *("x" * 300, "x" * 299 + "y", "(1, 2)", "nan"),
    *(0, 1, -1, 2**70, 1.5, 2.5, float("inf"), None, (), (1, 2), ("a", ("b",)), b"", b"a", 1j),
    *(np.float32(1.25), np.int8(7), np.datetime64("2026-11-25")),
]


def array_of(chosen: random.Random) -> Any:
    shape = tuple(chosen.choice((0, 1, 2, 3)) for _ in range(chosen.randrange(3)))
    return np.random.default_rng(chosen.randrange(1 << 30)).integers(0, 100, shape).astype(chosen.choice("?bHfdD"))


def container_of(chosen: random.Random, depth: int) -> Any:
    inner = [values(chosen, depth - 1) for _ in range(chosen.randrange(5))]
    pairs = list(zip(chosen.sample(HOSTILE, len(inner)), inner, strict=True))
    made: list[Callable[[], Any]] = [
        *(lambda: inner, lambda: tuple(inner), lambda: deque(inner, chosen.choice((None, 9)))),
        *(
            lambda: OrderedDict(pairs),
            lambda: defaultdict(chosen.choice((list, int, None)), pairs),
            lambda: dict(pairs),
        ),
        lambda: Counter({key: chosen.randrange(9) for key, _ in pairs}),
    ]
    return chosen.choice(made)()


def values(chosen: random.Random, depth: int) -> Any:
    """Return a random value composed of everything that can be saved."""
    if depth and chosen.random() < 0.5:
        return container_of(chosen, depth)
    made: list[Callable[[], Any]] = [
        lambda: array_of(chosen),
        lambda: chosen.choice(HOSTILE),
        lambda: struct.unpack("<d", chosen.randbytes(8))[0],
        lambda: chosen.choice((True, False, chosen.getrandbits(chosen.choice((3, 62, 63, 64, 200))))),
    ]
    return chosen.choice(made)()


def test_random_values_under_hostile_names_come_back(tmp_path: Path) -> None:
    for seed in range(6):
        chosen = random.Random(seed)  # noqa: S311 -- no secret
        value = [{key: values(chosen, 3) for key in chosen.sample(HOSTILE, 4)} for _ in range(60)]
        found = loaded(saved(tmp_path / "c", value))
        assert [each for each, wanted in zip(found, value, strict=True) if not same(each, wanted)] == []


def test_a_number_that_is_none_keeps_its_bits(tmp_path: Path) -> None:
    (odd,) = struct.unpack("<d", bytes.fromhex("010000000000f8ff"))
    found = loaded(saved(tmp_path / "c", [odd, -math.inf, -0.0]))
    assert struct.pack("<3d", *found) == struct.pack("<3d", odd, -math.inf, -0.0)
