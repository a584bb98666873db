"""The meanings of numbers in a timeline's rows."""

from typing import Any

from multiring._forks import ForkSafeLock

_MOST_KEPT = 4096


class Glossary:
    """Titles, plans and engines of operations, by the first bytes of their digest, and the groups of one process.

    The glossary is filled even without a timeline, because an operation registers only at its first call.
    """

    def __init__(self) -> None:
        self.groups: dict[int, str] = {}
        self._operations: dict[int, tuple[str, Any, str]] = {}
        self._adding = ForkSafeLock()

    def note(self, digest: bytes, title: str, plan: Any, engine: str = "") -> None:
        """Store what is known of the operations with `digest`.

        Args:
            digest: the digest on which the ranks agree.
            title: their title.
            plan: their plan, or None if they need no plan.
            engine: the engine that carries their data; "" if the native core does.
        """
        key = int.from_bytes(digest[:8], "little")
        if key not in self._operations:
            with self._adding:
                if len(self._operations) >= _MOST_KEPT:
                    self._operations.pop(next(iter(self._operations)), None)
                self._operations[key] = (title, plan, engine)

    def find(self, key: int) -> tuple[str, str, str] | None:
        """Return the title, the plan as text ("" without a plan) and the engine; None if they are not stored."""
        found = self._operations.get(key)
        return None if found is None else (found[0], "" if found[1] is None else str(found[1]), found[2])
