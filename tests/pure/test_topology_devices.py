"""The devices of a topology: their links, ranks' devices in parts of a job, and their place in topology files."""

import itertools
import random
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from multiring._topology import (
    DeviceCosts,
    DeviceIsland,
    DeviceLink,
    HostDevices,
    Topology,
    islands_of,
    text_of,
    topology_of,
)
from multiring.errors import ArgumentError

FILE = """
[devices]
copy_latency_us = 12
to_host_mbit_per_s = 400000
to_device_mbit_per_s = 424000
nccl_latency_us = 90
nccl_mbit_per_s = 2000000
nccl_network_latency_us = 150
nccl_network_mbit_per_s = 80000

[[hosts]]
name = "node[1-2]"
slots = 4
devices = { kind = "H100", count = 4, link = "nvlink", nvlinks = 18 }

[[hosts]]
name = "old"
slots = 4
devices = { kinds = ["V100", "V100", "P100", "P100"], islands = [{ devices = [0, 1], link = "nvlink" }] }

[[hosts]]
name = "none"
"""


def test_a_file_states_devices_and_costs() -> None:
    found = topology_of(FILE)
    h100 = HostDevices(host=0, kinds=("H100",) * 4, link=DeviceLink.NVLINK, nvlinks=18)
    island = DeviceIsland(devices=(0, 1), link=DeviceLink.NVLINK)
    old = HostDevices(host=2, kinds=("V100", "V100", "P100", "P100"), islands=(island,))
    assert found.devices == (h100, replace(h100, host=1), old)
    assert found.devices_of(1) == replace(h100, host=1)
    assert found.devices_of(3) is None
    assert found.device_costs == DeviceCosts(
        copy_latency_s=12e-6,
        to_host_bytes_per_s=50e9,
        to_device_bytes_per_s=53e9,
        nccl_latency_s=90e-6,
        nccl_bytes_per_s=250e9,
        nccl_network_latency_s=150e-6,
        nccl_network_bytes_per_s=10e9,
    )


def test_the_page_shows_a_file_with_devices() -> None:
    page = (Path(__file__).parents[2] / "docs" / "topology.md").read_text("utf-8")
    (text,) = [each for each in re.findall(r"```toml\n(.*?)```", page, re.DOTALL) if "[devices]" in each]
    found = topology_of(text)
    assert [len(each.kinds) for each in found.devices] == [8, 8, 8, 8, 4]
    assert found.devices[4].between(2, 3) is DeviceLink.PCIE_SWITCH
    assert None not in [getattr(found.device_costs, each.name) for each in fields(DeviceCosts)]


def test_what_is_written_is_read() -> None:
    found = topology_of(FILE)
    text = text_of(found)
    assert 'devices = { kind = "H100", count = 4, link = "nvlink", nvlinks = 18 }' in text
    assert topology_of(text) == replace(found, interfaces=("rail0",))
    one = Topology(((0,),), names=("a",), devices=(HostDevices(host=0, kinds=("T4",)),))
    assert 'devices = { kind = "T4", count = 1 }' in text_of(one)
    assert topology_of(text_of(one)) == one
    assert "devices" not in text_of(Topology(((0,),)))


@pytest.mark.parametrize("seed", range(20))
def test_any_devices_survive_a_file(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 -- of a test
    devices, names = [], [f"node{number}" for number in range(draw.randrange(1, 5))]
    for host in range(len(names)):
        count = draw.randrange(1, 6)
        classes = [[draw.choice(list(DeviceLink)) for _ in range(count)] for _ in range(count)]
        link, islands = islands_of(classes)
        kinds = tuple(draw.choice(['a "b"', "c"]) for _ in range(count))
        found = HostDevices(host=host, kinds=kinds, link=link, islands=islands, nvlinks=draw.randrange(1, 19))
        devices += [found] if draw.random() < 0.8 else []
    hosts = tuple((host,) for host in range(len(names)))
    topology = Topology(hosts, names=tuple(names), interfaces=("eth0",), devices=tuple(devices))
    assert topology_of(text_of(topology)) == topology


@pytest.mark.parametrize("seed", range(20))
def test_islands_have_the_classes_of_their_links(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 -- of a test
    count = draw.randrange(1, 9)
    classes = [[draw.choice(list(DeviceLink)) for _ in range(count)] for _ in range(count)]
    for one, other in itertools.combinations(range(count), 2):
        classes[one][other] = classes[other][one]
    link, islands = islands_of(classes)
    found = HostDevices(host=0, kinds=("x",) * count, link=link, islands=islands)
    for one, other in itertools.permutations(range(count), 2):
        assert found.between(one, other) is classes[one][other]


def test_one_island_holds_all_devices_that_a_switch_joins() -> None:
    switch, sockets = DeviceLink.PCIE_SWITCH, DeviceLink.PCIE_SOCKETS
    classes = [[switch if one // 4 == other // 4 else sockets for other in range(8)] for one in range(8)]
    assert islands_of(classes) == (
        sockets,
        (DeviceIsland(devices=(0, 1, 2, 3), link=switch), DeviceIsland(devices=(4, 5, 6, 7), link=switch)),
    )
    assert islands_of([[sockets]]) == (DeviceLink.PCIE, ())


def test_a_ring_takes_the_best_class_that_connects_all() -> None:
    pairs = tuple(DeviceIsland(devices=pair, link=DeviceLink.NVLINK) for pair in ((0, 1), (1, 2), (2, 3)))
    chain = HostDevices(host=0, kinds=("x",) * 5, link=DeviceLink.PCIE_SOCKETS, islands=pairs)
    assert chain.ring_class([0, 1, 2, 3]) is DeviceLink.NVLINK
    assert chain.ring_class([0, 2]) is DeviceLink.PCIE_SOCKETS
    assert chain.ring_class(range(5)) is DeviceLink.PCIE_SOCKETS


def test_ranks_keep_their_devices_in_a_part_of_the_job() -> None:
    topology = topology_of(FILE)
    part = topology.restricted([2, 3, 8, 9])
    assert [(each.host, each.used) for each in part.devices] == [(0, (2, 3)), (1, (0, 1))]
    nested = part.restricted([1, 0])
    assert nested.hosts == ((1, 0),)
    assert nested.devices_of(0) == part.devices[0]
    assert part.restricted([1]).devices_of(0) == replace(part.devices[0], used=(3,))
    shared = Topology(((0, 1, 2),), devices=(HostDevices(host=0, kinds=("x", "y")),)).restricted([0, 2])
    assert shared.devices[0].used == (0, 0)


def test_a_job_gets_the_devices_of_its_hosts() -> None:
    placed = topology_of(FILE).placed(((0, 1), (2,)), ("old", "node2.local"))
    assert [(each.host, each.kinds[0], each.used) for each in placed.devices] == [(0, "V100", ()), (1, "H100", ())]
    unnamed = topology_of("[devices]\nnccl_latency_us = 1").placed(((0, 1),), ("any",))
    assert (unnamed.devices, unnamed.device_costs) == ((), DeviceCosts(nccl_latency_s=1e-6))


def _host(text: str) -> str:
    return f"[[hosts]]\nname = 'a'\ndevices = {text}"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("devices = 3", r"\[devices\] = 3: want a table"),
        ("[devices]\nspeed = 3", "devices: unknown key 'speed'; known are copy_latency_us, to_host_mbit_per_s"),
        ("[devices]\nto_host_mbit_per_s = 0", "devices: to_host_mbit_per_s = 0: want a number > 0"),
        ("[devices]\nnccl_latency_us = -1", "devices: nccl_latency_us = -1: want a number >= 0"),
        (_host("3"), "devices of host 'a' = 3: want a table"),
        (_host("{}"), "devices of host 'a': kind = None: want a name"),
        (_host("{ kind = 'x', cores = 1 }"), "devices of host 'a': unknown key 'cores'; known are kind, kinds, count"),
        (_host("{ kind = 'x', count = 0 }"), "count = 0: want a whole number, 1 to 1024"),
        (_host("{ kind = 'x', count = true }"), "count = True: want a whole number"),
        (_host("{ kind = 'x', nvlinks = 1.5 }"), "nvlinks = 1.5: want a whole number"),
        (_host("{ kinds = [] }"), r"kinds = \[\]: want the name of each device's kind"),
        (_host("{ kinds = ['x', 3] }"), "want the name of each device's kind"),
        (_host("{ kinds = ['x'], count = 1 }"), "kinds beside kind or count: want kinds"),
        (_host("{ kind = 'x', link = 'pci' }"), 'link = \'pci\': want one of "pcie_sockets", "pcie", "pcie_switch"'),
        (_host("{ kind = 'x', islands = [{ devices = [0, 1], link = 'nvlink' }] }"), "numbers from 0 to 0, each once"),
        (_host("{ kind = 'x', count = 2, islands = [{ devices = [0, 0], link = 'nvlink' }] }"), "each once"),
        (_host("{ kind = 'x', count = 2, islands = [{ devices = [0, 1] }] }"), "link = None: want one of"),
        (_host("{ kind = 'x', count = 2, islands = [{ links = 1 }] }"), "islands: unknown key 'links'"),
        (_host("{ kind = 'x', count = 2, islands = { a = 1 } }"), r"islands = {'a': 1}: want \[\[islands\]\] entries"),
    ],
)
def test_what_makes_no_sense_is_named(text: str, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        topology_of(text)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: HostDevices(host=0, kinds=()), "want at least 1 device"),
        (lambda: HostDevices(host=0, kinds=("x",), used=(1,)), "devices from 0 to 0"),
        (lambda: DeviceCosts(nccl_latency_s=float("nan")), "nccl_latency_s=nan: want a number >= 0"),
        (lambda: DeviceCosts(to_host_bytes_per_s=0.0), "to_host_bytes_per_s=0.0: want a number > 0"),
        (lambda: _with(HostDevices(host=1, kinds=("x",))), r"devices of hosts \[1\]: want some of 1 hosts"),
        (lambda: _with(HostDevices(host=0, kinds=("x",), used=(0,))), "that of each of its 2 ranks, or none"),
    ],
)
def test_values_that_do_not_fit_are_refused(make: Any, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        make()


def _with(devices: HostDevices) -> Topology:
    return Topology(((0, 1),), devices=(devices,))
