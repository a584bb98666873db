"""Which hosts get no newcomers for a while, because ranks or the host itself have failed there."""

import time
from collections.abc import Callable
from dataclasses import dataclass

_ONE_FAILURE_S = 1.0  # what fails within this time is one failure: a host's ranks are lost one after the other
_MOST_FAILURES = 2


@dataclass(slots=True)
class _Record:
    failures: int = 0
    pauses: int = 0
    last_s: float = float("-inf")
    blocked_until_s: float = float("-inf")


class HostHealth:
    """Counts the failures of each host, and keeps newcomers off a host that has failed twice.

    Args:
        range_s: the first pause after the second failure, and the longest one; each is twice as long as the one before.
        clock: returns the time in seconds.
    """

    def __init__(self, range_s: tuple[float, float], clock: Callable[[], float] = time.monotonic) -> None:
        self._range_s, self._clock = range_s, clock
        self._records: dict[str, _Record] = {}

    def note_failure(self, host: str) -> float | None:
        """Note a failure, and return for how many seconds the host now gets no newcomers; None if it still does."""
        record, now = self._records.setdefault(host, _Record()), self._clock()
        is_same = now < record.last_s + _ONE_FAILURE_S
        record.last_s = now
        record.failures += not is_same
        if is_same or record.failures < _MOST_FAILURES:
            return None
        pause_s = min(self._range_s[1], self._range_s[0] * 2.0**record.pauses)
        record.failures, record.pauses = 1, record.pauses + 1  # after the pause, the next failure is one too many
        record.blocked_until_s = now + pause_s
        return pause_s

    def may_be_used(self, host: str) -> bool:
        """Return whether the host may get newcomers now."""
        record = self._records.get(host)
        return record is None or self._clock() >= record.blocked_until_s
