"""The goodput of a job whose hosts fail: restarted from its last commit, or with the hosts that are left.

Goodput is the part of the failure-free work that a job gets done in the long run. Each host fails by chance, at the
same rate at any time, also while the job recovers. All work since the last commit is lost with a failure.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from multiring.errors import ArgumentError

_HOUR_S = 3600
# Numbers of hosts whose rate is predicted; rates between them are interpolated.
_POINTS = 5
# Numbers of hosts that are rarer than this are left out.
_RARE = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """How often hosts fail, and what a failure costs.

    `per_hour` are the failures of one host in an hour. A job commits after each `commit_every_s` seconds of work, which
    takes `commit_s` more. A failed host is replaced after `restart_s`, in which the restart of a job's program is
    contained. The other hosts of an elastic job go on `go_on_s` after a failure.

    Raises:
        ArgumentError: a number is negative or not finite, or there is no time between commits.
    """

    per_hour: float
    commit_every_s: float
    commit_s: float
    restart_s: float
    go_on_s: float

    def __post_init__(self) -> None:
        numbers = self.per_hour, self.commit_every_s, self.commit_s, self.restart_s, self.go_on_s
        if not all(0 <= each < math.inf for each in numbers) or not self.commit_every_s:
            raise ArgumentError(
                f"{self.per_hour:g} failures an hour, commits every {self.commit_every_s:g} s that take "
                f"{self.commit_s:g} s, {self.restart_s:g} s to restart, {self.go_on_s:g} s to go on: want finite "
                "numbers from 0, and a time between commits above 0"
            )

    @property
    def per_s(self) -> float:
        """The failures of one host in a second."""
        return self.per_hour / _HOUR_S


def restarted_goodput(failures: Failures, hosts: int) -> float:
    """Return the goodput of a job that restarts with all its hosts after each failure.

    This is exact: the work between two commits is repeated until no host fails meanwhile, and so is a restart.
    """
    return _goodput(failures, hosts, failures.restart_s)


def elastic_goodput(failures: Failures, hosts: int, rate_of: Callable[[int], float]) -> float:
    """Return the goodput of a job that goes on with the hosts that are left, and takes replaced hosts in.

    A replaced host comes in at the next commit, which takes no further time. The number of hosts is taken to stay the
    same between two commits, so the result is near only if few hosts fail in that time. If there is one host, no other
    can go on, and the job is restarted.

    Args:
        failures: how often hosts fail.
        hosts: the hosts of the whole job.
        rate_of: returns the samples per second with a number of hosts, from 1 to `hosts`.
    """
    if hosts == 1:
        return restarted_goodput(failures, hosts)
    # A host is away until it has been replaced, and then for half of the time between commits.
    away_s = failures.restart_s + (failures.commit_every_s + failures.commit_s) / 2
    present = 1 / (1 + failures.per_s * away_s)
    likely = {count: chance for count in range(1, hosts + 1) if (chance := _binomial(hosts, count, present)) > _RARE}
    if not likely:
        return 0.0
    rates = _interpolated(rate_of, min(likely), hosts)
    whole = rates(hosts)
    return sum(
        chance * rates(count) / whole * _goodput(failures, count, failures.go_on_s) for count, chance in likely.items()
    )


def _goodput(failures: Failures, hosts: int, recovery_s: float) -> float:
    """Return the part of the time in which work is done that is committed later."""
    rate = failures.per_s * hosts
    try:
        lost = math.expm1(rate * (failures.commit_every_s + failures.commit_s)) * math.exp(rate * recovery_s)
    except OverflowError:
        return 0.0
    if not lost:
        return failures.commit_every_s / (failures.commit_every_s + failures.commit_s)
    return rate * failures.commit_every_s / lost


def _binomial(count: int, present: int, chance: float) -> float:
    if chance == 1:
        return float(present == count)
    ways = math.lgamma(count + 1) - math.lgamma(present + 1) - math.lgamma(count - present + 1)
    return math.exp(ways + present * math.log(chance) + (count - present) * math.log1p(-chance))


def _interpolated(rate_of: Callable[[int], float], low: int, high: int) -> Callable[[int], float]:
    """Return `rate_of` between two numbers of hosts, evaluated at a few of them."""
    places = sorted({round(low + (high - low) * at / (_POINTS - 1)) for at in range(_POINTS)})
    known = {place: rate_of(place) for place in places}

    def found(count: int) -> float:
        if count in known:
            return known[count]
        below = max(place for place in places if place < count)
        above = min(place for place in places if place > count)
        return known[below] + (known[above] - known[below]) * (count - below) / (above - below)

    return found
