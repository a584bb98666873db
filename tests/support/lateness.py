"""How late the probes of orderings are.

A program shows that an ordering is missing only if one thing comes later than another, and a machine that does other
work decides that too. So a program is run again until it shows it: the probes are later with each try, and after the
first tries each takes a time of chance, because two things that are equally late stay in order.
"""

from collections.abc import Iterator

import numpy as np

TRIES = 10
CONSTANT_TRIES = 2

_now = {"try": 0}
_chance = np.random.default_rng(0)


def tries(count: int = TRIES) -> Iterator[int]:
    """Yield the number of each try, from zero on. While the caller handles it, probes are as late as that try wants."""
    try:
        for number in range(count):
            begin(number)
            yield number
    finally:
        begin(0)


def begin(number: int) -> None:
    """Make probes as late as try `number` wants."""
    _now["try"] = number


def stretched(least: float) -> float:
    """Return how long a probe takes in this try: at least `least`, in any unit."""
    return float(least * 2 ** (_now["try"] // 2))


def drawn(least: float) -> float:
    """Return how long a probe takes whose lateness must differ from that of others: in later tries, a part of it."""
    return stretched(least) * (1.0 if _now["try"] < CONSTANT_TRIES else float(_chance.random()))
