"""The checker of one host: it answers rank 0's questions by taking readings. Each question has a bounded time."""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from multiring._diagnosis.host import Meanwhile, host_reading, work_seconds
from multiring._diagnosis.readings import HostReading, RailReading
from multiring._diagnosis.transfers import RailEnd, Receiver, rate_to, reach
from multiring._runtime.bootstrap.handshake import Message
from multiring._settings import Settings
from multiring.errors import LaunchError


class HostChecker:
    """Takes the readings of this host.

    Args:
        settings: this rank's settings.
        clock: returns the time of this host in seconds.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._clock = clock
        self._receiver: Receiver | None = None
        self._meanwhile: Meanwhile | None = None
        self._token = ""
        self._sources: list[str] = []

    def answer(self, question: Message) -> Any:
        """Return the answer to a question of rank 0: `do` names a method, the rest are its arguments."""
        known: dict[str, Callable[..., Any]] = {
            "look": self.look,
            "clock": self.clock,
            "work": self.work,
            "reach": self.reach,
            "rate": self.rate,
            "end": self.end,
        }
        return known[question["do"]](**question.get("with", {}))

    def look(self, number: int, token: str) -> dict[str, Any]:
        """Return the reading of this host, and listen on its rails from now on.

        Args:
            number: this host's number.
            token: the word with which connections of the other hosts begin.
        """
        reading, self._token = host_reading(self._settings), token
        self._sources = [rail.address for rail in reading.rails]
        if reading.rails:
            try:
                self._receiver = Receiver(self._sources, self._settings.ports, token)
            except (LaunchError, OSError) as error:
                reading = replace(reading, rails=(), rails_fault=f"it cannot listen: {error}")
        if self._receiver is not None:
            self._receiver.number = number
            rails = zip(reading.rails, self._receiver.ends, strict=True)
            reading = replace(reading, rails=tuple(replace(rail, port=end.port) for rail, end in rails))
        self._meanwhile = Meanwhile()
        return asdict(reading)

    def clock(self) -> float:
        """Return this host's time in seconds."""
        return self._clock()

    def work(self) -> float:
        """Return the CPU seconds of a fixed piece of work."""
        return work_seconds()

    def reach(self, ends: list[tuple[int, int, str, int]]) -> list[str]:
        """Connect to other hosts; return why each connection failed, "" for each that was made.

        Args:
            ends: of each: the host's number, the rail, and where it listens.
        """
        return reach(
            [(host, rail, RailEnd(address, port)) for host, rail, address, port in ends], self._token, self._sources
        )

    def rate(self, host: int, rail: int, address: str, port: int, seconds: tuple[float, float]) -> float | None:
        """Return the bytes per second from this host to another one, as `rate_to` does."""
        return rate_to(host, RailEnd(address, port), self._token, self._sources[rail], (seconds[0], seconds[1]))

    def end(self) -> dict[str, float]:
        """Return what happened on this host since `look`."""
        return dict(self._meanwhile.reading()) if self._meanwhile is not None else {}

    def close(self) -> None:
        """Stop listening."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


def reading_told(told: dict[str, Any]) -> HostReading:
    """Return the reading that `HostChecker.look` told as a dict."""
    rails = tuple(RailReading(**rail) for rail in told["rails"])
    return HostReading(**{**told, "rails": rails, "gpus": tuple(told["gpus"])})
