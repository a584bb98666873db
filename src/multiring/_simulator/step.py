"""A training step under data parallelism: what it takes on some ranks of a cluster, and how well that scales.

`planner.parallelism` makes the forecast, as for `parallelize`. This module adds what compares numbers of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from multiring._topology import Topology
from multiring.errors import ArgumentError
from multiring.planner.parallelism import (
    Axis,
    BucketTime,
    Compute,
    GradientExchange,
    InputTime,
    LinkSeconds,
    Parallelism,
    Profile,
    Seconds,
    Unit,
    bucket_times,
    input_time,
    link_seconds,
    seconds_of,
)

# Backward computes gradients of inputs and of weights, which takes as many multiplications each as forward.
_FORWARD = 1 / 3
# A step that waits for communication, or for slower ranks, for less than this part of itself is bound by compute.
_BOUND = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedStep:
    """A step of all ranks together. Times are in seconds.

    `communication_s` is the sum of all all-reduces of gradients; `seconds.exchange` is the part of it that backward
    does not hide. `buckets` has each of these all-reduces. `forward_s` is the part of the compute before backward
    starts, and `links` says for how long the step's gradients occupy a rank's links. `input` is the time in which the
    workers of a rank make its samples of the step; None: not priced. `alone_s` is the step of one rank alone: all but
    the exchange and the waiting, in the same time, or the time in which it makes its samples, if that is longer.
    """

    ranks: int
    hosts: int
    batch: int
    seconds: Seconds
    communication_s: float
    buckets: Sequence[BucketTime] = ()
    forward_s: float
    links: LinkSeconds
    alone_s: float
    input: InputTime | None = None

    @property
    def efficiency(self) -> float:
        """The rate of a rank divided by that of one rank alone."""
        return self.alone_s / self.seconds.total

    @property
    def samples_per_s(self) -> float:
        """The samples that all ranks together train in a second."""
        return self.batch / self.seconds.total

    @property
    def bound(self) -> str:
        """What bounds the step: "compute", "communication", "slower ranks", "input", or "other work".

        Input bounds the step if making its samples takes longest. If input is not priced, other work may be that, too.
        """
        if self.seconds.input:
            return "input"
        exchange, waiting = self.seconds.exchange, self.seconds.waiting
        if max(exchange, waiting) >= _BOUND * self.seconds.total:
            return "communication" if exchange >= waiting else "slower ranks"
        if self.seconds.outside > self.seconds.compute + self.seconds.update:
            return "input or other work" if self.input is None else "other work"
        return "compute"


def profile_of(
    units: Sequence[Unit],
    batch_per_rank: int,
    samples_per_s: float,
    ranks: int,
    exchange: GradientExchange | None = None,
) -> Profile:
    """Return the profile of a model of which the rate of one rank is known.

    Args:
        units: the layers of the model.
        batch_per_rank: the samples of a rank in one step.
        samples_per_s: the samples that one rank alone trains in a second.
        ranks: the number of ranks.
        exchange: how gradients are averaged; by default in buckets of 25 MiB, exactly.

    Raises:
        ArgumentError: the batch or the rate is not positive.
    """
    if batch_per_rank < 1 or not 0 < samples_per_s < float("inf"):
        raise ArgumentError(f"a batch of {batch_per_rank} at {samples_per_s:g} samples/s: want both above 0")
    step_s = batch_per_rank / samples_per_s
    compute = Compute(batch_per_rank, step_s * _FORWARD, step_s * (1 - _FORWARD))
    return Profile(
        units=tuple(units), batch=batch_per_rank * ranks, compute=(compute,), exchange=exchange or GradientExchange()
    )


def step_of(profile: Profile, topology: Topology) -> SimulatedStep:
    """Return the step of `profile` on all ranks of `topology`, each with its own samples of the batch.

    Raises:
        ArgumentError: the batch cannot be cut into equal parts.
    """
    ranks = topology.ranks
    if profile.batch % ranks:
        raise ArgumentError(f"a batch of {profile.batch} samples cannot be cut into {ranks} equal parts")
    mix = Parallelism(((Axis.DATA, ranks),))
    seconds = seconds_of(mix, profile, topology)
    buckets = bucket_times(mix, profile, topology)
    made, alone_s = None, seconds.total - seconds.exchange - seconds.waiting - seconds.input
    if profile.feeding is not None:
        samples = profile.batch / ranks
        made = input_time(profile.feeding, samples, seconds.compute, topology)
        alone = input_time(profile.feeding, samples, seconds.compute, part_of(topology, 1))
        alone_s = max(alone_s, alone.seconds)
    return SimulatedStep(
        ranks=ranks,
        hosts=len(topology.hosts),
        batch=profile.batch,
        seconds=seconds,
        communication_s=sum(each.end_s - each.start_s for each in buckets),
        buckets=tuple(buckets),
        forward_s=profile.compute_of(profile.batch / ranks).forward_s,
        links=link_seconds(mix, profile, topology),
        alone_s=alone_s,
        input=made,
    )


def part_of(topology: Topology, ranks: int) -> Topology:
    """Return the first `ranks` ranks of a cluster, host by host.

    Raises:
        ArgumentError: the cluster does not have so many ranks.
    """
    if not 1 <= ranks <= topology.ranks:
        raise ArgumentError(f"{ranks} ranks of a cluster of {topology.ranks}: want 1 to {topology.ranks}")
    return (
        topology
        if ranks == topology.ranks
        else topology.restricted([rank for host in topology.hosts for rank in host][:ranks])
    )
