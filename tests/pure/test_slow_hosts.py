"""Slow hosts at random places, detected from their connections: the whole message names the right host."""

import logging
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from multiring._native import FaultKind
from multiring._runtime.rails.watch import LEAST_BYTES, Watch
from multiring._topology import Topology

OPERATIONS = 64


@dataclass
class Done:
    """A finished operation, as the core reports it."""

    ran_s: tuple[float, float]
    fault: Any = FaultKind.NONE


@dataclass
class Connections:
    """One rank's connections with the kernel's counters."""

    carried: dict[int, int] = field(default_factory=dict)
    busy_s: dict[int, float] = field(default_factory=dict)

    def carry(self, peer: int, size_bytes: float, rate: float) -> None:
        self.carried[peer] = self.carried.get(peer, 0) + int(size_bytes)
        self.busy_s[peer] = self.busy_s.get(peer, 0.0) + size_bytes / rate

    def rails(self) -> list[tuple[int, int, bool, int, float]]:
        return [(peer, 0, True, carried, self.busy_s[peer]) for peer, carried in self.carried.items()]

    def has_ended(self, _: Done) -> bool:
        return True


class Job:
    """A job with one rank per host that runs sums of `size_bytes` by one pattern. Some hosts have reduced bandwidth."""

    def __init__(self, hosts: int, size_bytes: int, pattern: str, parts: dict[int, float]) -> None:
        topology = Topology(tuple((rank,) for rank in range(hosts)), names=tuple(f"host{at}" for at in range(hosts)))
        self.hosts, self.size_bytes, self.pattern, self.parts = hosts, size_bytes, pattern, parts
        self.connections = [Connections() for _ in range(hosts)]
        ranks = tuple(range(hosts))
        self.watches = [Watch(self.connections[rank], ranks, rank, topology) for rank in ranks]  # type: ignore[arg-type] # as the core
        self.usual = topology.rails[0].bandwidth_bytes_per_s

    def rate(self, sender: int, receiver: int) -> float:
        return self.usual * min(self.parts.get(sender, 1.0), self.parts.get(receiver, 1.0))

    def turn(self, draw: random.Random) -> None:
        """Run the operations between two checks, and agreements on every connection."""
        slowest = min(self.parts.values(), default=1.0)
        predicted_s = self.size_bytes / self.usual
        for rank, own in enumerate(self.connections):
            others = [peer for peer in range(self.hosts) if peer != rank]
            to = [(rank + 1) % self.hosts] if self.pattern == "ring" else others
            for peer in set(others) - set(to):  # agreements are bound by latency, not by bandwidth
                own.carry(peer, 200 * OPERATIONS, draw.uniform(1e4, 1e9))
            for peer in to:
                own.carry(peer, OPERATIONS * self.size_bytes / len(to), self.rate(rank, peer) * draw.uniform(0.95, 1.0))
            for number in range(OPERATIONS):
                start_s = number * 10.0
                took = Done((start_s, start_s + predicted_s / slowest))
                self.watches[rank].add(took, predicted_s)  # type: ignore[arg-type] # as the core's

    def one(self, part: float) -> None:
        """Run one ring operation whose duration fits hosts at `part` of their bandwidth."""
        predicted_s = self.size_bytes / self.usual
        for rank, own in enumerate(self.connections):
            to = (rank + 1) % self.hosts
            own.carry(to, self.size_bytes, self.rate(rank, to))
            took = Done((0.0, predicted_s / part))
            self.watches[rank].add(took, predicted_s)  # type: ignore[arg-type] # as the core's

    def check(self) -> None:
        table = np.array([watch.row() for watch in self.watches])
        for watch in self.watches:
            watch.check(table)


@pytest.mark.parametrize("seed", range(30))
def test_a_host_that_becomes_slow_is_named(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    draw = random.Random(seed)  # noqa: S311 -- a test's
    hosts = draw.randint(3, 8)
    slow, part = draw.randrange(hosts), draw.uniform(0.1, 0.5)
    pattern, size_bytes = draw.choice(["ring", "direct"]), draw.choice([1, 2, 3, 8]) * LEAST_BYTES
    job = Job(hosts, size_bytes, draw.choice(["ring", "direct"]), {})
    job.turn(draw)  # all hosts are fast; if the pattern changes below, some connections are idle later
    job.check()
    assert caplog.text == ""
    job.pattern, job.parts = pattern, {slow: part}
    with caplog.at_level(logging.WARNING, "multiring"):
        job.turn(draw)
        job.check()
        job.turn(draw)
        job.check()
    told = [each.getMessage() for each in caplog.records]
    assert len(told) == hosts  # once on each rank
    assert len(set(told)) == 1
    head = (
        f"all_reduces of {LEAST_BYTES} bytes and more on {hosts} ranks take {1 / part:.2f} times what was predicted; "
    )
    words = f"slow is host host{slow} (ranks [{slow}]), whose best connection carries "
    assert told[0].startswith(head + words)
    carries, _, usual = told[0].removeprefix(head + words).removesuffix(" MB/s").partition(" instead of ")
    assert float(carries) == pytest.approx(job.usual * part / 1e6, rel=0.06)
    assert float(usual) == pytest.approx(job.usual / 1e6, rel=0.06)


@pytest.mark.parametrize("seed", range(5))
def test_where_all_hosts_are_slow_none_is_named(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    draw = random.Random(seed)  # noqa: S311 -- a test's
    hosts, part = draw.randint(3, 8), draw.uniform(0.1, 0.5)
    job = Job(hosts, LEAST_BYTES, draw.choice(["ring", "direct"]), dict.fromkeys(range(hosts), part))
    for _ in range(2):
        job.turn(draw)
        job.check()
    (told,) = {each.getMessage() for each in caplog.records}
    head = (
        f"all_reduces of {LEAST_BYTES} bytes and more on {hosts} ranks take {1 / part:.2f} times what was predicted; "
    )
    assert told == head + "no host's connections are slower than the others'"


@pytest.mark.parametrize("seed", range(10))
def test_who_sees_sums_crawl_says_at_once_which_connection_does(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    draw = random.Random(seed)  # noqa: S311 -- a test's
    hosts, slow = draw.randint(3, 8), draw.randrange(3)
    times, size_bytes = draw.randint(20, 200), draw.choice([256, 512]) * LEAST_BYTES
    job = Job(hosts, size_bytes, "ring", {})
    with caplog.at_level(logging.WARNING, "multiring"):
        for _ in range(12):
            job.one(1.0)
        assert caplog.text == ""
        job.parts = {slow: 1 / times}
        for _ in range(3):
            job.one(1 / times)
    before = (slow - 1) % hosts
    ways = [(before, slow), (slow, (slow + 1) % hosts)]  # the ring's connections to and from the slow host
    usual, now = f"{job.usual / 1e6:.3g}", f"{job.usual / times / 1e6:.3g}"
    assert sorted(each.getMessage() for each in caplog.records) == sorted(
        f"all_reduces of {LEAST_BYTES} bytes and more on {hosts} ranks take {times} times what they took before; from "
        f"here, host host{sender} (ranks [{sender}]), host host{receiver} (ranks [{receiver}]) takes {now} instead of "
        f"{usual} MB/s"
        for sender, receiver in ways
    )
