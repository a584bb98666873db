"""Read and write topologies as TOML, for users to read and edit.

The page docs/topology.md describes the format.
"""

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

from multiring._topology.devices import LINK_NAMES, DeviceCosts, DeviceIsland, DeviceLink, HostDevices
from multiring._topology.lines import WrongConstantError
from multiring._topology.model import SHM, TCP, Link, OwnRails, Rack, Topology
from multiring._topology.names import names_of, patterns_of
from multiring.errors import ArgumentError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# The file's name of each constant of a link. The value in the file, times the first number and divided by the second,
# is in Link's unit.
_CONSTANTS: Mapping[str, tuple[str, int, int]] = {
    "latency_us": ("latency_s", 1, 10**6),
    "overhead_us": ("overhead_s", 1, 10**6),
    "bandwidth_mbit_per_s": ("bandwidth_bytes_per_s", 10**6, 8),
    "reduce_mbit_per_s": ("reduce_bytes_per_s", 10**6, 8),
}
# The same for the constants of devices, in DeviceCosts' units.
_COSTS: Mapping[str, tuple[str, int, int]] = {
    "copy_latency_us": ("copy_latency_s", 1, 10**6),
    "to_host_mbit_per_s": ("to_host_bytes_per_s", 10**6, 8),
    "to_device_mbit_per_s": ("to_device_bytes_per_s", 10**6, 8),
    "nccl_latency_us": ("nccl_latency_s", 1, 10**6),
    "nccl_mbit_per_s": ("nccl_bytes_per_s", 10**6, 8),
    "nccl_network_latency_us": ("nccl_network_latency_s", 1, 10**6),
    "nccl_network_mbit_per_s": ("nccl_network_bytes_per_s", 10**6, 8),
}
_NO_LIMIT = replace(TCP, latency_s=0.0, overhead_s=0.0, bandwidth_bytes_per_s=math.inf)
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_MOST_RANKS = 1 << 20
_MOST = 2.0**63  # of a constant
_MOST_DEVICES = 1024  # of a host
_DIGITS = 4  # further digits would be noise: measurements vary by more than 1 in 10 000


def topology_of(text: str) -> Topology:
    """Return the topology in `text`.

    Each host has as many ranks as its `slots`, by default one.

    `Topology.placed` replaces them by a job's ranks.

    Raises:
        ArgumentError: `text` is not TOML or not a topology; the message says what is expected.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ArgumentError(f"the topology is not valid TOML: {error}") from None
    try:
        return topology_of_table(table)
    except WrongConstantError as error:
        raise error.in_text(text) from None


def topology_of_table(table: Mapping[str, Any]) -> Topology:
    """Return the same from parsed TOML.

    Raises:
        ArgumentError: `table` is not a topology; the message says what is expected.
    """
    _refuse_others(table, ("shm", "rails", "hosts", "racks", "takes_turns", "devices"), "the topology")
    takes_turns = table.get("takes_turns", False)
    if not isinstance(takes_turns, bool):
        raise WrongConstantError(
            f"the topology: takes_turns = {takes_turns!r}: want true or false", "takes_turns", takes_turns
        )
    rails = [_table(each, "[[rails]]") for each in _list(table, "rails")]
    interfaces = tuple(_name(rail, "interface", "[[rails]]") for rail in rails)
    if len(set(interfaces)) < len(interfaces):
        raise ArgumentError(f"rails {', '.join(interfaces)}: want each interface once")
    links = tuple(_link(rail, TCP, f"rail {interface!r}", "interface") for rail, interface in zip(rails, interfaces))  # noqa: B905 -- of one length
    names, places, own = _hosts(_list(table, "hosts"), interfaces, links or (TCP,))
    counts = _slots(_list(table, "hosts")) or [1]
    ends = list(accumulate(counts))
    return Topology(
        hosts=tuple(tuple(range(end - count, end)) for end, count in zip(ends, counts, strict=True)),
        shm=_link(_table(table.get("shm", {}), "[shm]"), SHM, "shm"),
        rails=links or (TCP,),
        racks=_racks(_list(table, "racks"), interfaces, names, places),
        own_rails=own,
        names=names,
        interfaces=interfaces,
        takes_turns=takes_turns,
        devices=_devices(_list(table, "hosts")),
        device_costs=_device_costs(_table(table.get("devices", {}), "[devices]")),
    )


def _hosts(
    entries: list[Any], interfaces: tuple[str, ...], links: tuple[Link, ...]
) -> tuple[tuple[str, ...], tuple[str | None, ...], tuple[OwnRails, ...]]:
    """Return the hosts' names, the rack of each host, and the rails of hosts that have their own."""
    names: list[str] = []
    places: list[str | None] = []
    own: list[OwnRails] = []
    for each in entries:
        entry = _table(each, "[[hosts]]")
        pattern = _name(entry, "name", "[[hosts]]")
        _refuse_others(entry, ("name", "rack", "rails", "slots", "devices"), f"host {pattern!r}")
        differing = _links(entry.get("rails", {}), interfaces, f"rails of host {pattern!r}", links)
        for name in names_of(pattern):
            if differing:
                rails = tuple(differing.get(rail, link) for rail, link in zip(interfaces, links, strict=True))
                own.append(OwnRails(host=len(names), rails=rails))
            names.append(name)
            places.append(_name(entry, "rack", f"host {pattern!r}") if "rack" in entry else None)
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ArgumentError(f"host {twice[0]!r} is listed twice: want every host in one [[hosts]] entry")
    return tuple(names), tuple(places), tuple(own)


def _slots(entries: list[Any]) -> list[int]:
    """Return each host's number of ranks, in the order of the hosts' names."""
    found: list[int] = []
    for entry in entries:
        count = entry.get("slots", 1)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            words = f"host {entry['name']!r}: slots = {count!r}: want its number of ranks, 1 or more"
            raise WrongConstantError(words, "slots", count)
        found += [count] * len(names_of(entry["name"]))
        if sum(found) > _MOST_RANKS:
            words = f"host {entry['name']!r}: slots = {count!r}: want at most {_MOST_RANKS} ranks on all hosts"
            raise WrongConstantError(words, "slots", count)
    return found


def _devices(entries: list[Any]) -> tuple[HostDevices, ...]:
    """Return the devices of the hosts whose entries state some."""
    found: list[HostDevices] = []
    host = 0
    for entry in entries:
        names = names_of(entry["name"])
        if "devices" in entry:
            what = f"devices of host {entry['name']!r}"
            described = _devices_of(_table(entry["devices"], what), what)
            found += [replace(described, host=host + at) for at in range(len(names))]
        host += len(names)
    return tuple(found)


def _devices_of(table: Mapping[str, Any], what: str) -> HostDevices:
    """Return the devices that a table describes, as those of host 0."""
    _refuse_others(table, ("kind", "kinds", "count", "link", "nvlinks", "islands"), what)
    if "kinds" in table:
        if "kind" in table or "count" in table:
            raise WrongConstantError(
                f"{what}: kinds beside kind or count: want kinds = [...], or kind and count", "kinds"
            )
        kinds = table["kinds"]
        if not isinstance(kinds, list) or not kinds or not all(isinstance(kind, str) and kind for kind in kinds):
            raise WrongConstantError(f"{what}: kinds = {kinds!r}: want the name of each device's kind", "kinds", kinds)
    else:
        kinds = [_name(table, "kind", what)] * _whole(table, "count", what)
    islands = [_island(_table(each, f"{what}: islands"), what, len(kinds)) for each in _list(table, "islands")]
    return HostDevices(
        host=0,
        kinds=tuple(kinds),
        link=_device_link(table.get("link", "pcie"), what),
        islands=tuple(islands),
        nvlinks=_whole(table, "nvlinks", what),
    )


def _island(table: Mapping[str, Any], what: str, count: int) -> DeviceIsland:
    _refuse_others(table, ("devices", "link"), f"{what}: islands")
    devices = table.get("devices")
    if (
        not isinstance(devices, list)
        or len(devices) < 2
        or any(isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < count for each in devices)
        or len(set(devices)) < len(devices)
    ):
        raise WrongConstantError(
            f"{what}: an island of devices = {devices!r}: want two or more numbers from 0 to {count - 1}, each once",
            "devices",
            devices,
        )
    return DeviceIsland(devices=tuple(devices), link=_device_link(table.get("link"), what))


def _device_link(value: Any, what: str) -> DeviceLink:
    if not isinstance(value, str) or value not in LINK_NAMES:
        words = f"{what}: link = {value!r}: want one of {', '.join(map(json.dumps, LINK_NAMES))}"
        raise WrongConstantError(words, "link", value)
    return LINK_NAMES[value]


def _whole(table: Mapping[str, Any], key: str, what: str) -> int:
    value = table.get(key, 1)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_DEVICES:
        words = f"{what}: {key} = {value!r}: want a whole number, 1 to {_MOST_DEVICES}"
        raise WrongConstantError(words, key, value)
    return value


def _device_costs(table: Mapping[str, Any]) -> DeviceCosts:
    _refuse_others(table, tuple(_COSTS), "devices")
    return DeviceCosts(**_numbers(table, _COSTS, "devices"))


def _racks(
    entries: list[Any], interfaces: tuple[str, ...], names: tuple[str, ...], places: tuple[str | None, ...]
) -> tuple[Rack, ...]:
    uplinks: dict[str, tuple[Link | None, ...]] = {}
    for each in entries:
        entry = _table(each, "[[racks]]")
        name = _name(entry, "name", "[[racks]]")
        _refuse_others(entry, ("name", "uplinks"), f"rack {name!r}")
        if name in uplinks:
            raise WrongConstantError(
                f"rack {name!r} is listed twice: want every rack in one [[racks]] entry", "name", name
            )
        found = _links(entry.get("uplinks", {}), interfaces, f"uplinks of rack {name!r}", [_NO_LIMIT] * len(interfaces))
        uplinks[name] = tuple(found.get(rail) for rail in interfaces) if found else ()
    for host, rack in zip(names, places, strict=True):
        if rack not in uplinks and (rack is not None or uplinks):
            has = "is in no rack" if rack is None else f"is in rack {rack!r}, which is not defined"
            known = ", ".join(uplinks) or "none"
            words = f"host {host!r} {has}: want the rack of every host, or of none; [[racks]] are {known}"
            raise WrongConstantError(words, *(("name", host) if rack is None else ("rack", rack)))
    standing = {name: tuple(at for at, place in enumerate(places) if place == name) for name in uplinks}
    empty = [name for name, hosts in standing.items() if not hosts]
    if empty:
        words = f"rack {empty[0]!r} has no host: give [[hosts]] entries rack = {json.dumps(empty[0])}"
        raise WrongConstantError(words, "name", empty[0])
    return tuple(Rack(hosts=standing[name], uplinks=links, name=name) for name, links in uplinks.items())


def _links(table: Any, interfaces: tuple[str, ...], what: str, otherwise: Iterable[Link]) -> dict[str, Link]:
    """Return the links in `table`, by rail. If the table does not state a constant, it comes from `otherwise`."""
    table = _table(table, what)
    strange = sorted(set(table) - set(interfaces))
    if strange:
        words = f"{what}: unknown link {strange[0]!r}; the [[rails]] are {', '.join(interfaces) or 'none'}"
        raise WrongConstantError(words, strange[0])
    usual = dict(zip(interfaces, otherwise))  # noqa: B905 -- without [[rails]] `otherwise` is longer
    return {rail: _link(_table(each, what), usual[rail], f"{what}: {rail}") for rail, each in table.items()}


def _link(table: Mapping[str, Any], otherwise: Link, what: str, *also: str) -> Link:
    _refuse_others(table, (*also, *_CONSTANTS), what)
    return replace(otherwise, **_numbers(table, _CONSTANTS, what))


def _numbers(table: Mapping[str, Any], constants: Mapping[str, tuple[str, int, int]], what: str) -> dict[str, float]:
    """Return the stated constants, in the units and by the names of their class."""
    changes = {}
    for key, (name, times, by) in constants.items():
        value = table.get(key)
        if value is None:
            continue
        least = 0 if key.endswith("_us") else math.ulp(0.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < _MOST:
            words = f"{what}: {key} = {value!r}: want a number {'>= 0' if least == 0 else '> 0'}"
            raise WrongConstantError(words, key, value)
        changes[name] = value * times / by
    return changes


def _refuse_others(table: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    strange = sorted(set(table) - set(known))
    if strange:
        raise WrongConstantError(f"{what}: unknown key {strange[0]!r}; known are {', '.join(known)}", strange[0])


def _table(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ArgumentError(f"{what} = {value!r}: want a table")
    return value


def _list(table: Mapping[str, Any], key: str) -> list[Any]:
    value = table.get(key, [])
    if not isinstance(value, list):
        raise WrongConstantError(f"{key} = {value!r}: want [[{key}]] entries", key, value)
    return value


def _name(table: Mapping[str, Any], key: str, what: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value:
        raise WrongConstantError(f"{what}: {key} = {value!r}: want a name", key, value)
    return value


def text_of(topology: Topology, heading: str = "") -> str:
    """Return the text of `topology` for `topology_of`, to four digits, with ranks in the order of hosts.

    Args:
        topology: hosts and interfaces without names are called host0, host1, ... and rail0, rail1, ... A single host
            has rails only if they were stated: nothing leaves the host, so its default rails were not measured.
        heading: a comment for the start of the text.
    """
    names = topology.names or tuple(f"host{host}" for host in range(len(topology.hosts)))
    rails = topology.interfaces or tuple(f"rail{rail}" for rail in range(len(topology.rails)))
    lines = [f"# {line}" for line in heading.splitlines()]
    lines += ["", "takes_turns = true"] if topology.takes_turns else []
    lines += ["", "[shm]", *_constants(topology.shm)]
    has_rails = len(names) > 1 or topology.interfaces or topology.rails != (TCP,)
    if costs := _constants(topology.device_costs, _COSTS):
        lines += ["", "[devices]", *costs]
    for interface, link in zip(rails, topology.rails, strict=True) if has_rails else ():
        lines += ["", "[[rails]]", f"interface = {json.dumps(interface)}", *_constants(link)]
    for rack_index, rack in enumerate(topology.racks):
        lines += ["", "[[racks]]", f"name = {json.dumps(rack.name or f'rack{rack_index}')}"]
        limits = dict(zip(rails, rack.uplinks, strict=True)) if rack.uplinks else {}
        lines += [f"uplinks.{_key(rail)} = {_inline(link)}" for rail, link in limits.items() if link is not None]
    own = {each.host: each.rails for each in topology.own_rails}
    rack_of = topology.rack_of()
    kinds: list[tuple[list[str], list[str]]] = []
    for host, name in enumerate(names):
        entry = [f"slots = {len(topology.hosts[host])}"] if len(topology.hosts[host]) > 1 else []
        if topology.racks:
            entry.append(f"rack = {json.dumps(topology.racks[rack_of[host]].name or f'rack{rack_of[host]}')}")
        differing = zip(rails, own.get(host, topology.rails), topology.rails, strict=True)
        entry += [f"rails.{_key(rail)} = {_inline(link)}" for rail, link, usual in differing if link != usual]
        devices = topology.devices_of(host)
        entry += [] if devices is None else [f"devices = {_devices_text(devices)}"]
        if kinds and kinds[-1][1] == entry:
            kinds[-1][0].append(name)
        else:
            kinds.append(([name], entry))
    for alike, entry in kinds:
        for pattern in patterns_of(alike):
            lines += ["", "[[hosts]]", f"name = {json.dumps(pattern)}", *entry]
    return "\n".join(lines).strip() + "\n"


def _constants(link: Link | DeviceCosts, constants: Mapping[str, tuple[str, int, int]] = _CONSTANTS) -> list[str]:
    # None means that the constant is unknown, and an infinite value also that it has no limit: neither is written.
    stated = {key: (getattr(link, name), by / times) for key, (name, times, by) in constants.items()}
    known = {key: value * factor for key, (value, factor) in stated.items() if value is not None}
    return [f"{key} = {value:.{_DIGITS}g}" for key, value in known.items() if math.isfinite(value)]


def _devices_text(devices: HostDevices) -> str:
    """Return the inline table of a host's devices."""
    if len(set(devices.kinds)) == 1:
        parts = [f"kind = {json.dumps(devices.kinds[0])}", f"count = {len(devices.kinds)}"]
    else:
        parts = [f"kinds = {json.dumps(list(devices.kinds))}"]
    if len(devices.kinds) > 1:
        parts.append(f"link = {json.dumps(devices.link.name.lower())}")
    parts += [f"nvlinks = {devices.nvlinks}"] if devices.nvlinks > 1 else []
    if devices.islands:
        islands = ", ".join(
            f"{{ devices = {list(each.devices)}, link = {json.dumps(each.link.name.lower())} }}"
            for each in devices.islands
        )
        parts.append(f"islands = [{islands}]")
    return "{ " + ", ".join(parts) + " }"


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else json.dumps(name)


def _inline(link: Link) -> str:
    return "{ " + ", ".join(_constants(link)) + " }"
