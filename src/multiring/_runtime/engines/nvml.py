"""What NVIDIA's management library, NVML, says about the GPUs of this host and the links between them.

The library belongs to the driver. It is loaded at run time, and it takes no memory on devices. Functions that an older
library lacks, or that the driver does not support, count as unknown.
"""

import ctypes
from collections.abc import Callable, Mapping
from ctypes import POINTER, c_byte, c_char_p, c_int, c_uint, c_void_p
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from multiring._topology import DeviceLink, HostDevices, islands_of

NVML = "libnvidia-ml.so.1"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
Found = TypeVar("Found")


class NvmlPci(ctypes.Structure):
    """nvmlPciInfo_t: the address of a device on the PCI bus."""

    _fields_ = (
        ("bus_id_legacy", c_byte * 16),
        ("domain", c_uint),
        ("bus", c_uint),
        ("device", c_uint),
        ("device_id", c_uint),
        ("subsystem_id", c_uint),
        ("bus_id", c_byte * 32),
    )


# The functions and their parameters. The library that tests use in place of NVIDIA's is compiled with this table.
NVML_SIGNATURES: dict[str, list[Any]] = {
    "nvmlInit_v2": [],
    "nvmlShutdown": [],
    "nvmlDeviceGetCount_v2": [POINTER(c_uint)],
    "nvmlDeviceGetHandleByIndex_v2": [c_uint, POINTER(c_void_p)],
    "nvmlDeviceGetHandleByUUID": [c_char_p, POINTER(c_void_p)],
    "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": [c_void_p, POINTER(c_void_p)],
    "nvmlDeviceGetName": [c_void_p, c_void_p, c_uint],
    "nvmlDeviceGetUUID": [c_void_p, c_void_p, c_uint],
    "nvmlDeviceGetPciInfo_v3": [c_void_p, POINTER(NvmlPci)],
    "nvmlDeviceGetTopologyCommonAncestor": [c_void_p, c_void_p, POINTER(c_int)],
    "nvmlDeviceGetNvLinkState": [c_void_p, c_uint, POINTER(c_int)],
    "nvmlDeviceGetNvLinkRemotePciInfo_v2": [c_void_p, c_uint, POINTER(NvmlPci)],
    "nvmlDeviceGetMigMode": [c_void_p, POINTER(c_uint), POINTER(c_uint)],
}
_NEEDED = ("nvmlInit_v2", "nvmlShutdown", "nvmlDeviceGetCount_v2")
_MISSING = 13  # NVML_ERROR_FUNCTION_NOT_FOUND
_TEXT = 96  # bytes of a name or UUID: NVML_DEVICE_NAME_V2_BUFFER_SIZE and NVML_DEVICE_UUID_V2_BUFFER_SIZE
_MOST_NVLINKS = 64  # far more than a device has; a query of a link that does not exist fails
# nvmlGpuTopologyLevel_t. Up to MULTIPLE, two devices are joined by PCIe switches; up to NODE, by one socket.
_MULTIPLE, _NODE, _SYSTEM = 20, 40, 50


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundDevice:
    """One device of this host, as one rank sees it.

    `index` is its number in NVML, which is the same for all processes of the host. `classes` has the class of the link
    to each device of the host, by index.
    """

    index: int
    kind: str
    classes: tuple[DeviceLink, ...]
    nvlinks: int


def visible_gpus(environment: Mapping[str, str], library: str = NVML) -> int:
    """Return the number of GPUs that a process with `environment` sees; 0 if the host has no driver of NVIDIA."""
    return _with_nvml(library, lambda nvml: len(_visible(environment, nvml)), 0)


def visible_devices(environment: Mapping[str, str], library: str = NVML) -> list[FoundDevice]:
    """Return the GPUs that a process with `environment` sees, in CUDA's order if all are of one kind.

    A part of a GPU (MIG) counts as the GPU. The list is empty if the host has no driver of NVIDIA, or its NVML cannot
    tell devices apart.
    """
    return _with_nvml(library, lambda nvml: _devices(environment, nvml), [])


def host_devices(found: list[FoundDevice], used: tuple[int, ...] = ()) -> HostDevices:
    """Return devices of one host as those of host 0. `used` is the device of each rank, by its place in `found`."""
    link, islands = islands_of([[one.classes[other.index] for other in found] for one in found])
    nvlinks = min(each.nvlinks for each in found)
    kinds = tuple(each.kind for each in found)
    return HostDevices(host=0, kinds=kinds, link=link, islands=islands, nvlinks=max(nvlinks, 1), used=used)


def _with_nvml(library: str, ask: Callable[["_Nvml"], Found], otherwise: Found) -> Found:
    """Return what `ask` returns of NVML; `otherwise` if there is none, or it cannot be initialised."""
    try:
        loaded = ctypes.CDLL(library)
        for name in _NEEDED:
            getattr(loaded, name)
    except (OSError, AttributeError):
        return otherwise
    nvml = _Nvml(loaded)
    if nvml.code("nvmlInit_v2"):
        return otherwise
    try:
        return ask(nvml)
    finally:
        nvml.code("nvmlShutdown")


def _visible(environment: Mapping[str, str], nvml: "_Nvml") -> list[int | str]:
    """Return the visible devices: the number of each, or its name in the variable if NVML does not tell UUIDs."""
    count, names = nvml.count, environment.get(_VISIBLE)
    if names is None or not count:
        return list(range(count))
    handles = [nvml.handle(index) for index in range(count)]
    uuids = ["" if handle is None else nvml.text("nvmlDeviceGetUUID", handle) for handle in handles]
    found: list[int | str] = []
    # CUDA ignores the first name that is not a device's, and all names after it. A part of a device (MIG) counts too.
    for name in map(str.strip, names.split(",")):
        at: int | str | None = name
        if name.lstrip("-").isdigit():
            at = int(name) if 0 <= int(name) < count else None
        elif all(uuids):
            at = _index_of(nvml, name, handles, uuids)
        if at is None or not name:
            break
        found.append(at)
    return found


def _devices(environment: Mapping[str, str], nvml: "_Nvml") -> list[FoundDevice]:
    count = nvml.count
    handles = [nvml.handle(index) for index in range(count)]
    if any(handle is None for handle in handles):
        return []
    links = [_Links.of(nvml, handle) for handle in handles]
    addresses = {each.address for each in links if each.address is not None}
    every = [
        FoundDevice(
            index=index,
            kind=nvml.text("nvmlDeviceGetName", handle) or "unknown GPU",
            classes=tuple(
                _class((links[index], links[at]), addresses, partial(nvml.ancestor, handle, other))
                for at, other in enumerate(handles)
            ),
            nvlinks=len(links[index].remote),
        )
        for index, handle in enumerate(handles)
    ]
    visible = _visible(environment, nvml)
    # Without the device of one name, the places of all others would be wrong.
    return [every[at] for at in visible if isinstance(at, int)] if not any(map(_is_name, visible)) else []


def _is_name(device: int | str) -> bool:
    return isinstance(device, str)


def _index_of(nvml: "_Nvml", name: str, handles: list[Any], uuids: list[str]) -> int | None:
    """Return the number of the device with a UUID, or with a part (MIG) of that UUID; None if there is none."""
    if not name.startswith("MIG-"):
        # CUDA accepts the beginning of a UUID if only one device has it.
        fitting = [at for at, uuid in enumerate(uuids) if uuid.startswith(name)]
        return fitting[0] if len(fitting) == 1 else None
    part, whole = c_void_p(), c_void_p()
    if nvml.code("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(part)):
        return None
    if nvml.code("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", part, ctypes.byref(whole)):
        return None
    return next((at for at, handle in enumerate(handles) if handle.value == whole.value), None)


@dataclass(frozen=True, slots=True)
class _Links:
    """The address of a device, the addresses at the other ends of its active NVLinks, and whether it is divided."""

    address: tuple[int, int, int] | None
    remote: tuple[tuple[int, int, int] | None, ...]
    is_divided: bool

    @classmethod
    def of(cls, nvml: "_Nvml", handle: Any) -> "_Links":
        """Ask NVML about a device."""
        now, later = c_uint(), c_uint()
        code = nvml.code("nvmlDeviceGetMigMode", handle, ctypes.byref(now), ctypes.byref(later))
        remote = []
        for link in range(_MOST_NVLINKS):
            active = c_int()
            if nvml.code("nvmlDeviceGetNvLinkState", handle, link, ctypes.byref(active)):
                break
            if active.value:
                remote.append(nvml.address("nvmlDeviceGetNvLinkRemotePciInfo_v2", handle, link))
        return cls(nvml.address("nvmlDeviceGetPciInfo_v3", handle), tuple(remote), not code and bool(now.value))


def _class(
    links: tuple[_Links, _Links], addresses: set[tuple[int, int, int]], ancestor: Callable[[], int]
) -> DeviceLink:
    """Return the class of the link between two devices.

    Args:
        links: what NVML says about each of them.
        addresses: the addresses of all devices of the host.
        ancestor: returns their nvmlGpuTopologyLevel_t.
    """
    one, other = links
    if one.is_divided or other.is_divided:
        return DeviceLink.PCIE_SOCKETS  # parts of devices (MIG) reach other devices through host memory only
    if other.address is not None and other.address in one.remote:
        return DeviceLink.NVLINK
    # Links of both to one end that is no device: a switch. Ends that the driver does not name count as switches.
    if (set(one.remote) & set(other.remote)) - addresses:
        return DeviceLink.NVLINK
    level = ancestor()
    if level <= _MULTIPLE:
        return DeviceLink.PCIE_SWITCH
    return DeviceLink.PCIE if level < _SYSTEM else DeviceLink.PCIE_SOCKETS


class _Nvml:
    """NVML's functions. A function that the library lacks fails with NVML_ERROR_FUNCTION_NOT_FOUND."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = {name: getattr(library, name, None) for name in NVML_SIGNATURES}
        for name, function in self._functions.items():
            if function is not None:
                function.argtypes = NVML_SIGNATURES[name]

    def code(self, name: str, *arguments: Any) -> int:
        """Call a function and return its code; 0 is success."""
        function = self._functions[name]
        return _MISSING if function is None else int(function(*arguments))

    @property
    def count(self) -> int:
        """The number of devices of the host; 0 if the driver does not tell."""
        found = c_uint()
        return 0 if self.code("nvmlDeviceGetCount_v2", ctypes.byref(found)) else found.value

    def handle(self, index: int) -> c_void_p | None:
        """Return the handle of a device; None if the driver does not give it."""
        found = c_void_p()
        return None if self.code("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(found)) else found

    def ancestor(self, one: Any, other: Any) -> int:
        """Return the nvmlGpuTopologyLevel_t of two devices; one socket if the driver does not tell."""
        found = c_int(_NODE)
        code = self.code("nvmlDeviceGetTopologyCommonAncestor", one, other, ctypes.byref(found))
        return _NODE if code else found.value

    def text(self, name: str, handle: Any) -> str:
        """Return a text about a device; "" if the driver does not tell."""
        found = ctypes.create_string_buffer(_TEXT)
        return "" if self.code(name, handle, found, _TEXT) else found.value.decode(errors="replace")

    def address(self, name: str, *arguments: Any) -> tuple[int, int, int] | None:
        """Return an address on the PCI bus; None if the driver does not tell."""
        found = NvmlPci()
        return None if self.code(name, *arguments, ctypes.byref(found)) else (found.domain, found.bus, found.device)
