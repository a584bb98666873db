"""The devices of a job's hosts, as NVML tells them, and which of them each rank uses."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from multiring._runtime import Group
from multiring._runtime.engines.nvml import FoundDevice, host_devices, visible_devices
from multiring._settings import inherited_environment
from multiring._topology import DeviceLink, HostDevices, Topology

_ROW = 1024  # bytes of a rank's line


def with_devices(group: Group) -> Topology:
    """Return the topology of `group` with the devices of its hosts. Every rank calls it, and gets the same result.

    Devices that the topology file states stay. Other hosts get the devices of their ranks, if NVML tells them: the i-th
    rank of a host uses device i of those that it sees, counted anew. The result has each device once, in the order of
    the ranks. A process alone gets all devices that it sees.
    """
    found, known = visible_devices(inherited_environment()), group.topology
    if group.size == 1:
        return known if known.devices or not found else replace(known, devices=(host_devices(found, (0,)),))
    place = known.hosts[known.host_of()[group.rank]].index(group.rank)
    own = found[place % len(found)] if found else None
    told = [_device_of(line) for line in _told(group, None if own is None else asdict(own))]
    devices = []
    for host, ranks in enumerate(known.hosts):
        stated = known.devices_of(host)
        of_ranks = used_devices([told[rank] for rank in ranks]) if stated is None else stated
        devices += [] if of_ranks is None else [replace(of_ranks, host=host)]
    return replace(known, devices=tuple(devices))


def used_devices(by_rank: Sequence[FoundDevice | None]) -> HostDevices | None:
    """Return the devices of one host's ranks, each once, as those of host 0; None if some rank has none.

    Args:
        by_rank: the device of each rank, in the order of the host's ranks.
    """
    every = [each for each in by_rank if each is not None]
    if len(every) < len(by_rank):
        return None
    once = list({each.index: each for each in every}.values())
    places = {each.index: at for at, each in enumerate(once)}
    return host_devices(once, tuple(places[each.index] for each in every))


def _told(group: Group, own: dict[str, Any] | None) -> list[dict[str, Any] | None]:
    """Return what every rank tells, in the order of the ranks."""
    text = json.dumps(own).encode()
    if len(text) > _ROW:  # a host with so many devices, or so long a name of one, that nothing is said of it
        text = b"null"
    row = np.zeros((1, _ROW), np.uint8)
    row[0, : len(text)] = np.frombuffer(text, np.uint8)
    return [json.loads(bytes(each).rstrip(b"\0")) for each in group.all_gather(row)]


def _device_of(told: dict[str, Any] | None) -> FoundDevice | None:
    return None if told is None else FoundDevice(**{**told, "classes": tuple(map(DeviceLink, told["classes"]))})
