"""Forecast each mix, choose the cheapest that fits into memory, and print all as a table."""

from collections.abc import Sequence
from dataclasses import dataclass

from multiring._topology import Topology
from multiring.errors import ArgumentError
from multiring.planner.parallelism.axes import Axis, Parallelism, laid_out, parallelisms_of, reason_against
from multiring.planner.parallelism.memory import Memory, memory_of
from multiring.planner.parallelism.profile import Profile
from multiring.planner.parallelism.seconds import Seconds, seconds_of

_MIB = 1 << 20
# Measured times vary by more than this. No forecast covers ranks that wake up late, and other ranks that wait for them.
# Pipelines lose most time by this.
_ALIKE = 1.05


@dataclass(frozen=True, slots=True)
class Forecast:
    """The expected memory and time of a step under a mix, and whether the memory fits a rank."""

    parallelism: Parallelism
    memory: Memory
    seconds: Seconds
    fits: bool = True


def forecasts(profile: Profile, topology: Topology, memory_bytes: float | None = None) -> list[Forecast]:
    """Return one forecast for each set of axes and sizes, in its best layout.

    Mixes that fit into memory come first, the fastest first.

    Args:
        profile: the model, its batch, and the measurements of both.
        topology: the topology of all ranks.
        memory_bytes: the memory limit of a rank in bytes; None: no limit.
    """
    return _best_laid(parallelisms_of(profile, topology), profile, topology, memory_bytes)


def forecast(
    parallelism: Parallelism, profile: Profile, topology: Topology, memory_bytes: float | None = None
) -> Forecast:
    """Return the forecast for the axes and sizes of `parallelism`, in their best layout.

    Raises:
        ArgumentError: the mix is impossible; the message says why.
    """
    reason = reason_against(parallelism, profile, topology)
    if reason:
        raise ArgumentError(reason)
    return _best_laid(list(laid_out(parallelism, profile, topology)), profile, topology, memory_bytes)[0]


def chosen(found: Sequence[Forecast], memory_bytes: float | None = None) -> Forecast:
    """Return the fastest mix that fits into memory.

    If several mixes are within 5 % of the fastest mix, prefer the fewest pipeline stages, and then the shortest time.

    Raises:
        ArgumentError: no mix fits into a rank's memory.
    """
    fitting = [each for each in found if each.fits]
    if not fitting:
        least = min(found, key=lambda each: each.memory.total)
        limit = "" if memory_bytes is None else f" of {memory_bytes / _MIB:.0f} MiB"
        raise ArgumentError(
            f"no mix fits into a rank's memory{limit}: the smallest, {least.parallelism}, needs "
            f"{least.memory.total / _MIB:.0f} MiB; use more ranks, a smaller batch, or an optimizer with less state"
        )
    fastest_s = min(each.seconds.total for each in fitting)
    alike = [each for each in fitting if each.seconds.total <= _ALIKE * fastest_s]
    return min(alike, key=lambda each: (each.parallelism.size(Axis.PIPELINE), each.seconds.total))


def _best_laid(
    parallelisms: Sequence[Parallelism], profile: Profile, topology: Topology, memory_bytes: float | None
) -> list[Forecast]:
    best: dict[frozenset[tuple[Axis, int]], Forecast] = {}
    for parallelism in parallelisms:
        memory = memory_of(parallelism, profile)
        fits = memory_bytes is None or memory.total <= memory_bytes
        found = Forecast(parallelism, memory, seconds_of(parallelism, profile, topology), fits)
        known = best.get(frozenset(parallelism.axes))
        if known is None or _rank_of(found) < _rank_of(known):
            best[frozenset(parallelism.axes)] = found
    return sorted(best.values(), key=_rank_of)


def _rank_of(found: Forecast) -> tuple[bool, float]:
    return not found.fits, found.seconds.total


def table(found: Sequence[Forecast], taken: Parallelism, profile: Profile, topology: Topology) -> str:
    """Return the forecasts as text, with the chosen mix marked, and the reasons against other axes."""
    width = max(25, *(len(str(each.parallelism)) for each in found))
    columns = f"{'ms a step':>11}{'compute':>9}{'exchange':>10}{'update':>8}{'MiB a rank':>12}"
    lines = [
        f"{topology}; a step of {profile.batch} samples, {profile.parameter_bytes / _MIB:.1f} MiB of parameters",
        f"  {'mix, farthest ranks first':<{width}}{columns}",
    ]
    for each in found:
        parts = each.seconds
        lines.append(
            f"{'>' if each.parallelism == taken else ' '} {each.parallelism!s:<{width}}{parts.total * 1e3:>11.1f}"
            f"{parts.compute * 1e3:>9.1f}{parts.exchange * 1e3:>10.1f}{parts.update * 1e3:>8.1f}"
            f"{each.memory.total / _MIB:>12.1f}{'' if each.fits else '  too much'}"
        )
    lines += [f"  no {axis} axis: {reason}" for axis, reason in profile.refused.items()]
    return "\n".join(lines) + "\n"
