"""What to change in a training: the same step with one setting changed, predicted as the step itself."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from multiring._schedule import WIRES, Wire, wire_of
from multiring._simulator.step import SimulatedStep, step_of
from multiring._simulator.sweep import ProfileOf, with_workers
from multiring._topology import Link, Topology
from multiring.planner.parallelism import GradientExchange

_MIB = 1 << 20
# Limits of buckets that are tried, in bytes.
_LIMITS = (4 * _MIB, 25 * _MIB, 100 * _MIB)


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One changed setting, and the step that it gives. `alters_training`: the gradients or their use differ."""

    what: str
    step: SimulatedStep
    alters_training: bool


def changes_of(
    profile_of: ProfileOf, batch_per_rank: int, exchange: GradientExchange, topology: Topology
) -> list[Change]:
    """Return the changes that are possible on all ranks of `topology`, the shortest step first; none for one rank.

    Args:
        profile_of: the training.
        batch_per_rank: the samples of a rank in one step.
        exchange: how gradients are averaged now.
        topology: the cluster.
    """
    ranks = topology.ranks
    if ranks == 1:
        return []
    found = []
    for what, changed, alters in _exchanges(exchange, crosses_hosts=len(topology.hosts) > 1):
        step = step_of(profile_of(ranks, batch_per_rank, changed), topology)
        found.append(Change(what=what, step=step, alters_training=alters))
    profile = profile_of(ranks, batch_per_rank, exchange)
    if profile.feeding is not None:
        workers = 2 * profile.feeding.workers
        step = step_of(with_workers(profile, workers), topology)
        found.append(Change(what=f"{workers} workers a rank", step=step, alters_training=False))
    if len(topology.hosts) > 1:
        step = step_of(profile, _with_faster_rails(topology))
        found.append(Change(what="rails of twice the bandwidth", step=step, alters_training=False))
    return sorted(found, key=lambda each: each.step.seconds.total)


def _exchanges(exchange: GradientExchange, *, crosses_hosts: bool) -> Iterator[tuple[str, GradientExchange, bool]]:
    if crosses_hosts and exchange.wire is Wire.NONE:
        for name in WIRES:
            yield f"wire {name} between hosts", replace(exchange, wire=wire_of(name)), True
    if not exchange.lag:
        yield "lag 1: a step uses the averages of the step before", replace(exchange, lag=1), True
    for limit in _LIMITS:
        if limit != exchange.bucket_bytes:
            yield f"buckets of {limit // _MIB} MiB", replace(exchange, bucket_bytes=limit), False


def _with_faster_rails(topology: Topology) -> Topology:
    own = tuple(replace(each, rails=_doubled(each.rails)) for each in topology.own_rails)
    return replace(topology, rails=_doubled(topology.rails), own_rails=own)


def _doubled(rails: Sequence[Link]) -> tuple[Link, ...]:
    return tuple(replace(rail, bandwidth_bytes_per_s=2 * rail.bandwidth_bytes_per_s) for rail in rails)
