"""Known clusters: every number of a preset has a source."""

import pytest

from multiring._simulator.presets import preset, preset_names, preset_of
from multiring._topology import Topology
from multiring.errors import ArgumentError

SMALL = """
[about]
title = "Two hosts"
accelerator = "P100"

[[rails]]
interface = "eth0"
bandwidth_mbit_per_s = 1000

[[hosts]]
name = "a"
slots = 2

[sources]
"rails.bandwidth_mbit_per_s" = "a page"
"hosts.name" = "a page"
"hosts.slots" = "another page"
"""


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_states_a_cluster_with_sources(name: str) -> None:
    found = preset(name)
    assert found.title
    assert found.accelerator
    assert all(len(source) > 10 for source in found.sources.values())
    assert found.topology.ranks > 100
    assert (found.usd_per_host_hour is None) == (found.priced == "")


def test_presets_have_the_sizes_of_their_sources() -> None:
    sizes = {"ddl": (64, 4), "fair": (32, 8), "horovod": (128, 4), "pfn": (128, 8), "summit": (4560, 6)}
    sizes |= {"p4d": (128, 8), "p5": (128, 8), "p5e": (128, 8), "superpod": (127, 8)}
    assert {name: _size(preset(name).topology) for name in preset_names()} == sizes


def _size(topology: Topology) -> tuple[int, int]:
    (slots,) = {len(host) for host in topology.hosts}
    return len(topology.hosts), slots


def test_a_small_preset_is_read() -> None:
    found = preset_of(SMALL, "small")
    assert (found.title, found.accelerator, found.topology.ranks) == ("Two hosts", "P100", 2)
    assert found.topology.rails[0].bandwidth_bytes_per_s == 1.25e8


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"hosts.slots" = "another page"', "", r"'small': hosts\.slots has no source: want exactly one entry"),
        ('"hosts.slots"', '"hosts.slot"', r"'small': hosts\.slot has a source, but is no number of the file"),
        ("[about]", "[about]\nprice = 3", r"'small': \[about\] has price, title, accelerator: want title, accelerator"),
        ('title = "Two hosts"', "", r"\[about\] has accelerator: want title"),
        ("= 1000", "= -1", "rail 'eth0': bandwidth_mbit_per_s = -1: want a number > 0"),
        ("[[hosts]]", "[[host]]", r"hosts\.name has a source, but is no number|host\.slots has no source"),
        ("[about]", "[about", "preset 'small' is not valid TOML"),
    ],
)
def test_a_wrong_preset_is_refused(old: str, new: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        preset_of(SMALL.replace(old, new), "small")


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match="no topology 'sumit': want a file, or one of ddl, fair, horovod"):
        preset("sumit")
