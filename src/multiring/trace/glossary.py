"""What the numbers in a timeline's rows stand for."""

import threading
from typing import Any

_MOST_KEPT = 4096


class Glossary:
    """Titles and plans by the first bytes of the digest that ranks agree on, and the groups of one process.

    It is written to all the time, also without a timeline: an operation that is repeated passes here only once.
    """

    def __init__(self) -> None:
        self.groups: dict[int, str] = {}
        self._operations: dict[int, tuple[str, Any]] = {}
        self._adding = threading.Lock()

    def note(self, digest: bytes, title: str, plan: Any) -> None:
        """Keep that `digest` stands for an operation of this title, run by `plan`; None: it needs none."""
        key = int.from_bytes(digest[:8], "little")
        if key not in self._operations:
            with self._adding:
                if len(self._operations) >= _MOST_KEPT:
                    self._operations.pop(next(iter(self._operations)), None)
                self._operations[key] = (title, plan)

    def find(self, key: int) -> tuple[str, str] | None:
        """Return the title, and the plan in words, "" for none; None where it is not known (any more)."""
        found = self._operations.get(key)
        return None if found is None else (found[0], "" if found[1] is None else str(found[1]))
