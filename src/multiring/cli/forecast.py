"""How long a bench will take: said before it begins, and again by what its first turn took."""

import time
from collections.abc import Callable

_MINUTE_S = 60.0
_SHORT_S = 15.0  # of what takes less nothing is said
_FIRST_TURN, _SECOND_TURN = "alternation 1 of ", "alternation 2 of "


class Forecast:
    """Says it once before, and once the first of all turns is over.

    Args:
        turns: how many there are in all.
        tell: prints a line.
        shows: what is told of each job, where somebody looks; or None.
    """

    def __init__(self, turns: int, tell: Callable[[str], None], shows: Callable[[str], None] | None) -> None:
        self._turns, self._tell, self._shows = turns, tell, shows
        self._began: float | None = None  # the first turn
        self._is_said = turns < 2

    def begin(self, jobs: int, about_s: float | None) -> None:
        """Say how many jobs there are, and about how long they take together; None: nobody knows yet."""
        if about_s is not None and about_s < _SHORT_S:
            return
        known = "how long is said after one of each" if about_s is None else f"about {in_words(about_s)}"
        self._tell(f"{jobs} job{'' if jobs == 1 else 's'}: {known}")

    def heed(self, text: str) -> None:
        """Hear which job begins: with the second turn the first one is over."""
        if _FIRST_TURN in text and self._began is None:
            self._began = time.monotonic()
        if not self._is_said and _SECOND_TURN in text and self._began is not None:
            self._is_said = True
            left_s = (time.monotonic() - self._began) * (self._turns - 1)
            if left_s >= _SHORT_S:
                self._tell(f"about {in_words(left_s)} left")
        if self._shows is not None:
            self._shows(text)


def in_words(seconds: float) -> str:
    """Return a time as people say it: "40 s", "3 minutes"."""
    if seconds < 1.5 * _MINUTE_S:
        return f"{max(1.0, seconds):.0f} s"
    return f"{seconds / _MINUTE_S:.0f} minutes"
