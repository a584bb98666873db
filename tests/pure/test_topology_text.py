"""Topology files are read into topologies, and invalid entries are named."""

import math
import random
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiring._topology import SHM, TCP, OwnRails, Rack, Topology, text_of, topology_of
from multiring._topology.names import names_of, patterns_of
from multiring.errors import ArgumentError

CLUSTER = """
[shm]
latency_us = 1.5

[[rails]]
interface = "eth0"
latency_us = 40
bandwidth_mbit_per_s = 1000

[[rails]]
interface = "eth1"
bandwidth_mbit_per_s = 250
reduce_mbit_per_s = 16000

[[racks]]
name = "front"
uplinks.eth0 = { bandwidth_mbit_per_s = 500 }

[[racks]]
name = "back"

[[hosts]]
name = "node[08-10]"
rack = "front"

[[hosts]]
name = "old"
rack = "back"
rails.eth1 = { bandwidth_mbit_per_s = 100 }
"""


def test_a_file_says_what_the_topology_has() -> None:
    topology = topology_of(CLUSTER)
    first = replace(TCP, latency_s=40e-6, bandwidth_bytes_per_s=125e6)
    second = replace(TCP, bandwidth_bytes_per_s=31.25e6, reduce_bytes_per_s=2e9)
    uplink = replace(TCP, latency_s=0.0, overhead_s=0.0, bandwidth_bytes_per_s=62.5e6)
    assert topology == Topology(
        ((0,), (1,), (2,), (3,)),
        shm=replace(SHM, latency_s=1.5e-6),
        rails=(first, second),
        racks=(Rack(hosts=(0, 1, 2), uplinks=(uplink, None), name="front"), Rack(hosts=(3,), name="back")),
        own_rails=(OwnRails(host=3, rails=(first, replace(second, bandwidth_bytes_per_s=12.5e6))),),
        names=("node08", "node09", "node10", "old"),
        interfaces=("eth0", "eth1"),
    )


def test_an_empty_file_is_the_topology_that_nothing_is_known_of() -> None:
    assert topology_of("") == Topology(((0,),))


def test_what_is_written_is_read() -> None:
    topology = topology_of(CLUSTER)
    text = text_of(topology, "made by\nhand")
    assert text.startswith("# made by\n# hand\n\n[shm]\n")
    assert 'name = "node[08-10]"' in text
    assert topology_of(text) == topology


def test_that_ranks_take_turns_is_kept() -> None:
    text = text_of(replace(topology_of(CLUSTER), takes_turns=True), "by hand")
    assert text.startswith("# by hand\n\ntakes_turns = true\n\n[shm]\n")
    assert topology_of(text).takes_turns
    assert not topology_of(CLUSTER).takes_turns


def test_hosts_and_rails_without_names_get_some() -> None:
    found = topology_of(text_of(Topology(((0, 1), (2, 3)), racks=(Rack(hosts=(0,)), Rack(hosts=(1,))))))
    assert (found.names, found.interfaces) == (("host0", "host1"), ("rail0",))
    assert [rack.name for rack in found.racks] == ["rack0", "rack1"]


@given(st.floats(1e-7, 1.0), st.floats(1e3, 1e12))
def test_four_digits_are_kept(latency_s: float, bandwidth: float) -> None:
    rail = replace(TCP, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth, reduce_bytes_per_s=math.inf)
    text = text_of(Topology(((0,),), rails=(rail,)))
    (found,) = topology_of(text).rails
    assert found.latency_s == pytest.approx(latency_s, rel=1e-3)
    assert found.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=1e-3)
    assert text_of(topology_of(text)).splitlines()[:9] == text.splitlines()[:9]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("shm = ", "the topology is not valid TOML: "),
        ("[nvlink]", "the topology: unknown key 'nvlink'; known are shm, rails, hosts, racks"),
        ("takes_turns = 1", "takes_turns = 1: want true or false"),
        ("shm = 3", r"\[shm\] = 3: want a table"),
        ("[rails]", r"rails = {}: want \[\[rails\]\] entries"),
        ("[shm]\nlatency = 3", "shm: unknown key 'latency'; known are latency_us"),
        ("[shm]\nlatency_us = -1", "shm: latency_us = -1: want a number >= 0"),
        ("[shm]\nbandwidth_mbit_per_s = 0", "bandwidth_mbit_per_s = 0: want a number > 0"),
        ("[shm]\nlatency_us = 'fast'", "latency_us = 'fast': want a number"),
        ("[shm]\nlatency_us = true", "latency_us = True: want a number"),
        ("[shm]\nlatency_us = nan", "latency_us = nan: want a number"),
        ("[[rails]]\nlatency_us = 1", r"\[\[rails\]\]: interface = None: want a name"),
        ("[[rails]]\ninterface = 'a'\n[[rails]]\ninterface = 'a'", "rails a, a: want each interface once"),
        ("[[hosts]]\nname = 'a'\ncpus = 3", "host 'a': unknown key 'cpus'; known are name, rack, rails, slots"),
        ("[[hosts]]\nname = 'a'\nslots = 0", "host 'a': slots = 0: want its number of ranks"),
        ("[[hosts]]\nname = 'a'\nslots = true", "host 'a': slots = True: want its number of ranks"),
        ("[[hosts]]\nname = 'a'\nrails.eth9 = {}", "rails of host 'a': unknown link 'eth9'; the .* are none"),
        ("[[hosts]]\nname = 'a[1-2]'\n[[hosts]]\nname = 'a2'", "host 'a2' is listed twice"),
        ("[[hosts]]\nname = 'a[2-1]'", r"'a\[2-1\]' names no hosts: want a name, or a pattern like"),
        ("[[racks]]\nname = 'r'\nuplink = 1", "rack 'r': unknown key 'uplink'; known are name, uplinks"),
        ("[[racks]]\nname = 'r'\n[[racks]]\nname = 'r'", "rack 'r' is listed twice"),
        ("[[racks]]\nname = 'r'\nuplinks.eth0 = {}", "uplinks of rack 'r': unknown link 'eth0'"),
        ("[[racks]]\nname = 'r'", "rack 'r' has no host: give"),
        ("[[racks]]\nname = 'r'\n[[hosts]]\nname = 'a'", "host 'a' is in no rack: want the rack of every host"),
        ("[[hosts]]\nname = 'a'\nrack = 'q'", "host 'a' is in rack 'q', which is not defined"),
    ],
)
def test_what_makes_no_sense_is_named(text: str, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        topology_of(text)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a", ["a"]),
        ("host[0-2]", ["host0", "host1", "host2"]),
        ("n[08-10,20].x", ["n08.x", "n09.x", "n10.x", "n20.x"]),
        ("n[3]", ["n3"]),
    ],
)
def test_patterns_stand_for_names(pattern: str, names: list[str]) -> None:
    assert names_of(pattern) == names
    assert [name for each in patterns_of(names) for name in names_of(each)] == names


@pytest.mark.parametrize("pattern", ["", "a b", "a[", "a[]", "a[1-2]b[3]", "a[1-2-3]", "a[x]", "n[0-99999999]"])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ArgumentError, match="names no hosts"):
        names_of(pattern)


@given(st.lists(st.from_regex(r"[a-c]{0,2}[0-9]{1,3}[a-c]?", fullmatch=True), max_size=30))
def test_patterns_of_names_lose_nothing(names: list[str]) -> None:
    assert [name for each in patterns_of(names) for name in names_of(each)] == names


def test_one_host_has_no_rails_but_stated_ones() -> None:
    alone = Topology(((0, 1),), names=("a",))
    assert "rails" not in text_of(alone)
    assert topology_of(text_of(alone)).rails == (TCP,)
    stated = replace(alone, interfaces=("eth0",))
    assert 'interface = "eth0"' in text_of(stated)
    assert str(alone) == "1 host of 2 ranks"
    assert str(Topology(((0,),))) == "1 host of 1 rank"
    assert str(Topology(((0,), (1,)))) == "2 hosts x 1 ranks, 1 rail"


@pytest.mark.parametrize("seed", range(20))
def test_a_file_carries_the_slots_of_each_host(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 -- of a test
    counts = [draw.randrange(1, 5) for _ in range(draw.randrange(1, 9))]
    ends = list(accumulate(counts))
    hosts = tuple(tuple(range(end - count, end)) for end, count in zip(ends, counts, strict=True))
    names = tuple(f"node{number:02}" for number in range(len(hosts)))
    assert topology_of(text_of(Topology(hosts, names=names))).hosts == hosts
