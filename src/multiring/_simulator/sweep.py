"""A sweep: the steps of all combinations of some settings on a cluster, and the best of them.

A point is priced by `step_of`, as a single prediction is.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from multiring._schedule import Wire
from multiring._simulator.step import SimulatedStep, part_of, step_of
from multiring._topology import Topology
from multiring.errors import ArgumentError
from multiring.planner.parallelism import GradientExchange, Profile

# The profile of a training for some ranks, samples of a rank, and a way to average gradients.
ProfileOf = Callable[[int, int, GradientExchange], Profile]


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepAxes:
    """The values of each setting: each combination is a point.

    `batches` are samples of a rank. `nics` are the bytes per second of each rail in place of the cluster's; None: the
    cluster's own. `workers` are those of a rank, in place of the profile's; None: the profile's own.
    """

    ranks: Sequence[int]
    batches: Sequence[int]
    exchanges: Sequence[GradientExchange]
    nics: Sequence[float | None] = (None,)
    workers: Sequence[int | None] = (None,)


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPoint:
    """One combination of settings, and the step that it gives."""

    batch_per_rank: int
    exchange: GradientExchange
    nic_bytes_per_s: float | None
    workers: int | None
    step: SimulatedStep

    @property
    def is_exact(self) -> bool:
        """Whether each step uses the exact average of its own gradients, as the law of large batches assumes."""
        return self.exchange.wire is Wire.NONE and not self.exchange.lag


def exchanges_of(
    usual: GradientExchange, wires: Sequence[Wire], lags: Sequence[int], buckets: Sequence[int]
) -> list[GradientExchange]:
    """Return `usual` with each combination of wire types, lags and limits of buckets in bytes; an empty list: as usual.

    Raises:
        ArgumentError: a lag or a limit is impossible.
    """
    return [
        replace(usual, wire=wire, lag=lag, bucket_bytes=bucket)
        for wire, lag, bucket in product(wires or [usual.wire], lags or [usual.lag], buckets or [usual.bucket_bytes])
    ]


def sweep(axes: SweepAxes, profile_of: ProfileOf, topology: Topology) -> Iterator[SweepPoint]:
    """Yield each point with its step. Points of one part of the cluster follow each other, and share its prices.

    Raises:
        ArgumentError: the cluster has fewer ranks, or a batch is impossible.
    """
    for nic, ranks in product(axes.nics, axes.ranks):
        part = part_of(with_rails_of(topology, nic), ranks)
        for batch, exchange, workers in product(axes.batches, axes.exchanges, axes.workers):
            step = step_of(with_workers(profile_of(ranks, batch, exchange), workers), part)
            yield SweepPoint(batch_per_rank=batch, exchange=exchange, nic_bytes_per_s=nic, workers=workers, step=step)


def with_workers(profile: Profile, workers: int | None) -> Profile:
    """Return the profile with so many workers on each rank; None: unchanged.

    Raises:
        ArgumentError: the profile does not say how samples are made.
    """
    if workers is None:
        return profile
    if profile.feeding is None:
        raise ArgumentError(f"{workers} workers a rank: want a profile that says what a worker takes for a sample")
    return replace(profile, feeding=replace(profile.feeding, workers=workers))


def with_rails_of(topology: Topology, bytes_per_s: float | None) -> Topology:
    """Return the topology with rails of this bandwidth on all hosts; the uplinks of racks stay. None: unchanged."""
    if bytes_per_s is None:
        return topology
    rails = tuple(replace(rail, bandwidth_bytes_per_s=bytes_per_s) for rail in topology.rails)
    return replace(topology, rails=rails, own_rails=())
