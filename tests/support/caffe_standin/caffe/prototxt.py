"""Read Caffe's text format: `name: value` and `name { ... }`; names may repeat."""

import re
from pathlib import Path
from typing import Any

_WORDS = re.compile(r"#[^\n]*|\"[^\"]*\"|'[^']*'|[{}:;,]|[^\s{}:;,#\"']+")

Message = dict[str, list[Any]]


def read(path: str) -> Message:
    """Return the content of a file: a list of values for each name."""
    words = [word for word in _WORDS.findall(Path(path).read_text(encoding="utf-8")) if word[0] not in "#;,"]
    found, rest = _message(words)
    if rest:
        raise ValueError(f"{path}: a closing brace too many")
    return found


def _message(words: list[str]) -> tuple[Message, list[str]]:
    found: Message = {}
    while words and words[0] != "}":
        name, *words = words
        if words[0] == ":":
            words = words[1:]
        if words[0] == "{":
            value, words = _message(words[1:])
            if not words:
                raise ValueError(f"{name}: a closing brace is missing")
            words = words[1:]
        else:
            value, words = _value(words[0]), words[1:]
        found.setdefault(name, []).append(value)
    return found, words


def _value(word: str) -> Any:
    if word[0] in "\"'":
        return word[1:-1]
    if word in {"true", "false"}:
        return word == "true"
    try:
        return int(word)
    except ValueError:
        try:
            return float(word)
        except ValueError:
            return word  # a value of an enumeration


def one(message: Message, name: str, default: Any = None) -> Any:
    """Return the last value of `name`, or `default`."""
    return message.get(name, [default])[-1]
