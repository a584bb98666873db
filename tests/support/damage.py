"""Damage files at random: values that are deleted, replaced, renamed or there twice, and texts that are cut."""

import copy
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from multiring.errors import ArgumentError

Path = tuple[str | int, ...]
# What a file of numbers must never say instead of a number.
NEVER = ("nan", "infinite", "negative", "boolean", "as text", "twice")
_OTHERS: tuple[Any, ...] = (None, [], {}, "", "x", 0, 1, 2.5, 1e300, 10**30, [[]], {"a": 1}, [1, 2], True, -1)


@dataclass(frozen=True, slots=True)
class Damaged:
    """A file's text after one change; `how` is the kind of the change, and `path` leads to it."""

    text: str
    how: str
    path: Path
    was: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """A reader of files, an intact file for it, and how to write such a file.

    `free` are the last parts of the paths of numbers that may be anything: nothing reads them, or they may be negative.
    """

    read: Callable[[str], Any]
    whole: Any
    write: Callable[[Any], str]
    free: tuple[str, ...] = ()
    takes_constants: bool = False  # NaN and infinity


def damaged(reader: Reader, count: int, seed: int) -> Iterator[Damaged]:
    """Yield files with one change each."""
    random = np.random.default_rng(seed)
    places = list(_places(reader.whole))
    for _ in range(count):
        path, value = places[random.integers(len(places))]
        ways = ["delete", "other", "rename", "cut", *(NEVER if _is_number(value) else ())]
        how = ways[random.integers(len(ways))]
        whole = copy.deepcopy(reader.whole)
        if how == "cut":
            text = reader.write(whole)
            yield Damaged(text[: random.integers(len(text))], how, path, value)
            continue
        marker = None
        around = _at(whole, path[:-1])
        if how == "delete":
            del around[path[-1]]
        elif how == "rename":
            if isinstance(path[-1], str):
                around[f"{path[-1]}s"] = around.pop(path[-1])
        elif how == "twice":
            if not isinstance(path[-1], str):
                continue
            marker = f"{path[-1]}-marked"
            around[marker] = value
        else:
            around[path[-1]] = _instead(how, value, random)
        text = reader.write(whole)
        if marker is not None:
            text = text.replace(marker, str(path[-1]))
        yield Damaged(text, how, path, value)


def complaint(reader: Reader, each: Damaged) -> str:
    """Return what is wrong with the way in which the reader takes a damaged file, or "".

    A reader either refuses a file by ArgumentError, or accepts it. It never accepts what is no number for a number.
    """
    try:
        reader.read(each.text)
    except ArgumentError:
        return ""
    except Exception as error:  # noqa: BLE001 -- any other error is what this looks for
        return f"{each.how} of {each.path} (was {each.was!r}): {error!r}"
    is_free = each.path[-1] in reader.free and each.how != "twice"
    if each.how not in NEVER or is_free or (reader.takes_constants and each.how in {"nan", "infinite"}):
        return ""
    return f"{each.how} of {each.path} (was {each.was!r}) was accepted"


def as_toml(whole: dict[str, Any]) -> str:
    """Return TOML with one line for each key of the top table."""
    return "".join(f"{json.dumps(key)} = {_toml(value)}\n" for key, value in whole.items() if value is not None)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        fields = ", ".join(f"{json.dumps(key)} = {_toml(each)}" for key, each in value.items() if each is not None)
        return f"{{{fields}}}"
    if isinstance(value, list):
        return f"[{', '.join(_toml(each) for each in value if each is not None)}]"
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": "nan", "inf": "inf", "-inf": "-inf"}[str(value)]
    return json.dumps(value)


def _places(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if path:
        yield path, value
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from _places(each, (*path, key))


def _at(whole: Any, path: Path) -> Any:
    for key in path:
        whole = whole[key]
    return whole


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _instead(how: str, value: Any, random: np.random.Generator) -> Any:
    if how == "other":
        return _OTHERS[random.integers(len(_OTHERS))]
    return {
        "nan": math.nan,
        "infinite": math.inf,
        "negative": -1 - value,
        "boolean": True,
        "as text": f"{value}",
    }[how]
