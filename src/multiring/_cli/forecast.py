"""Print how long a bench will take.

An estimate is printed before the bench begins, and a better estimate after its first turn.
"""

import time
from collections.abc import Callable

_MINUTE_S = 60.0
_SHORT_S = 15.0  # no forecast is printed for less than this
_FIRST_TURN, _SECOND_TURN = "alternation 1 of ", "alternation 2 of "


class ForecastPrinter:
    """Prints the expected duration of a bench, and later the remaining time.

    It prints the duration before the first turn, and the remaining time after this turn.

    Args:
        turns: the number of turns in all.
        tell: prints a line.
        shows: prints a line about each job, for an interactive terminal; or None.
    """

    def __init__(self, turns: int, tell: Callable[[str], None], shows: Callable[[str], None] | None) -> None:
        self._turns, self._tell, self._shows = turns, tell, shows
        self._began: float | None = None  # the start of the first turn
        self._is_said = turns < 2

    def begin(self, jobs: int, about_s: float | None) -> None:
        """Print the number of jobs and an estimate of their total time.

        `about_s` is None if it is unknown.
        """
        if about_s is not None and about_s < _SHORT_S:
            return
        known = "an estimate of the time follows after one of each" if about_s is None else f"about {in_words(about_s)}"
        self._tell(f"{jobs} job{'' if jobs == 1 else 's'}: {known}")

    def record(self, text: str) -> None:
        """Record that a job begins.

        The first job of the second turn ends the first turn.
        """
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
    """Return a time as a short text: "40 s", "3 minutes"."""
    if seconds < 1.5 * _MINUTE_S:
        return f"{max(1.0, seconds):.0f} s"
    return f"{seconds / _MINUTE_S:.0f} minutes"
