"""Read the file of `multiring run --options`.

The file is a TOML table of the command line's options by name.
"""

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


# Key -> (the expected value in words, a check of a value, the attribute of the parsed arguments, a conversion).
_KEYS: Mapping[str, tuple[str, Callable[[object], bool], str, Callable[[Any], Any]]] = MappingProxyType(
    {
        "ranks": ("an integer >= 1", lambda value: _count(value) and value != 0, "ranks", int),
        "hosts": ("text like a:4,b:4", _text, "hosts", str),
        "hostfile": ("the path of a file", _text, "hostfile", Path),
        "launcher": ("ssh or mpiexec", lambda value: value in ("ssh", "mpiexec"), "launcher", str),
        "nodes": ("an integer >= 1", lambda value: _count(value) and value != 0, "nodes", int),
        "node-rank": ("an integer >= 0", _count, "node_rank", int),
        "meet": ("text like a:29400", _text, "meet", str),
        "here": ("true or false", lambda value: isinstance(value, bool), "here", bool),
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
        "min-ranks": ("an integer >= 1", lambda value: _count(value) and value != 0, "min_ranks", int),
        "max-ranks": ("an integer >= 1", lambda value: _count(value) and value != 0, "max_ranks", int),
        "reset-limit": ("an integer >= 0", _count, "reset_limit", int),
        "host-discovery": ("a command", _text, "host_discovery", str),
        "survive-launcher": ("seconds", _number, "survive_launcher", float),
        "seal": ("true or false", lambda value: isinstance(value, bool), "seal", bool),
        "log-dir": ("the path of a folder", _text, "log_dir", Path),
        "record": ("the path of a file", _text, "record", Path),
        "page": ("text like 8080 or 10.0.0.1:8080", _text, "page", str),
        "page-token-file": ("the path of a file", _text, "page_token_file", Path),
        "command": ("a list of words", _words, "command", list),
    }
)


def read_options(path: Path) -> dict[str, Any]:
    """Read the options file at `path` and return its options.

    The keys are the attribute names of the parsed arguments.

    The option `command` is used if the command line has no command.

    Raises:
        ArgumentError: the file cannot be read, is not TOML, has an unknown key, or has an invalid value.
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
        raise ArgumentError(f"{path}: hosts and hostfile both list hosts; leave one out")
    return made
