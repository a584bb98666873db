"""The meanings of numbers in a timeline's rows."""

import threading
from typing import Any

_MOST_KEPT = 4096


class Glossary:
    """Titles and plans of operations, by the first bytes of their digest, and the groups of one process.

    The glossary is filled even without a timeline, because an operation registers only at its first call.
    """

    def __init__(self) -> None:
        self.groups: dict[int, str] = {}
        self._operations: dict[int, tuple[str, Any]] = {}
        self._adding = threading.Lock()

    def note(self, digest: bytes, title: str, plan: Any) -> None:
        """Store the title of the operations with `digest`, and their plan, or None if they need no plan."""
        key = int.from_bytes(digest[:8], "little")
        if key not in self._operations:
            with self._adding:
                if len(self._operations) >= _MOST_KEPT:
                    self._operations.pop(next(iter(self._operations)), None)
                self._operations[key] = (title, plan)

    def find(self, key: int) -> tuple[str, str] | None:
        """Return the title and the plan as text ("" without a plan), or None if they are not stored (any more)."""
        found = self._operations.get(key)
        return None if found is None else (found[0], "" if found[1] is None else str(found[1]))
