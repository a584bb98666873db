"""The devices of each host: their kinds, the classes of the links between them, and the measured costs of using them.

The i-th rank of a host uses device i, counted anew if a host has more ranks than devices.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum

from multiring.errors import ArgumentError


class DeviceLink(IntEnum):
    """The class of the link between two devices of a host; a faster class is greater."""

    PCIE_SOCKETS = 0  # PCIe through two sockets, or through host memory
    PCIE = 1  # PCIe through a host bridge of one socket
    PCIE_SWITCH = 2  # PCIe through switches only
    NVLINK = 3  # NVLink, directly or through NVSwitch


LINK_NAMES: Mapping[str, DeviceLink] = {link.name.lower(): link for link in DeviceLink}
"""The names of the classes in topology files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceIsland:
    """Some devices of a host between any two of which there is a faster link than between other devices."""

    devices: tuple[int, ...]
    link: DeviceLink


@dataclass(frozen=True, kw_only=True, slots=True)
class HostDevices:
    """The devices of one host (an index).

    `kinds` has the name of each device's model. `link` is the class between two devices that share no island. `nvlinks`
    is the number of NVLinks of a device. `used` is the device of each rank of the host; without it, the i-th rank uses
    device i, modulo the number of devices.

    Raises:
        ArgumentError: the host has no device, `nvlinks` is less than 1, or an island or `used` names a device that the
            host lacks.
    """

    host: int
    kinds: tuple[str, ...]
    link: DeviceLink = DeviceLink.PCIE
    islands: tuple[DeviceIsland, ...] = ()
    nvlinks: int = 1
    used: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.kinds)
        named = [device for island in self.islands for device in island.devices]
        if not count or self.nvlinks < 1 or not all(0 <= device < count for device in (*named, *self.used)):
            raise ArgumentError(
                f"a host of {count} devices, nvlinks={self.nvlinks}, islands of {named}, ranks on {list(self.used)}: "
                f"want at least 1 device and 1 NVLink, and devices from 0 to {count - 1}"
            )

    def device_of(self, place: int) -> int:
        """Return the device of the host's rank number `place`, counted from 0 on this host."""
        return self.used[place] if self.used else place % len(self.kinds)

    def between(self, one: int, other: int) -> DeviceLink:
        """Return the class of the link between two devices."""
        shared = [island.link for island in self.islands if one in island.devices and other in island.devices]
        return max([self.link, *shared])

    def ring_class(self, devices: Iterable[int]) -> DeviceLink:
        """Return the class of the slowest link that a ring over `devices` has to use.

        A ring is assumed wherever links of a class connect all devices.
        """
        left = sorted(set(devices))
        return next(link for link in sorted(DeviceLink, reverse=True) if self._connects(left, link))

    def _connects(self, devices: Sequence[int], link: DeviceLink) -> bool:
        found, queue = set(devices[:1]), list(devices[:1])
        while queue:
            at = queue.pop()
            near = [each for each in devices if each not in found and self.between(at, each) >= link]
            found.update(near)
            queue += near
        return len(found) == len(devices)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCosts:
    """Measured costs of using devices; None if a cost was not measured.

    Copies are between a device and pinned host memory, at the rate of one rank while all ranks of its host copy. An
    all-reduce of N bytes by NCCL over p ranks takes `nccl_latency_s` + 2 (p - 1) / p N / `nccl_bytes_per_s` within a
    host. The constants of the network are those over all ranks of several hosts.

    Raises:
        ArgumentError: a time is negative, or a rate is not positive.
    """

    copy_latency_s: float | None = None  # of a small copy, until the host knows of its end
    to_host_bytes_per_s: float | None = None
    to_device_bytes_per_s: float | None = None
    nccl_latency_s: float | None = None
    nccl_bytes_per_s: float | None = None
    nccl_network_latency_s: float | None = None
    nccl_network_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value, is_time = getattr(self, each.name), not each.name.endswith("_per_s")
            if value is not None and not (math.isfinite(value) and (value >= 0 if is_time else value > 0)):
                raise ArgumentError(f"{each.name}={value}: want a number {'>= 0' if is_time else '> 0'}")


UNMEASURED = DeviceCosts()


def islands_of(classes: Sequence[Sequence[DeviceLink]]) -> tuple[DeviceLink, tuple[DeviceIsland, ...]]:
    """Return the class that any two devices have at least, and the islands of faster links.

    Args:
        classes: the class of the link between each two devices; the diagonal is ignored.
    """
    count = len(classes)
    pairs = {(one, other): classes[one][other] for one in range(count) for other in range(one)}
    usual = min(pairs.values(), default=DeviceLink.PCIE)
    islands: list[DeviceIsland] = []
    for link in sorted({each for each in pairs.values() if each > usual}):
        left = {pair for pair, each in pairs.items() if each >= link}
        while left:
            first = min(left)
            island = list(first)
            for device in range(count):
                if device not in island and all(pairs[max(device, each), min(device, each)] >= link for each in island):
                    island.append(device)
            left -= {(one, other) for one in island for other in island}
            islands.append(DeviceIsland(devices=tuple(sorted(island)), link=link))
    return usual, tuple(islands)
