"""Find the line of a wrong field in a TOML file. Readers of TOML do not say where a value was."""

import json
import re
from typing import Any

from multiring.errors import ArgumentError


class WrongConstantError(ArgumentError):
    """A field of a topology that is wrong, with its key and its value (None: it is missing)."""

    def __init__(self, words: str, key: str, value: Any = None) -> None:
        super().__init__(words)
        self.key, self.value = key, value

    def in_text(self, text: str) -> ArgumentError:
        """Return the error for the reader of the file with this text."""
        line = line_of_field(text, self.key, self.value)
        return ArgumentError(f"line {line}: {self}" if line else str(self))


def line_of_field(text: str, key: str, value: Any = None) -> int:
    """Return the line, from 1, where a field has this value; 0 if no line or several lines may be meant."""
    pattern = re.compile(rf"""(?:^|[\s.{{,\[])["']?{re.escape(key)}["']?\s*[.=\]]+\s*(.*)""")
    found = [(at, match[1]) for at, line in enumerate(text.splitlines(), 1) if (match := pattern.search(line))]
    if len(found) > 1:
        shown = json.dumps(value) if isinstance(value, str | bool) else str(value)
        found = [(at, rest) for at, rest in found if rest.replace("'", '"').replace("_", "").startswith(shown)][:1]
    return found[0][0] if found else 0
