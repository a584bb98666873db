"""How a setting's text becomes its value, within a range; what is no such value is a ValueError or a KeyError."""

import re
from collections.abc import Callable
from dataclasses import dataclass

_BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_ENGINES = ("auto", "shm", "tcp", "mpi")


def boolean(text: str) -> bool:
    """Return whether `text` says yes."""
    return _BOOLEANS[text.lower()]


def engine(text: str) -> str:
    """Return the engine of that name."""
    if text not in _ENGINES:
        raise ValueError(text)
    return text


def port_range(text: str) -> tuple[int, int]:
    """Return the first and the last port of FIRST-LAST."""
    first, _, last = text.partition("-")
    low, high = int(first), int(last or first)
    if not 0 <= low <= high <= 65535:
        raise ValueError(text)
    return low, high


NEVER_S = 1e9  # three decades; the native core counts nanoseconds in 64 bits
_MOST_RANKS = 1 << 20
LEAST_SEGMENT, MOST_SEGMENT = 1 << 12, 1 << 46  # bytes; a process addresses 2 ** 47
MOST_BYTES = 1 << 62


def positive(text: str) -> float:
    """Return a time in seconds, above 0; what is longer than `NEVER_S` is that."""
    value = float(text)
    if not value > 0:
        raise ValueError(text)
    return min(value, NEVER_S)


def wire_timeout(text: str) -> float:
    """Return a time in seconds, at least 3."""
    value = float(text)
    if not value >= 3:  # kernels ask once a second at most
        raise ValueError(text)
    return min(value, NEVER_S)


def natural(text: str) -> int:
    """Return a count, from 0 on."""
    return between(0, MOST_BYTES)(text)


def between(least: int, most: int) -> Callable[[str], int]:
    """Return what reads an integer of this range, both ends included."""

    def parse(text: str) -> int:
        value = int(text) if text.isascii() else least - 1
        if not least <= value <= most:
            raise ValueError(text)
        return value

    return parse


rank, size = between(0, _MOST_RANKS - 1), between(1, _MOST_RANKS)
RANK, SIZE = f"an integer, 0 to {_MOST_RANKS - 1}", f"an integer, 1 to {_MOST_RANKS}"
SECONDS = f"seconds > 0; {NEVER_S:.0f} and more mean never"


def timeline(text: str) -> str:
    """Return a path that is not empty."""
    if not text:
        raise ValueError(text)
    return text


_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)?bit", re.ASCII)
_PREFIXES = {None: 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


@dataclass(frozen=True, slots=True)
class Rail:
    """An interface, by name or address, that carries bytes between hosts, and its rate where the user gave one."""

    interface: str
    bits_per_s: float | None

    def __str__(self) -> str:
        return self.interface if self.bits_per_s is None else f"{self.interface}:{self.bits_per_s:.12g}bit"


def rails(text: str) -> tuple[Rail, ...]:
    """Return the rails of a list with commas between."""
    found = tuple(_rail(part.strip()) for part in text.split(","))
    if len({rail.interface for rail in found}) < len(found):
        raise ValueError(text)
    return found


def _rail(text: str) -> Rail:
    interface, colon, last = text.rpartition(":")
    match = _RATE.fullmatch(last.lower())
    if not colon or match is None:  # a colon may be an address's own
        interface, bits_per_s = text, None
    else:
        bits_per_s = float(match[1]) * _PREFIXES[match[2]]
    if not interface or bits_per_s == 0 or "bit" in interface.rpartition(":")[2]:
        raise ValueError(text)
    return Rail(interface, bits_per_s)
