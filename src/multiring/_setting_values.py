"""Parsers of settings.

Each converts a text to a value, and raises ValueError or KeyError for an invalid text.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

_MOST_CONNECTIONS = 64  # of a rail; the core has the same limit (native/core/rank/context.cc)
_NAMES = "MULTIRING_"
_BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_ENGINES = ("auto", "shm", "tcp", "mpi")
_DEVICE_PATHS = ("auto", "staged", "nccl", "hierarchical")
DEVICE_PATH = (
    "auto, staged (in host memory), nccl, or hierarchical (NCCL inside hosts only); the last two are an error where "
    "NCCL is impossible; the same on all ranks; NCCL between GPUs is verified on stand-ins only"
)


def boolean(text: str) -> bool:
    """Parse a boolean: 1, true, yes, 0, false or no."""
    return _BOOLEANS[text.lower()]


def engine(text: str) -> str:
    """Return `text` if it is the name of an engine."""
    if text not in _ENGINES:
        raise ValueError(text)
    return text


def device_path(text: str) -> str:
    """Return `text` if it is the name of a way for CUDA tensors."""
    if text not in _DEVICE_PATHS:
        raise ValueError(text)
    return text


def port_range(text: str) -> tuple[int, int]:
    """Return the first and the last port of a range FIRST-LAST."""
    first, _, last = text.partition("-")
    low, high = int(first), int(last or first)
    if not 0 <= low <= high <= 65535:
        raise ValueError(text)
    return low, high


NEVER_S = 1e9  # about 32 years; in nanoseconds, this time still fits the native core's 64 bits
_MOST_RANKS = 1 << 20
LEAST_SEGMENT, MOST_SEGMENT = 1 << 12, 1 << 46  # bytes; the address space of a process has 2 ** 47 bytes
MOST_BYTES = 1 << 62


def positive(text: str) -> float:
    """Parse a time in seconds, above 0.

    A longer time than `NEVER_S` becomes `NEVER_S`.
    """
    value = float(text)
    if not value > 0:
        raise ValueError(text)
    return min(value, NEVER_S)


def wire_timeout(text: str) -> float:
    """Parse a time in seconds, at least 3."""
    value = float(text)
    if not value >= 3:  # kernels send at most one probe per second
        raise ValueError(text)
    return min(value, NEVER_S)


def natural(text: str) -> int:
    """Parse an integer >= 0."""
    return between(0, MOST_BYTES)(text)


def between(least: int, most: int) -> Callable[[str], int]:
    """Return a parser of integers from `least` to `most`, both included."""

    def parse(text: str) -> int:
        value = int(text) if text.isascii() else least - 1
        if not least <= value <= most:
            raise ValueError(text)
        return value

    return parse


rank, size = between(0, _MOST_RANKS - 1), between(1, _MOST_RANKS)
RANK, SIZE = f"an integer, 0 to {_MOST_RANKS - 1}", f"an integer, 1 to {_MOST_RANKS}"
connections = between(0, _MOST_CONNECTIONS)
CONNECTIONS = (
    f"0 to {_MOST_CONNECTIONS}",
    (
        "connections to each rank of another host, each with a thread; the same on all ranks. 0: as many as free cores "
        "allow. Default: as many as the topology file's rate needs, 1 without a file (docs/topology.md)"
    ),
)
SECONDS = f"seconds > 0; {NEVER_S:.0f} and more mean never"


def timeline(text: str) -> str:
    """Return `text` if it is not empty."""
    if not text:
        raise ValueError(text)
    return text


_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)?bit", re.ASCII)
_PREFIXES = {None: 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


@dataclass(frozen=True, slots=True)
class Rail:
    """An interface that carries data between hosts, and its rate, if given.

    The interface is a name or an address.
    """

    interface: str
    bits_per_s: float | None

    def __str__(self) -> str:
        return self.interface if self.bits_per_s is None else f"{self.interface}:{self.bits_per_s:.12g}bit"


def rails(text: str) -> tuple[Rail, ...]:
    """Parse a list of rails separated by commas."""
    found = tuple(_rail(part.strip()) for part in text.split(","))
    if len({rail.interface for rail in found}) < len(found):
        raise ValueError(text)
    return found


def _rail(text: str) -> Rail:
    interface, colon, last = text.rpartition(":")
    match = _RATE.fullmatch(last.lower())
    if not colon or match is None:  # a colon may also be part of an address
        interface, bits_per_s = text, None
    else:
        bits_per_s = float(match[1]) * _PREFIXES[match[2]]
    if not interface or bits_per_s == 0 or "bit" in interface.rpartition(":")[2]:
        raise ValueError(text)
    return Rail(interface, bits_per_s)


def text_of(value: object) -> str:
    """Return the text of a setting's value, which the setting's function parses."""
    if not isinstance(value, tuple):
        return str(value)
    between = "," if any(isinstance(part, (Rail, str)) for part in value) else "-"
    return between.join(map(str, value))


def nearest(name: str, known: Mapping[str, object]) -> str:
    """Return a hint for an unknown name.

    The hint names the most similar known name, or all known names.
    """
    by_ending = {each.removeprefix(_NAMES): each for each in known}  # the common prefix would make all names similar
    meant = get_close_matches(name.removeprefix(_NAMES), by_ending, n=1, cutoff=0.75)
    return f"; did you mean {by_ending[meant[0]]}?" if meant else f"; known are {', '.join(sorted(known))}"
