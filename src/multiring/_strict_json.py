"""Read JSON files that a measurement was written to: nothing ambiguous passes, and an error names the line.

Python's reader accepts a key twice, NaN, infinite numbers and integers of any length. None of these is meant.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from json.decoder import JSONArray, JSONObject, scanstring  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any, TypeVar

from multiring.errors import ArgumentError

_MOST_DIGITS = 19  # of an integer: 64 bits hold no more
_MOST = 2.0**63
_SPACE = " \t\n\r"

Path = tuple[str | int, ...]  # the keys and indices that lead to a value
Found = TypeVar("Found")


class _RefusedError(ValueError):
    """A value that is valid for Python's reader. `token` is its text in the file."""

    def __init__(self, token: str, words: str) -> None:
        super().__init__(words)
        self.token, self.words = token, words
        self.begin: int | None = None  # of the innermost object or array around it


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _RefusedError(json.dumps(twice), f"the field {twice!r} is there twice: want each once")
    return found


def _refuse_constant(token: str) -> Any:
    raise _RefusedError(token, f"{token}: want a finite number")


def _float_of(token: str) -> float:
    value = float(token)
    if math.isinf(value):
        raise _RefusedError(token, f"{token}: want a number that 64 bits can hold")
    return value


def _int_of(token: str) -> int:
    if len(token.lstrip("-")) > _MOST_DIGITS:
        raise _RefusedError(token, f"{token[:_MOST_DIGITS]}...: want a number that 64 bits can hold")
    return int(token)


_HOOKS: dict[str, Any] = {
    "object_pairs_hook": _refuse_twice,
    "parse_constant": _refuse_constant,
    "parse_float": _float_of,
    "parse_int": _int_of,
}


def strict_json(text: str, *, with_nan: bool = False) -> Any:
    """Return the value that `text` describes.

    Args:
        text: the file's text.
        with_nan: whether NaN and Infinity are values, as in the loss of a training that has diverged.

    Raises:
        ArgumentError: it is not JSON, has a field twice, a number that is not finite or that 64 bits cannot hold, or is
            nested too deeply. The error names the line.
    """
    try:
        return json.loads(text, **(_HOOKS | {"parse_constant": float} if with_nan else _HOOKS))
    except _RefusedError as error:
        raise ArgumentError(f"line {_line_of_refused(text)}: {error.words}") from None
    except json.JSONDecodeError as error:
        raise ArgumentError(f"line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"not JSON: {error}") from None


def _line_of_refused(text: str) -> int:
    """Return the line of what the hooks refuse. They do not know it; this slower reader does."""
    decoder = _PlacingDecoder(**_HOOKS)
    try:
        decoder.decode(text)
    except _RefusedError as error:
        begin = error.begin or 0
        first = text.find(error.token, begin)
        # A field that is there twice is wrong where it is repeated.
        at = text.find(error.token, first + 1) if error.token.startswith('"') else first
        return _line_at(text, max(at, first, begin))
    except (ValueError, RecursionError):
        pass
    return 1


class _PlacingDecoder(json.JSONDecoder):
    """Reads in Python only, and notes where the innermost object or array around a refused value begins."""

    def __init__(self, **hooks: Any) -> None:
        super().__init__(**hooks)
        self.parse_object = self._placed(JSONObject)
        self.parse_array = self._placed(JSONArray)
        self.scan_once = py_make_scanner(self)

    @staticmethod
    def _placed(parse: Any) -> Any:
        def placed(s_and_end: tuple[str, int], *others: Any) -> Any:
            try:
                return parse(s_and_end, *others)
            except _RefusedError as error:
                error.begin = s_and_end[1] if error.begin is None else error.begin
                raise

        return placed


def line_of(text: str, path: Iterable[str | int]) -> int:
    """Return the line, from 1, of the value at `path` in valid JSON; of the last part of the path that is there."""
    at, decoder = _after_space(text, 0), json.JSONDecoder()
    for step in path:
        found = _member(text, at, step, decoder)
        if found is None:
            break
        at = found
    return _line_at(text, at)


def _member(text: str, at: int, step: str | int, decoder: json.JSONDecoder) -> int | None:
    """Return where a member of the object or array that begins at `at` begins."""
    if text[at] not in "{[":
        return None
    is_object, index = text[at] == "{", 0
    at = _after_space(text, at + 1)
    while text[at] not in "}]":
        key: str | int = index
        if is_object:
            key, at = scanstring(text, at + 1, True)
            at = _after_space(text, _after_space(text, at) + 1)
        if key == step:
            return at
        _, at = decoder.raw_decode(text, at)
        at = _after_space(text, at)
        at = _after_space(text, at + 1) if text[at] == "," else at
        index += 1
    return None


def _after_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _line_at(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


class WrongFieldError(Exception):
    """A field of a JSON file that is wrong: its path, and what is wrong with it."""

    def __init__(self, path: Path, words: str) -> None:
        super().__init__(words)
        self.path, self.words = path, words

    def in_text(self, text: str) -> ArgumentError:
        """Return the error for the reader of the file with this text."""
        shown = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in self.path).removeprefix(".")
        where = f", field {shown}" if shown else ""
        return ArgumentError(f"line {line_of(text, self.path)}{where}: {self.words}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFormat:
    """A kind of JSON file with a version.

    field: the field that holds the version.
    version: the version that this code reads and writes.
    wanted: what an error says about a file of another kind: `want ...`.
    anew: what an error says about a file of another version: how to make the file anew.
    refusal: what precedes the error about a file of another kind.
    """

    field: str
    version: int
    wanted: str
    anew: str
    refusal: str = ""

    @property
    def head(self) -> dict[str, int]:
        """The first field of such a file."""
        return {self.field: self.version}

    def read(self, text: str, build: Callable[[dict[str, Any]], Found]) -> Found:
        """Return what `build` makes of the fields in `text` other than the version.

        Raises:
            ArgumentError: the text is no such file, or `build` has raised WrongFieldError. The error names the line and
                the field.
        """
        try:
            table = strict_json(text)
        except ArgumentError as error:
            raise ArgumentError(f"{self.refusal}{error}; {self.wanted}") from None
        if not isinstance(table, dict) or self.field not in table:
            raise ArgumentError(f'{self.refusal}no field "{self.field}"; {self.wanted}')
        try:
            self._require_version(table.pop(self.field))
            return build(table)
        except WrongFieldError as error:
            raise error.in_text(text) from None

    def _require_version(self, version: Any) -> None:
        if type(version) is not int or version != self.version:
            raise WrongFieldError((self.field,), f"want {self.version}: {self.anew}")


def table_at(value: Any, path: Path) -> Mapping[str, Any]:
    """Return `value`, which must be an object."""
    if not isinstance(value, dict):
        raise WrongFieldError(path, f"{_shown(value)}: want an object")
    return value


def rows_at(value: Any, path: Path) -> list[Any]:
    """Return `value`, which must be a list."""
    if not isinstance(value, list):
        raise WrongFieldError(path, f"{_shown(value)}: want a list")
    return value


def field_at(table: Mapping[str, Any], name: str, path: Path) -> Any:
    """Return the field of a table that must have it."""
    if name not in table:
        raise WrongFieldError(path, f"no field {name!r}")
    return table[name]


def text_at(table: Mapping[str, Any], name: str, path: Path) -> str:
    """Return a field that must be text."""
    value = field_at(table, name, path)
    if not isinstance(value, str):
        raise WrongFieldError((*path, name), f"{_shown(value)}: want text")
    return value


def count_at(table: Mapping[str, Any], name: str, path: Path, least: int = 0) -> int:
    """Return a field that must be a whole number, at least `least`."""
    value = field_at(table, name, path)
    if type(value) is not int or value < least:
        raise WrongFieldError((*path, name), f"{_shown(value)}: want a whole number, {least} or more")
    return value


def number_at(table: Mapping[str, Any], name: str, path: Path, least: float = 0.0) -> float:
    """Return a field that must be a number of at most 64 bits, at least `least`."""
    value = field_at(table, name, path)
    if type(value) not in (int, float) or not least <= value < _MOST:
        least_words = "" if least == -math.inf else f", {least:g} or more"
        raise WrongFieldError((*path, name), f"{_shown(value)}: want a number{least_words}")
    return float(value)


def require_fields(value: Any, kind: type, path: Path) -> None:
    """Raise WrongFieldError unless `value` has the fields of `kind`, a dataclass: texts, and numbers from 0.

    Fields that have a default may be missing.
    """
    table = table_at(value, path)
    types = {each.name: each.type for each in fields(kind)}
    for name in table:
        if name not in types:
            raise WrongFieldError((*path, name), f"unknown: want {', '.join(types)}")
    missing = [each.name for each in fields(kind) if each.default is MISSING and each.name not in table]
    if missing:
        raise WrongFieldError(path, f"{path[0] if path else 'the file'} lacks {', '.join(missing)}")
    for name, wanted in types.items():
        if name not in table:
            continue
        if wanted is str:
            text_at(table, name, path)
        elif wanted is int:
            count_at(table, name, path, 1)
        elif wanted is float:
            number_at(table, name, path)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 80 else f"{text[:77]}..."
