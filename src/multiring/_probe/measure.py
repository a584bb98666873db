"""The probe: measure the links of each level of a topology.

Constants are fitted to the times of collectives, because plans consist of collectives. The times of different plans for
one small sum give latency and overhead; the time of a large sum gives the bandwidth. Every host takes part in one
pair at a time, and then in another pair, so that a slow host is slow in both pairs and can be named. The overhead of a
message is also measured with all ranks at once: if ranks share cores, it is several times the overhead in a pair.
"""

import hashlib
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass, replace
from itertools import combinations

import numpy as np

from multiring._probe.device_costs import device_costs
from multiring._probe.devices import with_devices
from multiring._probe.fit import Between, TransferDurations, reduce_rate
from multiring._probe.other_work import OtherWork, Taken
from multiring._probe.remarks import far_from_stated, median_of, racked, slow_hosts
from multiring._runtime import Group
from multiring._runtime.bootstrap.addresses import boot_id
from multiring._topology import SHM, Link, Topology

_LONGEST_LINE = 16  # hosts; the planner lays out more hosts as two axes
_IDLE = 0.05  # of the cores: if fewer are idle during large sums, the processors limit the links between hosts
_MOST_CORES = 1024
_NAME_BYTES = 16
_NEARLY_ALL = 60  # share of the measured rail; each other rail has share 1


@dataclass(frozen=True, slots=True)
class Findings:
    """The measured topology, warnings about it, and the cores that other work took during the measurement."""

    topology: Topology
    warnings: tuple[str, ...]
    beside: Taken | None = None


def probe(group: Group, *, seconds: float = 0.5, drain_s: float = 0.5) -> Findings:
    """Return the topology of `group` with measured links, with its devices and the measured costs of using them.

    Every rank calls it, and gets the same result.

    Args:
        group: all ranks of the job; the racks are those of its topology.
        seconds: how long to measure each large transfer; each rail and each pair of racks needs a few transfers.
        drain_s: how long to run before each measurement: shaped links carry bursts at full speed.
    """
    known = with_devices(group)
    patience = TransferDurations(seconds=seconds, drain_s=drain_s)
    others = OtherWork(group)
    known = replace(known, device_costs=device_costs(group, seconds=seconds))
    shm = _shm(group, patience)
    if len(known.hosts) == 1:
        return Findings(replace(known, shm=shm), (), others.taken())
    rounds = _rounds(known)
    by_rail = [_rail(group, rail, rounds, patience) for rail in range(len(known.rails))]
    measured, idle = [links for links, _ in by_rail], [part for _, part in by_rail]
    usual = tuple(median_of(each) for each in measured)
    own, warnings = slow_hosts(known, measured, usual)
    busy_s = _busy_overhead_s(group, usual[0], patience)
    usual = tuple(replace(link, overhead_s=max(link.overhead_s, busy_s)) for link in usual)
    takes_turns = min(idle) < _IDLE and outnumbered(*_cores(group))
    racks = tuple(known.racks)
    if len(racks) > 1:
        uplinks = [_uplink(group, rail, patience) for rail in range(len(known.rails))]
        racks = tuple(racked(rack, usual, [each[at] for each in uplinks]) for at, rack in enumerate(racks))
    warnings += far_from_stated(known, usual)
    reduce = shm.reduce_bytes_per_s
    rails = tuple(replace(link, reduce_bytes_per_s=reduce) for link in usual)
    found = replace(known, shm=shm, rails=rails, own_rails=own, racks=racks, takes_turns=takes_turns)
    return Findings(found, tuple(warnings), others.taken())


# ---- within hosts ----


def _shm(group: Group, patience: TransferDurations) -> Link:
    """Measure memory between the ranks of each host, all hosts at once."""
    if len(group.topology.hosts) == 1 and group.size > 1:
        return Between(part=group, engine="shm", shares=(1,), patience=patience).memory()
    halves = [group.subgroup(host) for host in group.topology.hosts]
    local = next(part for part in halves if part is not None)
    found = np.zeros(5)
    # Ranks do not spin in plans between hosts: if virtual hosts share cores, spinning ranks delay the others.
    waiting = group.calls.services.asleep() if len(group.topology.hosts) > 1 else nullcontext()
    with waiting:
        if local.size > 1:
            link, _ = Between(part=local, engine="shm+tcp", shares=(1,), patience=patience).link()
            found[:4] = astuple(link)
            found[4] = 1
    rows = group.all_gather(found[np.newaxis])
    rows = rows[rows[:, 4] > 0]
    if not len(rows):
        return replace(SHM, reduce_bytes_per_s=float(np.median(group.all_gather(np.array([reduce_rate()])))))
    latency_s, overhead_s, bandwidth, reduce = np.median(rows[:, :4], axis=0).tolist()
    return Link(latency_s=latency_s, overhead_s=overhead_s, bandwidth_bytes_per_s=bandwidth, reduce_bytes_per_s=reduce)


# ---- between hosts ----


def _rounds(topology: Topology) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs of neighbouring hosts; each host occurs at most once per round.

    A pair is within one rack if possible.
    """
    racks = [list(rack.hosts) for rack in topology.racks] or [list(range(len(topology.hosts)))]
    pairs = [pair for rack in racks for pair in _ring(rack)]
    lonely = [rack[0] for rack in racks if len(rack) == 1]
    pairs += _ring([*lonely, *[rack[0] for rack in racks if len(rack) > 1][:1]]) if lonely else []
    rounds: list[list[tuple[int, int]]] = []
    for pair in pairs:
        free = [each for each in rounds if not any(set(pair) & set(other) for other in each)]
        if free:
            free[0].append(pair)
        else:
            rounds.append([pair])
    return rounds


def _ring(hosts: Sequence[int]) -> list[tuple[int, int]]:
    if len(hosts) < 2:
        return []
    if len(hosts) == 2:
        return [(hosts[0], hosts[1])]
    return [(host, hosts[(at + 1) % len(hosts)]) for at, host in enumerate(hosts)]


def _rail(
    group: Group, rail: int, rounds: list[list[tuple[int, int]]], patience: TransferDurations
) -> tuple[list[Link], float]:
    """Measure one rail in all pairs of hosts.

    Returns:
        Each host's link, from the better of its pairs; and the part of the cores that were idle, on the median host.
    """
    hosts = len(group.topology.hosts)
    best = np.zeros((hosts, 5))
    for pairs in rounds:
        found = np.zeros((hosts, 5))
        part = _part_of(group, [[group.topology.hosts[host][0] for host in pair] for pair in pairs])
        if part is not None:
            link, idle = Between(part=part, engine="tcp", shares=_all_on(rail), patience=patience).link()
            found[group.topology.host_of()[group.rank]] = *astuple(link), idle
        group.all_reduce(found, "max")
        better = found[:, 2] > best[:, 2]
        best[better] = found[better]
    links = [
        Link(latency_s=row[0], overhead_s=row[1], bandwidth_bytes_per_s=row[2], reduce_bytes_per_s=row[3])
        for row in best.tolist()
    ]
    return links, float(np.median(best[:, 4]))


def _busy_overhead_s(group: Group, rail: Link, patience: TransferDurations) -> float:
    """Return the overhead in seconds of a message between hosts while all ranks send: the median over lines."""
    hosts = group.topology.hosts
    local = min(len(ranks) for ranks in hosts)
    lines = [
        [ranks[at] for ranks in hosts[first : first + _LONGEST_LINE]]
        for first in range(0, len(hosts), _LONGEST_LINE)
        for at in range(local)
    ]
    part = _part_of(group, [line for line in lines if len(line) > 1])
    found = np.full(1, np.nan)
    group.barrier()
    if part is not None:
        found[0] = Between(part=part, engine="tcp", shares=(1,), patience=patience).overhead_s(rail.latency_s)
    return float(np.nanmedian(group.all_gather(found)))


def _cores(group: Group) -> tuple[list[bytes], list[frozenset[int]]]:
    """Return each rank's machine (virtual hosts may share one), and the cores that the rank may use there."""
    may_use = np.zeros(_MOST_CORES, np.uint8)
    may_use[[core for core in os.sched_getaffinity(0) if core < _MOST_CORES]] = 1
    machine = np.frombuffer(hashlib.blake2b(boot_id().encode(), digest_size=_NAME_BYTES).digest(), np.uint8)
    rows = group.all_gather(np.concatenate([machine, may_use])[np.newaxis])
    return (
        [row[:_NAME_BYTES].tobytes() for row in rows],
        [frozenset(np.flatnonzero(row[_NAME_BYTES:]).tolist()) for row in rows],
    )


def outnumbered(machines: Sequence[bytes], cores: Sequence[frozenset[int]]) -> bool:
    """Return whether some machine has more ranks than cores that they may use.

    Both arguments are by rank.
    """
    for machine in set(machines):
        used = [each for each, where in zip(cores, machines, strict=True) if where == machine]
        if len(used) > len(frozenset().union(*used)):
            return True
    return False


def _uplink(group: Group, rail: int, patience: TransferDurations) -> list[float]:
    """Return the bytes per second of each rack's uplink, while all its hosts send to another rack."""
    topology = group.topology
    found = np.zeros(len(topology.racks))
    for one, other in combinations(range(len(topology.racks)), 2):
        pairs = list(zip(topology.racks[one].hosts, topology.racks[other].hosts, strict=False))
        part = _part_of(group, [[topology.hosts[host][0] for host in pair] for pair in pairs])
        rate = np.zeros(1)
        if part is not None:
            between = Between(part=part, engine="tcp", shares=_all_on(rail), patience=patience)
            bytes_per_s, _ = between.bandwidth()
            rate[0] = bytes_per_s if part.rank == 0 else 0.0
        group.all_reduce(rate)
        found[[one, other]] = np.maximum(found[[one, other]], rate[0])
    return [float(each) for each in found]


def _part_of(group: Group, members: list[list[int]]) -> Group | None:
    """Return the group of `members` that contains this rank, or None; all ranks create all groups."""
    parts = [group.subgroup(ranks) for ranks in members]
    return next((part for part in parts if part is not None), None)


def _all_on(rail: int) -> tuple[int, ...]:
    # The last channel carries small buffers entirely, and nearly all bytes of large buffers.
    return (*[1] * rail, _NEARLY_ALL * max(rail, 1))
