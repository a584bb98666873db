"""The prices of an all-reduce of device tensors, compared with hand-computed ones, and the way that is chosen."""

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiring._schedule import Accumulation, Collective, Wire
from multiring._topology import SHM, TCP, DeviceCosts, DeviceIsland, DeviceLink, HostDevices, Link, Topology
from multiring._topology.device_paths import device_paths
from multiring.errors import ArgumentError
from multiring.planner import (
    DevicePlan,
    DeviceRoute,
    Task,
    auto_path,
    auto_route,
    cheapest,
    chosen_route,
    device_plans,
    problem_of_route,
)

MIB = 1 << 20
ALL = frozenset(DeviceRoute)
STAGED, HIERARCHICAL, NCCL = DeviceRoute.STAGED, DeviceRoute.HIERARCHICAL, DeviceRoute.NCCL
COSTS = DeviceCosts(
    copy_latency_s=10e-6,
    to_host_bytes_per_s=1e9,
    to_device_bytes_per_s=2e9,
    nccl_latency_s=50e-6,
    nccl_bytes_per_s=20e9,
    nccl_network_latency_s=100e-6,
    nccl_network_bytes_per_s=5e9,
)


def topology(*sizes: int, **parts: Any) -> Topology:
    ends = list(itertools.accumulate(sizes))
    return Topology(tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)), **parts)


def with_devices(found: Topology, count: int, **parts: Any) -> Topology:
    hosts = range(len(found.hosts))
    return replace(found, devices=tuple(HostDevices(host=host, kinds=("H100",) * count, **parts) for host in hosts))


def all_reduce(size_bytes: int, **parts: Any) -> Task:
    return Task(collective=Collective.ALL_REDUCE, size_bytes=size_bytes, **parts)


def near(*parts: tuple[str, float]) -> Any:
    """Return what is equal to the `parts` of a plan, up to rounding."""
    return tuple((name, pytest.approx(seconds)) for name, seconds in parts)


def by_route(task: Task, found: Topology) -> dict[DeviceRoute, DevicePlan]:
    return {plan.route: plan for plan in device_plans(task, found)}


def host_s(size_bytes: int, found: Topology) -> float:
    return cheapest(all_reduce(size_bytes), found).predicted_seconds


def test_staging_is_two_copies_and_the_hosts_schedule() -> None:
    found = topology(2, 2, device_costs=COSTS)
    plan = by_route(all_reduce(8 * MIB), found)[STAGED]
    to_host, host, to_device = (seconds for _, seconds in plan.parts)
    assert to_host == pytest.approx(10e-6 + 8 * MIB / 1e9)
    assert to_device == pytest.approx(10e-6 + 8 * MIB / 2e9)
    assert host == host_s(8 * MIB, found)
    assert plan.host_plan == cheapest(all_reduce(8 * MIB), found)
    assert plan.predicted_seconds == pytest.approx(to_host + host + to_device)
    assert plan.defaults == ()


def test_nccl_on_one_host_is_an_agreement_and_a_ring() -> None:
    found = topology(4, device_costs=COSTS)
    plan = by_route(all_reduce(8 * MIB), found)[NCCL]
    assert plan.parts == near(("agreement", host_s(1, found)), ("nccl", 50e-6 + 2 * 3 / 4 * 8 * MIB / 20e9))
    assert plan.host_plan is None


def test_nccl_over_hosts_has_the_costs_of_the_network() -> None:
    found = topology(2, 2, device_costs=COSTS)
    plan = by_route(all_reduce(8 * MIB), found)[NCCL]
    assert plan.parts[1:] == near(("nccl", 100e-6 + 2 * 3 / 4 * 8 * MIB / 5e9))


def test_the_hierarchical_way_takes_shares_between_hosts() -> None:
    found = topology(2, 2, device_costs=COSTS)
    plan = by_route(all_reduce(8 * MIB), found)[HIERARCHICAL]
    # Two ranks of each host send at once, so each has half of the rail.
    narrow = Topology(((0,), (1,)), rails=(replace(TCP, bandwidth_bytes_per_s=TCP.bandwidth_bytes_per_s / 2),))
    half = 50e-6 + 1 / 2 * 8 * MIB / 20e9
    assert plan.parts == near(
        ("agreement", host_s(1, found)),
        ("reduce-scatter by nccl", half),
        ("copy to the host", 10e-6 + 4 * MIB / 1e9),
        ("between 2 hosts", host_s(4 * MIB, narrow)),
        ("copy to the device", 10e-6 + 4 * MIB / 2e9),
        ("all-gather by nccl", half),
    )


def test_the_smallest_host_gives_the_number_of_shares() -> None:
    found = topology(3, 1, device_costs=COSTS)
    parts = dict(by_route(all_reduce(6 * MIB), found)[HIERARCHICAL].parts)
    assert parts["copy to the host"] == pytest.approx(10e-6 + 6 * MIB / 1e9)
    assert parts["all-gather by nccl"] == pytest.approx(50e-6 + 2 / 3 * 6 * MIB / 20e9)


def test_defaults_are_used_and_named() -> None:
    plans = by_route(all_reduce(MIB), topology(2))
    assert plans[STAGED].defaults == ("to_host_mbit_per_s", "copy_latency_us", "to_device_mbit_per_s")
    assert plans[NCCL].defaults == ("nccl_latency_us", "nccl_mbit_per_s")
    assert dict(plans[STAGED].parts)["copy to the host"] == pytest.approx(30e-6 + MIB / 50e9)
    # PCIe through a processor: 5/6 of 50 GB/s, and two steps of 1 us.
    assert dict(plans[NCCL].parts)["nccl"] == pytest.approx(82.6e-6 + 6.6e-6 + 2e-6 + MIB / (50e9 * 5 / 6))
    # Only what is not measured has a default.
    costs = DeviceCosts(copy_latency_s=1e-6, nccl_latency_s=1e-6, nccl_bytes_per_s=1e9)
    plans = by_route(all_reduce(MIB), topology(2, device_costs=costs))
    assert plans[STAGED].defaults == ("to_host_mbit_per_s", "to_device_mbit_per_s")
    assert plans[NCCL].defaults == ()


@pytest.mark.parametrize(
    ("parts", "rate", "step_s"),
    [
        ({"link": DeviceLink.PCIE_SOCKETS}, 10e9, 1e-6),
        ({"link": DeviceLink.PCIE}, 50e9 * 5 / 6, 1e-6),
        ({"link": DeviceLink.PCIE_SWITCH}, 50e9, 1e-6),
        ({"link": DeviceLink.NVLINK}, 50e9, 0.6e-6),  # one NVLink is slower than PCIe 5.0
        ({"link": DeviceLink.NVLINK, "nvlinks": 18}, 18 * 20e9, 0.6e-6),
    ],
)
def test_the_class_of_the_links_gives_nccls_defaults(parts: dict[str, Any], rate: float, step_s: float) -> None:
    found = with_devices(topology(4), 4, **parts)
    nccl = dict(by_route(all_reduce(64 * MIB), found)[NCCL].parts)["nccl"]
    assert nccl == pytest.approx(82.6e-6 + 6.6e-6 + 6 * step_s + 1.5 * 64 * MIB / rate)


def test_the_slowest_host_gives_the_defaults_over_hosts() -> None:
    slow = replace(TCP, bandwidth_bytes_per_s=1e8)
    found = with_devices(topology(2, 2, rails=(slow, slow)), 2, link=DeviceLink.NVLINK, nvlinks=4)
    nccl = dict(by_route(all_reduce(MIB), found)[NCCL].parts)["nccl"]
    # Two steps between hosts take a message of the rail each; four steps stay inside a host.
    assert nccl == pytest.approx(82.6e-6 + 6.6e-6 + 4 * 0.6e-6 + 2 * 45e-6 + 1.5 * MIB / 2e8)


def test_ranks_that_share_a_device_are_staged_and_share_its_link() -> None:
    alone, shared = with_devices(topology(2), 2), with_devices(topology(2), 1)
    task = all_reduce(8 * MIB)
    assert problem_of_route(NCCL, alone) == ""
    assert problem_of_route(NCCL, shared) == (
        "2 ranks of a host share its devices, and NCCL needs a device for each rank"
    )
    assert [plan.route for plan in device_plans(task, shared)] == [STAGED]
    copies = [dict(by_route(task, each)[STAGED].parts)["copy to the host"] for each in (alone, shared)]
    assert copies[1] - 30e-6 == pytest.approx(2 * (copies[0] - 30e-6))
    # Measured rates were measured while the ranks shared it.
    assert by_route(task, replace(shared, device_costs=COSTS))[STAGED].parts[0][1] == pytest.approx(
        10e-6 + 8 * MIB / 1e9
    )


@pytest.mark.parametrize(
    ("sizes", "routes"),
    [
        ((1,), {STAGED}),
        ((4,), {STAGED, NCCL}),
        ((1, 1), {STAGED, NCCL}),
        ((2, 2), ALL),
        ((2, 1), ALL),
    ],
)
def test_the_hosts_say_which_ways_there_are(sizes: tuple[int, ...], routes: frozenset[DeviceRoute]) -> None:
    assert set(by_route(all_reduce(MIB), topology(*sizes))) == routes
    for route in ALL - routes:
        assert problem_of_route(route, topology(*sizes))


def test_a_wire_type_needs_the_host() -> None:
    assert set(by_route(all_reduce(MIB, wire=Wire.BF16), topology(2, 2))) == {STAGED, HIERARCHICAL}


def test_averages_of_integers_need_the_host() -> None:
    task = all_reduce(MIB, accumulation=Accumulation.ONCE)
    assert set(by_route(task, topology(2, 2))) == {STAGED}
    assert chosen_route(task, topology(2), ALL) is STAGED


def test_only_all_reduces_have_prices() -> None:
    task = Task(collective=Collective.BROADCAST, size_bytes=MIB)
    with pytest.raises(ArgumentError, match="broadcast of device tensors: want all_reduce"):
        device_plans(task, topology(2))


# -- the choice


def test_measured_costs_choose_by_price() -> None:
    task, found = all_reduce(8 * MIB), topology(2, device_costs=COSTS)
    assert chosen_route(task, found, ALL) is NCCL
    slow = replace(found, device_costs=replace(COSTS, nccl_latency_s=1.0))
    assert chosen_route(task, slow, ALL) is STAGED
    for each in (found, slow):
        assert chosen_route(task, each, frozenset({STAGED})) is STAGED
        assert chosen_route(task, each, ALL) is device_plans(task, each)[0].route


@pytest.mark.parametrize(
    ("sizes", "usual"), [((1,), STAGED), ((2,), NCCL), ((2, 2), HIERARCHICAL), ((2, 1), HIERARCHICAL), ((1, 1), STAGED)]
)
def test_without_measurements_large_tensors_take_nccl_inside_hosts(sizes: tuple[int, ...], usual: DeviceRoute) -> None:
    costs = DeviceCosts(nccl_latency_s=1.0)  # too little to compare
    for found in (topology(*sizes), topology(*sizes, device_costs=costs)):
        assert chosen_route(all_reduce(64 << 10), found, ALL) is usual
        assert chosen_route(all_reduce((64 << 10) - 1), found, ALL) is STAGED
        assert chosen_route(all_reduce(64 << 10), found, frozenset({STAGED})) is STAGED


def test_a_way_that_is_impossible_is_never_chosen() -> None:
    shared = with_devices(topology(2, device_costs=replace(COSTS, to_host_bytes_per_s=1.0)), 1)
    assert chosen_route(all_reduce(8 * MIB), shared, ALL) is STAGED


def test_nccl_is_opened_for_the_path_of_large_tensors() -> None:
    fast, far = replace(COSTS, nccl_network_bytes_per_s=1e12), replace(COSTS, nccl_network_latency_s=1.0)
    for costs, path in ((fast, NCCL), (far, HIERARCHICAL)):
        found = topology(4, 4, device_costs=costs)
        assert auto_path(found) is path is chosen_route(all_reduce(16 * MIB), found, ALL)
        for size_bytes in (1, 1 << 14, 1 << 20, 1 << 24):
            task = all_reduce(size_bytes)
            assert auto_route(task, found) is chosen_route(task, found, frozenset({STAGED, path}))
    # A small tensor is staged, although the path of large ones is another.
    slow = topology(2, device_costs=replace(COSTS, nccl_latency_s=1e-3))
    assert [auto_route(all_reduce(size), slow) for size in (1, 16 * MIB)] == [STAGED, NCCL]
    never = topology(2, device_costs=replace(COSTS, nccl_latency_s=1e3))
    assert auto_path(never) is STAGED


@pytest.mark.parametrize("sizes", [(1,), (2,), (2, 2), (2, 1), (1, 1)])
def test_the_default_path_is_the_one_of_the_hosts(sizes: tuple[int, ...]) -> None:
    found = topology(*sizes)
    assert auto_path(found).value == device_paths(found.hosts)[0]
    assert auto_route(all_reduce(4), found, 0) is auto_path(found)
    assert auto_route(all_reduce(4), found) is STAGED


# -- properties

RATES = st.floats(1e8, 1e12)
TIMES = st.floats(0.0, 1e-3)
MEASURED = st.builds(
    DeviceCosts,
    **{each.name: RATES if each.name.endswith("_per_s") else TIMES for each in fields(DeviceCosts)},
)
SHAPES = st.sampled_from([(2,), (4,), (2, 2), (1, 1), (2, 1)])
LINKS = st.builds(
    Link,
    latency_s=TIMES,
    overhead_s=st.floats(1e-7, 1e-4),
    bandwidth_bytes_per_s=st.floats(1e8, 1e10),
    reduce_bytes_per_s=st.floats(1e9, 1e10),
)
_NEAR = 1.03  # prices of buffers in many segments are exact to 3 %


@given(SHAPES, MEASURED | st.just(DeviceCosts()), LINKS, st.integers(1, 1 << 24), st.integers(1, 1 << 24))
def test_more_bytes_never_cost_less(
    sizes: tuple[int, ...], costs: DeviceCosts, rail: Link, one: int, other: int
) -> None:
    found = topology(*sizes, device_costs=costs, rails=(rail,))
    less, more = sorted((one, other))
    small, large = by_route(all_reduce(less), found), by_route(all_reduce(more), found)
    for route, plan in small.items():
        assert plan.predicted_seconds <= large[route].predicted_seconds * _NEAR


@given(SHAPES, st.sampled_from(DeviceLink), st.sampled_from(DeviceLink), st.integers(1, 18), st.integers(1, 1 << 24))
def test_a_faster_class_never_makes_the_choice_slower(
    sizes: tuple[int, ...], one: DeviceLink, other: DeviceLink, nvlinks: int, size_bytes: int
) -> None:
    count, task = max(sizes), all_reduce(size_bytes)
    slow, fast = sorted((one, other))
    before = with_devices(topology(*sizes), count, link=slow, nvlinks=nvlinks)
    after = with_devices(topology(*sizes), count, link=fast, nvlinks=nvlinks)
    assert device_plans(task, after)[0].predicted_seconds <= device_plans(task, before)[0].predicted_seconds
    if count > 1:  # the same for a faster link between two devices only
        island = (DeviceIsland(devices=(0, 1), link=fast),)
        among = with_devices(topology(*sizes), count, link=slow, islands=island, nvlinks=nvlinks)
        assert device_plans(task, among)[0].predicted_seconds <= device_plans(task, before)[0].predicted_seconds


@given(SHAPES, MEASURED, st.sampled_from(fields(DeviceCosts)), st.floats(1.0, 100.0), st.integers(1, 1 << 24))
def test_a_better_cost_never_makes_the_choice_slower(
    sizes: tuple[int, ...], costs: DeviceCosts, which: Any, factor: float, size_bytes: int
) -> None:
    value = getattr(costs, which.name)
    better = replace(costs, **{which.name: value * factor if which.name.endswith("_per_s") else value / factor})
    task, before, after = all_reduce(size_bytes), *(topology(*sizes, device_costs=each) for each in (costs, better))
    routes = [chosen_route(task, each, ALL) for each in (before, after)]
    times = [by_route(task, each)[route].predicted_seconds for each, route in zip((before, after), routes, strict=True)]
    assert times[1] <= times[0]


def test_sums_in_more_bits_are_priced_as_on_the_host() -> None:
    task = all_reduce(8 * MIB, accumulation=Accumulation.WIDE)
    found = topology(2, 2, shm=SHM, device_costs=COSTS)
    assert dict(by_route(task, found)[STAGED].parts)["host"] == cheapest(task, found).predicted_seconds
