"""The file of `multiring run --options`: the command line's options, by their names, in TOML."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from multiring.errors import ArgumentError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SHOWN = 100


def _text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _variables(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _words(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(word, str) for word in value)


# Key -> (what it has to be, in words; whether a value is; what the command line calls it; how it gets there).
_KEYS: Mapping[str, tuple[str, Callable[[object], bool], str, Callable[[Any], Any]]] = MappingProxyType(
    {
        "ranks": ("an integer >= 1", lambda value: _count(value) and value != 0, "ranks", int),
        "hosts": ("text like a:4,b:4", _text, "hosts", str),
        "hostfile": ("the path of a file", _text, "hostfile", Path),
        "horovod": ("true or false", lambda value: isinstance(value, bool), "horovod", bool),
        "timeline": ("the path of a file", _text, "timeline", Path),
        "env": (
            "a table of texts",
            _variables,
            "env",
            lambda table: [f"{name}={text}" for name, text in table.items()],
        ),
        "stdin": ("a rank", _count, "stdin", int),
        "grace": ("seconds", _number, "grace", float),
        "max-restarts": ("an integer >= 0", _count, "max_restarts", int),
        "log-dir": ("the path of a folder", _text, "log_dir", Path),
        "command": ("a list of words", _words, "command", list),
    }
)


def read_options(path: Path) -> dict[str, Any]:
    """Return the options in the file at `path`, by the names that the command line's parser has for them.

    `command` is what is run where the command line has none.

    Raises:
        ArgumentError: it cannot be read, is no TOML, has an unknown key, or a value that cannot be.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ArgumentError(f"cannot read the options in {path}: {error}") from None
    made: dict[str, Any] = {}
    for key, value in table.items():
        if key not in _KEYS:
            raise ArgumentError(f"{path}: unknown option {key!r}, want one of {', '.join(_KEYS)}")
        wanted, is_right, name, convert = _KEYS[key]
        if not is_right(value):
            raise ArgumentError(f"{path}: {key} = {repr(value)[:_SHOWN]}: want {wanted}")
        made[name] = convert(value)
    if "hosts" in made and "hostfile" in made:
        raise ArgumentError(f"{path}: hosts and hostfile say the same thing; leave one out")
    return made
