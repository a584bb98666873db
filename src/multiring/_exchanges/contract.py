"""What each way of telling the other ranks must do."""

from abc import ABC, abstractmethod


class ExchangeError(Exception):
    """A way does not work in this process. The text says why, in words for the user."""


class PlaceExchange(ABC):
    """One way by which rank 0 tells one text to the other ranks of its job.

    Rank 0 calls `publish` once, and `close` after all ranks have met. The others call `fetch` until it returns the
    text, and then `close`. A way may be tried on some ranks only: no call blocks for other ranks much longer than it is
    told to.
    """

    name: str
    # Whether rank 0 uses the way only if no other way works, or the other ranks have not come in time.
    is_last_resort = False
    # Whether `fetch` may return what a former program of the same step has published, and another text later.
    may_be_stale = False

    def __init__(self) -> None:
        self.waits_for = "rank 0 has not told it"  # what `fetch` has found so far, for errors

    @abstractmethod
    def publish(self, text: str) -> bool:
        """Tell `text` to the other ranks; return whether all of them are known to have used this way.

        Raises:
            ExchangeError: the way does not work here.
        """

    @abstractmethod
    def fetch(self, wait_s: float) -> str | None:
        """Return rank 0's text, or None if it has not come within about `wait_s` seconds.

        Raises:
            ExchangeError: the way does not work here, and a further call would not help.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what the way holds, and remove what it has made. It may be called twice, and raises nothing."""
