"""Write values as YAML, in the form that people write manifests in.

Text that any reader of YAML could take for something else is quoted as JSON, which is YAML too.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# A plain scalar begins with a letter or "/", and YAML 1.1 reads these words as booleans or null.
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}


def yaml_of(documents: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of `documents`, which consist of mappings, sequences, texts, numbers and booleans."""
    return "---\n".join("".join(f"{line}\n" for line in _lines(document)) for document in documents)


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _led_by(f"{_scalar(key)}:", item)
    elif isinstance(value, Sequence) and not isinstance(value, str) and value:
        for item in value:
            first, *rest = _lines(item)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        yield _scalar(value)


def _led_by(key: str, item: Any) -> Iterator[str]:
    if isinstance(item, (Mapping, Sequence)) and not isinstance(item, str) and item:
        yield key
        yield from (f"  {line}" for line in _lines(item))
    else:
        yield f"{key} {_scalar(item)}"


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def _quoted(text: str) -> str:
    # JSON writes two escapes for a character beyond 16 bits, which YAML would read as two characters.
    written = json.dumps(text, ensure_ascii=False)
    # Characters that YAML does not allow in a text, and JSON does.
    return re.sub(r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]", lambda found: f"\\u{ord(found[0]):04x}", written)
