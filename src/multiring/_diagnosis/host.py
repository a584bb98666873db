"""Take the readings of this host that need no other host."""

import contextlib
import ctypes
import fcntl
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from multiring._diagnosis.readings import HostReading, RailReading
from multiring._launch.memory_limit import group_here, limit_bytes
from multiring._limits.control_groups import group_folders, groups_told, text_of
from multiring._limits.cpu_limit import cpu_limit
from multiring._runtime.bootstrap.addresses import boot_id
from multiring._runtime.engines.cuda_driver import DRIVER
from multiring._runtime.engines.nccl_library import find_nccl, shown_version
from multiring._runtime.engines.nvml import visible_devices
from multiring._runtime.rails.select import chosen_rails
from multiring._runtime.rails.topology_file import read_topology
from multiring._settings import Settings, inherited_environment
from multiring._topology import TCP, Topology
from multiring._version import VERSION
from multiring.errors import MultiringError

_PACKAGES = ("numpy", "torch")
_NETWORK = Path("/sys/class/net")
_SHM = Path("/dev/shm")  # noqa: S108 -- the standard path of shared memory
_HEAT = "thermal_throttle/core_throttle_count"
_SIOCGIFADDR, _NAME_BYTES = 0x8915, 16  # <linux/sockios.h>, <net/if.h>: the address of an interface, by its name
_PIECES = 12  # pieces of work; the fastest one counts
_PIECE = 60_000  # steps of a piece: some milliseconds


def host_reading(settings: Settings) -> HostReading:
    """Return the readings of this host, without those that need time or other hosts."""
    gpus = tuple(each.kind for each in visible_devices(inherited_environment()))
    reading = HostReading(
        name=os.uname().nodename,
        machine=boot_id(),
        versions=versions(),
        cores=len(os.sched_getaffinity(0)),
        quota=cpu_limit(),
        machine_cores=os.cpu_count() or 1,
        memory_bytes=free_memory(),
        shm_bytes=free_shm(),
        files=_most_files(),
        gpus=gpus,
        torch_cuda=torch_cuda(),
        driver_cuda=_driver_cuda() if gpus else "",
        nccl=_nccl() if gpus else "",
    )
    try:
        return replace(reading, rails=rails_here(settings))
    except MultiringError as error:
        return replace(reading, rails_fault=str(error))


def topology_here(settings: Settings) -> Topology | None:
    """Return the topology file's contents; None without a file."""
    return None if settings.topology is None else read_topology(settings.topology)


def rails_here(settings: Settings) -> tuple[RailReading, ...]:
    """Return the interfaces that a rank here uses between hosts.

    Raises:
        MultiringError: they cannot be determined.
    """
    known = topology_here(settings)
    interfaces = _interfaces_by_address()
    found = []
    for rail, address in chosen_rails(settings, known, met_locally=False):
        name = interfaces.get(address, rail.interface)
        stated = None if rail.bits_per_s is None else rail.bits_per_s / 8
        if stated is None and known is not None and rail.interface in known.interfaces:
            stated = _stated(known, known.interfaces.index(rail.interface))
        found.append(RailReading(interface=name, address=address, mtu=_mtu(name), stated_bytes_per_s=stated))
    return tuple(found)


def _stated(known: Topology, rail: int) -> float | None:
    """Return the bandwidth in bytes per second that the file states for this host.

    A link with the built-in constants is not stated: files have them where nothing is known.
    """
    name = os.uname().nodename
    here = next((at for at, each in enumerate(known.names) if each in (name, name.partition(".")[0])), None)
    link = known.rails[rail] if here is None else known.rails_of(here)[rail]
    bandwidth = link.bandwidth_bytes_per_s
    if bandwidth == TCP.bandwidth_bytes_per_s:
        return None
    for rack in known.racks if here is not None else ():
        # A host that is alone in its rack reaches the others by the uplink only.
        uplink = rack.uplinks[rail] if rack.uplinks else None
        if rack.hosts == (here,) and uplink is not None:
            bandwidth = min(bandwidth, uplink.bandwidth_bytes_per_s)
    return bandwidth


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all hosts. No package is imported."""
    found = {"multiring": VERSION, "Python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    return found


def torch_cuda() -> str | None:
    """Return the CUDA version for which torch is built, "" for a build without CUDA, and None without torch.

    The version is in a file of torch, which takes seconds to import.
    """
    try:
        origin = getattr(importlib.util.find_spec("torch"), "origin", None)
        text = "" if origin is None else (Path(origin).parent / "version.py").read_text(encoding="utf-8")
    except (OSError, ValueError, ImportError):
        return None
    if not text:
        return None
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else ""


def _driver_cuda() -> str:
    version = ctypes.c_int()
    try:
        library = ctypes.CDLL(DRIVER)
        library.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return ""
    return f"{version.value // 1000}.{version.value % 1000 // 10}" if version.value else ""


def _nccl() -> str:
    try:
        return shown_version(find_nccl().version)
    except MultiringError:
        return ""


def free_memory() -> int | None:
    """Return the bytes of memory that a process here can still take; None if the system does not tell."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text_of(Path("/proc/meminfo")), re.MULTILINE)
    limits = [int(found[1]) << 10] if found else []
    group = group_here()
    most = limit_bytes(group)
    if most is not None and group is not None:
        used = text_of(group / "memory.current").strip() or text_of(group / "memory.usage_in_bytes").strip()
        limits.append(max(0, most - (int(used) if used.isdecimal() else 0)))
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space)
    return min(limits, default=None)


def free_shm() -> int | None:
    """Return the free bytes of /dev/shm; None if there is none."""
    try:
        found = os.statvfs(_SHM)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _most_files() -> int | None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard


def _mtu(interface: str) -> int | None:
    text = text_of(_NETWORK / interface / "mtu").strip()
    return int(text) if text.isdecimal() else None


def _interfaces_by_address() -> dict[str, str]:
    """Return the interface of each IPv4 address of this host. Rails may be given by address, sysfs knows names only."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", os.fsencode(name)[: _NAME_BYTES - 1])
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
                found[socket.inet_ntoa(answer[20:24])] = name
    return found


# ---- readings that take time ----


def work_seconds() -> float:
    """Return the CPU seconds of a fixed piece of work, the least of several.

    CPU time, in place of the time that passes, does not count other programs' turns on the core.
    """
    times = []
    for _ in range(_PIECES):
        begin_s = time.thread_time()
        total = 0
        for number in range(_PIECE):
            total += number * number
        times.append(time.thread_time() - begin_s)
    return min(times)


class Meanwhile:
    """Measures what happened on this host from its creation until `reading` is called."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._worked_s = _worked_s()
        self._own_s = _own_s()
        self._throttled_s = _throttled_s()
        self._heat = _heat()

    def reading(self) -> Mapping[str, float]:
        """Return the seconds that passed, that the machine's CPUs worked, and that they worked for this process.

        Also returns the share of the time for which the control group stopped this process, and how often the processor
        slowed down because of its temperature.
        """
        passed_s = max(time.monotonic() - self._began_s, 1e-3)
        return {
            "passed_s": passed_s,
            "worked_s": _worked_s() - self._worked_s,
            "own_s": _own_s() - self._own_s,
            "throttled": (_throttled_s() - self._throttled_s) / passed_s,
            "heat": _heat() - self._heat,
        }


def _worked_s() -> float:
    # Interrupts do not count: most of them are for the packets of the measurement itself.
    words = text_of(Path("/proc/stat")).partition("\n")[0].split()
    user, nice, system, _idle, _waits, _irq, _softirq, stolen = map(int, words[1:9])
    return (user + nice + system + stolen) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _throttled_s() -> float:
    """Return for how many seconds this process's control groups have stopped its processes so far."""
    most = 0.0
    for folder in group_folders(groups_told(), "cpu", ("cpu.stat",)):
        words = dict(line.split(" ", 1) for line in text_of(folder / "cpu.stat").splitlines() if " " in line)
        most = max(most, int(words.get("throttled_usec", "0")) * 1e-6, int(words.get("throttled_time", "0")) * 1e-9)
    return most


def _heat() -> int:
    counts = [text_of(path).strip() for path in Path("/sys/devices/system/cpu").glob(f"cpu[0-9]*/{_HEAT}")]
    return sum(int(each) for each in counts if each.isdecimal())
