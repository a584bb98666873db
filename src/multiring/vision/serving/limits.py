"""A server's limits, and `Admission`, which keeps the requests that are on their way within them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from multiring._arguments import require_number, require_whole
from multiring.vision.serving.refusals import TOO_MANY, RequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLimits:
    """The limits of a server.

    Attributes:
        batch: the most rows of a batch, and of a request.
        delay_s: how long a request waits for others while the model is idle.
        body_bytes: the largest body, also after it is unpacked.
        json_bytes: the most JSON in a body. Parsed JSON takes up to thirty times its text.
        pixels: the most pixels of a picture, and a third of the most values of a tensor and of a batch.
        requests: the most requests that are read, wait or are computed at a time. Others get 429.
        memory_bytes: the most bytes of bodies and decoded pictures that these hold at a time. Others get 429.
        time_s: the longest time from a request's header to its answer.
        header_s: the longest time for a request's header, and for an idle connection.
        connections: the most connections at a time. Others are closed.

    Raises:
        ArgumentError: a limit is not above 0 (the delay: negative).
    """

    batch: int = 16
    delay_s: float = 0.0
    body_bytes: int = 1 << 25
    json_bytes: int = 1 << 23
    pixels: int = 1 << 25
    requests: int = 128
    memory_bytes: int = 1 << 29
    time_s: float = 30.0
    header_s: float = 15.0
    connections: int = 512

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if name.endswith("_s"):
                require_number(name, value, above=name != "delay_s")
            else:
                require_whole(name, value, 1)


class Admission:
    """Counts the requests on their way and the bytes that they hold.

    Attributes:
        requests: requests on their way.
        held_bytes: the bytes that they hold.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self.requests = 0
        self.held_bytes = 0

    @contextmanager
    def enter(self, retry_after_s: int) -> Iterator["HeldBytes"]:
        """Count a request while the block runs.

        Raises:
            RequestError: too many are on their way. The status is 429.
        """
        if self.requests >= self._limits.requests:
            raise RequestError(
                TOO_MANY, f"{self.requests} requests are on their way: try again later", retry_after_s=retry_after_s
            )
        self.requests += 1
        held = HeldBytes(self, retry_after_s)
        try:
            yield held
        finally:
            self.requests -= 1
            held.close()

    def room(self) -> int:
        """Return how many more bytes may be held."""
        return self._limits.memory_bytes - self.held_bytes


class HeldBytes:
    """The bytes that one request holds.

    Attributes:
        number: how many.
    """

    def __init__(self, admission: Admission, retry_after_s: int) -> None:
        self._admission = admission
        self._retry_after_s = retry_after_s
        self.number = 0
        self._is_open = True

    def close(self) -> None:
        """Give all bytes back. A decoder that ends later adds nothing."""
        self._admission.held_bytes -= self.number
        self.number, self._is_open = 0, False

    def add(self, number: int) -> None:
        """Count more bytes, or fewer if `number` is negative.

        Raises:
            RequestError: all requests together hold too many. The status is 429.
        """
        if not self._is_open or number > self._admission.room():
            raise RequestError(
                TOO_MANY, "the requests on their way hold all the memory allowed: try again later",
                retry_after_s=self._retry_after_s,
            )  # fmt: skip
        self._admission.held_bytes += number
        self.number += number
