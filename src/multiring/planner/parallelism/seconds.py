"""Forecast the time of a training step under a mix: compute, communication that is not hidden, and the update."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from multiring._schedule import Collective, busy_s
from multiring._topology import Topology
from multiring.planner.parallelism.axes import Axis, Parallelism
from multiring.planner.parallelism.feeding import input_time
from multiring.planner.parallelism.flights import ends_in_flight
from multiring.planner.parallelism.parts import gathered_together, stages_of
from multiring.planner.parallelism.pipeline import StageTime, makespan
from multiring.planner.parallelism.prices import Prices, prices_of
from multiring.planner.parallelism.profile import GradientExchange, Profile, Unit
from multiring.planner.plan import PlannedOperation
from multiring.planner.ways import RAILS_PORT, SHM_PORT

# torch's DistributedDataParallel calls it _DEFAULT_FIRST_BUCKET_BYTES.
_FIRST_BUCKET_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Seconds:
    """The parts of a step, in seconds.

    `waiting` is by how much the slowest rank of a step computes longer than the median one: the others wait for it.
    `input` is by how much making the samples of a step takes longer than all other parts, beside which workers make
    them; 0 if it is not known how samples are made.
    """

    compute: float
    exchange: float
    update: float
    outside: float = 0.0
    waiting: float = 0.0
    input: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.compute + self.waiting + self.exchange + self.update + self.outside + self.input


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketTime:
    """When the all-reduce of a bucket of gradients starts and ends, in seconds of backward.

    It starts at `ready_s`, when the bucket is complete. From `start_s` on, no earlier bucket is in flight beside it, so
    the sum of `end_s` - `start_s` is the time in which any bucket is in flight.
    """

    size_bytes: int
    ready_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSeconds:
    """For how long the gradients of a step occupy a rank's part of each kind of link, in seconds of sending.

    `inside` are the links inside a host, `rails` those between hosts, and `uplinks` those between racks. Two kinds can
    be occupied at the same time. An operation that uses one of several rails counts as long as it occupies that rail.
    The time to handle messages is not contained.
    """

    inside: float = 0.0
    rails: float = 0.0
    uplinks: float = 0.0


def seconds_of(parallelism: Parallelism, profile: Profile, topology: Topology) -> Seconds:
    """Return the seconds of a step of the whole batch under `parallelism`."""
    prices = prices_of(parallelism, topology, profile.overheads.collective_s)
    forecast = _replicated
    for axis, other in ((Axis.PIPELINE, _pipeline), (Axis.TENSOR, _tensor), (Axis.SHARD, _sharded)):
        forecast = other if parallelism.size(axis) > 1 else forecast
    found = replace(forecast(parallelism, profile, prices), outside=profile.overheads.outside_s)
    if profile.feeding is None:
        return found
    made = input_time(profile.feeding, profile.batch / parallelism.data_ranks, found.compute, topology)
    return replace(found, input=max(0.0, made.seconds - found.total))


def _replicated(parallelism: Parallelism, profile: Profile, prices: Prices) -> Seconds:
    """Forecast data parallelism: a bucket's reduction starts once it is complete, while backward continues."""
    compute = profile.compute_of(profile.batch / parallelism.data_ranks)
    buckets = _bucket_times(parallelism, profile, prices)
    late = max((each.end_s for each in buckets), default=0.0) - compute.backward_s
    waiting = (profile.slowest_of(parallelism.data_ranks) - 1) * compute.seconds
    update = _update(profile, profile.parameter_bytes, plain=_count(profile.units))
    if profile.exchange.lag:
        # The averages of a step are used by the next step, whose buckets are reduced after those of this step. A rank
        # that is late has as long to catch up.
        free = compute.seconds + update + profile.overheads.outside_s
        late = sum(each.end_s - each.start_s for each in buckets) - free
        waiting = max(0.0, waiting + min(late, 0.0))
    return Seconds(compute=compute.seconds, exchange=max(0.0, late), update=update, waiting=waiting)


def bucket_times(parallelism: Parallelism, profile: Profile, topology: Topology) -> list[BucketTime]:
    """Return the buckets of a step under data parallelism, in the order of their start; none for one rank.

    All buckets that are complete are in flight, as the reducers keep them; see `ends_in_flight`.
    """
    return _bucket_times(parallelism, profile, prices_of(parallelism, topology, profile.overheads.collective_s))


def link_seconds(parallelism: Parallelism, profile: Profile, topology: Topology) -> LinkSeconds:
    """Return the seconds for which the buckets of a step occupy a rank's links under data parallelism."""
    prices = prices_of(parallelism, topology, profile.overheads.collective_s)
    sums: Counter[str] = Counter()
    for each in _operations(profile, prices) if parallelism.ranks > 1 else ():
        sums.update(busy_s(each.schedule, each.size_bytes, each.ways, each.segments))
    return LinkSeconds(inside=sums[f"wire {SHM_PORT}"], rails=sums[f"wire {RAILS_PORT}"], uplinks=sums["uplink"])


def _operations(profile: Profile, prices: Prices) -> list[PlannedOperation]:
    """Return the all-reduce of each bucket, for two ranks or more."""
    found = [
        prices.operation(Axis.DATA, Collective.ALL_REDUCE, size_bytes, profile.exchange.wire)
        for _, size_bytes in buckets_of(profile.units, profile.exchange)
    ]
    return [each for each in found if each is not None]


def _bucket_times(parallelism: Parallelism, profile: Profile, prices: Prices) -> list[BucketTime]:
    if parallelism.ranks == 1:
        return []
    backward_s = profile.compute_of(profile.batch / parallelism.data_ranks).backward_s
    buckets = buckets_of(profile.units, profile.exchange)
    starts_s = [ready * backward_s for ready, _ in buckets]
    ends = ends_in_flight(_operations(profile, prices), starts_s)
    over, found = 0.0, []
    for (_, size_bytes), ready_s, end_s in zip(buckets, starts_s, ends, strict=True):
        ended = end_s + size_bytes * profile.overheads.copy_s_per_byte
        start_s = min(max(over, ready_s), ended)
        found.append(BucketTime(size_bytes=size_bytes, ready_s=ready_s, start_s=start_s, end_s=ended))
        over = max(over, ended)
    return found


def buckets_of(units: Sequence[Unit], exchange: GradientExchange | None = None) -> list[tuple[float, int]]:
    """Return, for each bucket of data parallelism, the part of backward after which it is complete, and its bytes.

    `exchange` says when a bucket is complete, by default as DistributedDataParallel does.
    """
    exchange = exchange or GradientExchange()
    whole = sum(unit.seconds for unit in units) or 1.0
    found: list[tuple[float, int]] = []
    done, last, waiting, most = 0.0, 0.0, 0, min(_FIRST_BUCKET_BYTES, exchange.bucket_bytes)
    for unit in reversed(units):
        if exchange.at_most and 0 < waiting < waiting + unit.parameter_bytes > most:
            found.append((last / whole, waiting))
            waiting, most = 0, exchange.bucket_bytes
        done += unit.seconds
        waiting += unit.parameter_bytes
        last = done if unit.parameter_bytes else last
        if waiting >= most and not exchange.at_most:
            found.append((last / whole, waiting))
            waiting, most = 0, exchange.bucket_bytes
    return [*found, (last / whole, waiting)] if waiting else found


def _sharded(parallelism: Parallelism, profile: Profile, prices: Prices) -> Seconds:
    """Forecast sharded data parallelism: on CPUs, torch does nothing else while it gathers and reduces.

    A group is gathered for forward and again for backward; the rest of the model is gathered once.
    """
    compute = profile.compute_of(profile.batch / parallelism.data_ranks)
    exchange, costs = 0.0, profile.overheads
    for at, group in enumerate(gathered_together(profile.units)):
        size_bytes = sum(profile.units[index].parameter_bytes for index in group)
        if not size_bytes:
            continue
        times = 1 if at == 0 else 2
        exchange += times * prices.collective_s(Axis.SHARD, Collective.ALL_GATHER, size_bytes)
        exchange += prices.collective_s(Axis.SHARD, Collective.REDUCE_SCATTER, size_bytes)
        if parallelism.size(Axis.DATA) > 1:
            part = size_bytes / parallelism.size(Axis.SHARD)
            exchange += prices.collective_s(Axis.DATA, Collective.ALL_REDUCE, part)
        exchange += costs.sharded_unit_s + (times + 1) * size_bytes * costs.copy_s_per_byte
    own = profile.parameter_bytes / parallelism.size(Axis.SHARD)
    update = _update(profile, 0.0, own, dtensors=_count(profile.units))
    return Seconds(compute=compute.seconds, exchange=exchange, update=update)


def _tensor(parallelism: Parallelism, profile: Profile, prices: Prices) -> Seconds:
    """Forecast tensor parallelism: ranks exchange the outputs of divided layers, then average over the data axis."""
    samples = profile.batch / parallelism.data_ranks
    ways = parallelism.size(Axis.TENSOR)
    left = 1 - profile.split_share * (1 - 1 / ways)
    exchange = sum(
        prices.collective_s(Axis.TENSOR, collective, size_bytes * samples)
        for unit in profile.units
        for collective, sizes in ((Collective.ALL_GATHER, unit.gathers), (Collective.ALL_REDUCE, unit.sums))
        for size_bytes in sizes
    )
    split = sum(unit.split_parameters for unit in profile.units)
    split_bytes = sum(unit.split_bytes for unit in profile.units)
    whole = profile.parameter_bytes - split_bytes
    modules = sum(len(unit.gathers) + len(unit.sums) for unit in profile.units)
    exchange += modules * profile.overheads.split_module_s + _averaged(
        parallelism, profile, prices, whole + split_bytes / ways
    )
    update = _update(profile, whole, split_bytes / ways, plain=_count(profile.units) - split, dtensors=split)
    return Seconds(compute=profile.compute_of(samples).seconds * left, exchange=exchange, update=update)


def _pipeline(parallelism: Parallelism, profile: Profile, prices: Prices) -> Seconds:
    """Forecast a 1F1B pipeline. If ranks share cores, a waiting stage leaves its cores to the other stages."""
    units, m = profile.units, parallelism.microbatches
    places = stages_of(units, parallelism.size(Axis.PIPELINE))
    whole = sum(unit.seconds for unit in units) or 1.0
    samples = profile.batch / parallelism.data_ranks / m
    turn = profile.compute_of(samples)
    shares = [sum(units[index].seconds for index in place) / whole for place in places]
    sizes = [sum(units[index].parameter_bytes for index in place) for place in places]
    # The gradients of all microbatches but the first are added to the earlier gradients.
    summed_s = [size * profile.overheads.sum_s_per_byte * (m - 1) / m for size in sizes]
    own_s = profile.overheads.microbatch_s / 2
    # Compute was measured while all ranks compute; a stage that runs alone has its core for itself.
    stages = [
        StageTime(
            (share * turn.forward_s + own_s) / profile.crowding,
            (share * turn.backward_s + own_s + sum_s) / profile.crowding,
        )
        for share, sum_s in zip(shares, summed_s, strict=True)
    ]
    cores = len(stages) / profile.crowding
    passed = [prices.message_s(Axis.PIPELINE, units[place[-1]].output_bytes * samples) for place in places[:-1]]
    compute = makespan(stages, m, cores, [0.0] * len(passed))
    exchange = makespan(stages, m, cores, passed) - compute
    held = max(sizes)
    count = max(_count([units[index] for index in place]) for place in places)
    exchange += _averaged(parallelism, profile, prices, held)
    # The last stages end and update before the first stage. While the first stage updates, the other stages need no
    # cores.
    update = _update(profile, held, plain=count) * max(1 / profile.crowding, 1 / len(stages))
    return Seconds(compute=compute, exchange=exchange, update=update)


def _averaged(parallelism: Parallelism, profile: Profile, prices: Prices, size_bytes: float) -> float:
    """Return the seconds in which gradients are averaged over the data axis after backward, in one piece."""
    if parallelism.size(Axis.DATA) == 1:
        return 0.0
    copied_s = 2 * size_bytes * profile.overheads.copy_s_per_byte
    return prices.collective_s(Axis.DATA, Collective.ALL_REDUCE, size_bytes) + copied_s


def _update(
    profile: Profile, whole_bytes: float, divided_bytes: float = 0.0, *, plain: int = 0, dtensors: int = 0
) -> float:
    costs = profile.overheads
    return (
        whole_bytes * costs.update_s_per_byte
        + divided_bytes * costs.update_s_per_divided_byte
        + plain * costs.update_s_per_parameter
        + dtensors * costs.update_s_per_dtensor
    )


def _count(units: Sequence[Unit]) -> int:
    return sum(unit.parameters for unit in units)
