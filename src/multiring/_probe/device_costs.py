"""Measure what it costs to use devices: copies between them and pinned memory, and all-reduces by NCCL.

All ranks of a host copy at once, and all hosts at once, as in training. Each cost is that of the slowest rank, because
all ranks wait for it. No framework is needed: the driver and NCCL are called as the nccl engine calls them.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ctypes import c_void_p
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from multiring._runtime import Group
from multiring._runtime.engines.cuda_driver import CudaDriver, device_count
from multiring._runtime.engines.device_choice import group_by_nccl
from multiring._topology import DeviceCosts
from multiring.errors import MultiringError, PeerLostError, StallError

_SMALL_BYTES = 1 << 10
_LARGE_BYTES = 16 << 20  # on an H100, copies of 16 MiB have nearly the rate of larger ones
_FEWEST = 5
_LEAST_S = 1e-7


@dataclass(frozen=True, slots=True)
class _Places:
    """Memory of a device and pinned memory of the host, between which a rank copies."""

    driver: CudaDriver
    stream: c_void_p
    on_device: int
    on_host: int

    def copy(self, size_bytes: int, times: int, *, to_host: bool) -> float:
        """Copy one after the other, and return the seconds until the host knows that the last copy has ended."""
        begin_s = time.perf_counter()
        for _ in range(times):
            if to_host:
                self.driver.call("cuMemcpyDtoHAsync_v2", self.on_host, self.on_device, size_bytes, self.stream)
            else:
                self.driver.call("cuMemcpyHtoDAsync_v2", self.on_device, self.on_host, size_bytes, self.stream)
        self.driver.call("cuStreamSynchronize", self.stream)
        return time.perf_counter() - begin_s


def device_costs(group: Group, *, seconds: float) -> DeviceCosts:
    """Return the costs of the devices of `group`. Every rank calls it, and gets the same result.

    Costs that cannot be measured stay as the group's topology states them.

    The i-th rank of a host uses the i-th device that it sees, counted anew. Nothing is measured unless every rank has
    a device. NCCL is measured inside the hosts if each of two or more ranks of every host has a device of its own, and
    over all ranks if there are several hosts.

    Args:
        group: all ranks of the job, in host memory.
        seconds: how long to time each large transfer.

    Raises:
        CollectiveError: a rank is gone.
    """
    place = group.topology.hosts[group.topology.host_of()[group.rank]].index(group.rank)
    driver = _driver_of(place)
    stated = group.topology.device_costs
    if not _all(group, driver is not None):
        return stated
    assert driver is not None  # noqa: S101
    found = _copies(group, driver, seconds)
    inside = [group.subgroup(ranks) for ranks in group.topology.hosts]
    local = next(part for part in inside if part is not None)
    own = _nccl(local, driver.device, seconds)
    if _all(group, own is not None):
        assert own is not None  # noqa: S101
        found["nccl_latency_s"], found["nccl_bytes_per_s"] = _slowest(group, own)
    if len(inside) > 1 and (over := _nccl(group, driver.device, seconds)) is not None:
        found["nccl_network_latency_s"], found["nccl_network_bytes_per_s"] = _slowest(group, over)
    return replace(stated, **found)


def _driver_of(place: int) -> CudaDriver | None:
    """Return the driver with the device of a host's rank number `place`; None if the rank has none that works."""
    count = device_count()
    try:
        return CudaDriver(place % count) if count else None
    except MultiringError:
        return None


def _all(group: Group, can: bool) -> bool:  # noqa: FBT001 -- the rank's answer
    """Return whether all ranks can."""
    answer = np.array([can], np.uint8)
    group.all_reduce(answer, "min")
    return bool(answer[0])


def _slowest(group: Group, cost: tuple[float, float]) -> tuple[float, float]:
    """Return the largest latency and the least rate of all ranks."""
    latency_s, rate = cost
    agreed = np.array([latency_s, 1 / rate])
    group.all_reduce(agreed, "max")
    return float(agreed[0]), float(1 / agreed[1])


# ---- copies ----


def _copies(group: Group, driver: CudaDriver, seconds: float) -> dict[str, float]:
    """Measure copies, if every rank can pin memory."""
    found: dict[str, float] = {}
    with _places(group, driver) as places:
        if not _all(group, places is not None):
            return found
        assert places is not None  # noqa: S101
        latencies = []
        for name, to_host in (("to_host_bytes_per_s", True), ("to_device_bytes_per_s", False)):
            group.barrier()
            small = [places.copy(_SMALL_BYTES, 1, to_host=to_host) for _ in range(_FEWEST * _FEWEST)]
            one_s = places.copy(_LARGE_BYTES, 1, to_host=to_host)
            times = max(_FEWEST, round(seconds / _FEWEST / max(one_s, _LEAST_S)))
            group.barrier()
            large = [places.copy(_LARGE_BYTES, times, to_host=to_host) for _ in range(_FEWEST)]
            latency_s = median(small)
            rate = times * _LARGE_BYTES / max(median(large) - latency_s, _LEAST_S)
            latency_s, found[name] = _slowest(group, (latency_s, rate))
            latencies.append(latency_s)
        found["copy_latency_s"] = max(latencies)
    return found


@contextmanager
def _places(group: Group, driver: CudaDriver) -> Iterator[_Places | None]:
    """Give memory for copies, or None if this rank cannot have it."""
    undo: list[Callable[[], None]] = []
    try:
        try:
            places = _made(group, driver, undo)
        except MultiringError:
            places = None
        yield places
    finally:
        for step in reversed(undo):
            step()


def _made(group: Group, driver: CudaDriver, undo: list[Callable[[], None]]) -> _Places | None:
    on_device = driver.allocate(_LARGE_BYTES)
    if on_device is None:
        return None
    undo.append(lambda: driver.free(on_device))
    memory: Any = group.allocate(_LARGE_BYTES, np.uint8)
    memory[:] = 1  # pages that exist are pinned in a tenth of the time
    address = int(memory.ctypes.data)
    driver.pin(address, memory.nbytes)
    undo.append(lambda: driver.unpin(address))
    return _Places(driver, driver.new_stream(), on_device, address)


# ---- NCCL ----


def _nccl(part: Group, device: int, seconds: float) -> tuple[float, float] | None:
    """Return the latency and the rate of NCCL's all-reduces over `part`; None if it has one rank, or cannot use NCCL.

    All ranks of `part` call it. The latency is that of a whole operation of multiring, with the host's time of a call.
    """
    if part.size == 1:
        return None
    try:
        over = group_by_nccl(part, device)
    except (PeerLostError, StallError):
        raise
    except MultiringError:  # raised on all ranks
        return None
    arrays: list[Any] = []
    with suppress(MultiringError):  # one device may have no room
        arrays = [over.allocate(size // 4, np.float32) for size in (_SMALL_BYTES, _LARGE_BYTES)]
    if not _all(part, bool(arrays)):
        return None
    small, large = (each.put(0.0) for each in arrays)
    latency_s = median(_timed(over, small) for _ in range(_FEWEST * _FEWEST))
    one_s = _agreed(part, _timed(over, large))
    taken = [_timed(over, large) for _ in range(max(_FEWEST, round(seconds / max(one_s, _LEAST_S))))]
    carried = 2 * (part.size - 1) / part.size * _LARGE_BYTES
    return latency_s, carried / max(median(taken) - latency_s, _LEAST_S)


def _timed(over: Group, array: Any) -> float:
    begin_s = time.perf_counter()
    over.all_reduce(array)
    return time.perf_counter() - begin_s


def _agreed(part: Group, seconds: float) -> float:
    """Return the time of the slowest rank, so that all ranks make the same number of calls."""
    found = np.array([seconds])
    part.all_reduce(found, "max")
    return float(found[0])
