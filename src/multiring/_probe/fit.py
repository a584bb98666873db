"""Fit the constants of links to the times of a few all_reduces."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from multiring._collectives import build
from multiring._probe.timing import all_reduce_task, time_plan, time_plans
from multiring._runtime import Group
from multiring._schedule import Collective, Frame
from multiring._topology import SHM, Link
from multiring.planner import Plan

_SMALL_BYTES = 256
_LARGE_BYTES = 8 << 20
_SEGMENT_BYTES = 1 << 20
_PIECES = 64  # pieces of a small sum, to measure the overhead of a message
_TURNS = 5
_PIECE_BYTES, _SUMS = 256 << 10, 50
_LEAST_S = 1e-7
_LEAST_PART = 0.1  # the minimum share of a direct sum's time that is assigned to sending, and to reducing


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferDurations:
    """The time for which a large transfer is timed, and the time for which it runs before.

    The transfer must run before it is timed, because shaped links carry the first burst at full speed.
    """

    seconds: float
    drain_s: float


class SumThroughput(NamedTuple):
    """The throughput of large sums, and the part of the machine's cores that were idle at the same time."""

    bytes_per_s: float
    idle: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Between:
    """The ranks of `part`, connected by links of one kind.

    `engine` carries their bytes. `shares` selects the rail: the last channel carries all small buffers and nearly all
    bytes of large buffers.
    """

    part: Group
    engine: str
    shares: tuple[int, ...]
    patience: TransferDurations

    def link(self) -> tuple[Link, float]:
        """Return the constants of the link, and the part of the machine's cores that were idle during large sums.

        With p ranks: a small exchange travels with the agreement. A direct sum needs two more steps of p - 1 messages
        each. Each further piece of a direct sum occupies the port for 2 (p - 1) messages.
        """
        others = self.part.size - 1
        noted_s = self._small("exchange", 1)
        direct_s = self._small("direct", 1)
        overhead_s = (self._small("direct", _PIECES) - direct_s) / ((_PIECES - 1) * 2 * others)
        overhead_s = max(overhead_s, _LEAST_S)
        bandwidth, idle = self.bandwidth()
        link = Link(
            latency_s=max((direct_s - noted_s) / 2 - others * overhead_s, _LEAST_S),
            overhead_s=overhead_s,
            bandwidth_bytes_per_s=bandwidth,
            # Within a host a copy is one read and one write; a reduction of two operands is nearly the same.
            reduce_bytes_per_s=SHM.reduce_bytes_per_s if self.engine == "tcp" else 2 * bandwidth,
        )
        return link, idle

    def memory(self) -> Link:
        """Return the constants of the memory between all ranks of a job on one host, where sums are not cut.

        On such a host, a direct sum works in place, while an exchange copies its buffer and reads from all ranks. The
        time of the sum says little about the time of the exchange, so both are measured.
        """
        exchange, direct = (self._plan(algorithm, None) for algorithm in ("exchange", "direct"))
        task, seconds = all_reduce_task(_LARGE_BYTES), self.patience.seconds
        large = time_plans(self.part, task, (direct, exchange), seconds=seconds, usual=min)
        return memory_link(self.part.size, self._small("exchange", 1), large[0], large[1], _LARGE_BYTES)

    def overhead_s(self, latency_s: float) -> float:
        """Return the overhead of a single message in seconds, measured by small sums.

        A stream of messages would show too little, because its messages share wake-ups.
        A direct sum needs the agreement, ceil(log2 p) messages one after the other, and two steps of p - 1 messages.
        """
        others, rounds = self.part.size - 1, (self.part.size - 1).bit_length()
        taken_s = self._small("direct", 1, median)
        return max((taken_s - (rounds + 2) * latency_s) / (rounds + 2 * others), _LEAST_S)

    def bandwidth(self) -> SumThroughput:
        """Return the bandwidth of each rank in each direction, and the idle cores."""
        between_hosts = self.engine == "tcp"
        plan = self._plan("direct", _SEGMENT_BYTES if between_hosts else None)
        drain_s = self.patience.drain_s if between_hosts else 0.0
        task = all_reduce_task(_LARGE_BYTES)
        idle_s, begin_s = _idle_s(), time.monotonic()
        taken_s = time_plan(self.part, task, plan, seconds=self.patience.seconds, drain_s=drain_s)
        idle = (_idle_s() - idle_s) / (time.monotonic() - begin_s) / (os.cpu_count() or 1)
        return SumThroughput(2 * _LARGE_BYTES * (self.part.size - 1) / self.part.size / taken_s, idle)

    def _small(self, algorithm: str, pieces: int, usual: Callable[[list[float]], float] = min) -> float:
        task = all_reduce_task(_SMALL_BYTES * pieces)
        plan = self._plan(algorithm, None if pieces == 1 else _SMALL_BYTES)
        # By default, take the shortest of a few times, because delays by other work on the machine do not belong to the
        # link.
        seconds = self.patience.seconds / _TURNS / 4
        return usual([time_plan(self.part, task, plan, seconds=seconds) for _ in range(_TURNS)])

    def _plan(self, algorithm: str, segment_bytes: int | None) -> Plan:
        ranks = self.part.size
        frame = Frame(collective=Collective.ALL_REDUCE, grid=(ranks,), order=tuple(range(ranks)), shares=self.shares)
        return Plan(build(algorithm, frame), self.engine, 0.0, segment_bytes)


def memory_link(ranks: int, small_s: float, direct_s: float, exchange_s: float, size_bytes: int) -> Link:
    """Return the link for which `price` gives the times of an exchange and a direct sum, if possible.

    With x = bytes / bandwidth, y = bytes / reduce rate and p ranks (docs/algorithms.md) a direct sum takes
    2 (p - 1) / p x + y / p, and an exchange (p - 1) x + 2 y.

    Args:
        ranks: p, at least 2.
        small_s: seconds of an exchange of hardly any bytes: one latency, and p - 1 messages.
        direct_s: seconds of a direct sum of `size_bytes`.
        exchange_s: seconds of an exchange of `size_bytes`.
        size_bytes: the size of the buffer.
    """
    message_s = max(small_s / ranks, _LEAST_S)  # count the latency as one more message
    # With large messages, the previous message hides the overhead of every message but the first.
    direct_s = max(direct_s - 4 * message_s, _LEAST_S)
    exchange_s = max(exchange_s - 2 * message_s, _LEAST_S)
    by_message = 2 * (ranks - 1) / ranks
    x = (2 * direct_s - exchange_s / ranks) / (3 * (ranks - 1) / ranks)
    # Neither part may be zero. If the times do not fit, keep the price of a direct sum right, because large sums use
    # it.
    x = min(max(x, _LEAST_PART * direct_s / by_message), (1 - _LEAST_PART) * direct_s / by_message)
    y = ranks * (direct_s - by_message * x)
    return Link(
        latency_s=message_s,
        overhead_s=message_s,
        bandwidth_bytes_per_s=size_bytes / x,
        reduce_bytes_per_s=size_bytes / y,
    )


def reduce_rate() -> float:
    """Return the bytes per second that a sum of two arrays writes, by the shortest of several times."""
    one, other = np.ones((2, _PIECE_BYTES // 4), np.float32)
    best_s = math.inf
    for _ in range(_SUMS):
        begin = time.perf_counter()
        np.add(one, other, out=one)
        best_s = min(best_s, time.perf_counter() - begin)
    return _PIECE_BYTES / best_s


def _idle_s() -> float:
    """Return the idle seconds of all cores of the machine since it was booted."""
    _, _user, _nice, _system, idle, waiting, *_ = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()
    return (int(idle) + int(waiting)) / os.sysconf("SC_CLK_TCK")
