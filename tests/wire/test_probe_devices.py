"""`multiring probe` on devices: copies and NCCL are measured where they work, and the file states the devices."""

import ctypes
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import pytest
from tests.standin.build import built, nvml_built
from tests.standin.loading import load
from tests.support.cuda_ranks import RANKS_PER_HOST
from tests.support.ranks import Here, run_ranks

from multiring import Group
from multiring._probe import device_costs as measuring
from multiring._probe.device_costs import device_costs
from multiring._probe.measure import probe
from multiring._runtime.engines.cuda_driver import CudaDriver, CudaError
from multiring._topology import DeviceCosts, DeviceLink, text_of, topology_of
from multiring.errors import ArgumentError

COPIES = {"copy_latency_s", "to_host_bytes_per_s", "to_device_bytes_per_s"}
INSIDE = {"nccl_latency_s", "nccl_bytes_per_s"}
NETWORK = {"nccl_network_latency_s", "nccl_network_bytes_per_s"}
SOON_S = 0.02


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    built()
    nvml_built()


def enter(here: Here, devices: int = 2, **settings: Any) -> Group:
    """Join the job, on stand-ins with small copies, because these are slow."""
    measuring._LARGE_BYTES = 1 << 18
    if devices:
        load(devices=devices, **{"host": here.rank // RANKS_PER_HOST[here.engine], **settings})
    return here.join()


def measured(here: Here, devices: int = 2, settings: dict[str, Any] | None = None) -> dict[str, float]:
    found = device_costs(enter(here, devices, **(settings or {})), seconds=SOON_S)
    return {name: value for name, value in asdict(found).items() if value is not None}


@pytest.mark.parametrize(
    ("ranks", "engine", "devices", "wanted"),
    [
        (2, "shm", 2, COPIES | INSIDE),
        (4, "shm+tcp", 2, COPIES | INSIDE | NETWORK),
        (2, "tcp", 1, COPIES | NETWORK),
        (2, "shm", 1, COPIES),  # NCCL wants a device for each rank
        (3, "shm+tcp", 2, COPIES | NETWORK),  # a host has one rank only
        (2, "shm", 0, set()),
    ],
)
def test_what_works_is_measured_alike_on_all_ranks(ranks: int, engine: str, devices: int, wanted: set[str]) -> None:
    found = run_ranks(measured, ranks, devices, engine=engine)
    assert all(each == found[0] for each in found)
    assert found[0].keys() == wanted
    assert all(value > 0 for value in found[0].values())


def test_costs_are_those_of_the_devices() -> None:
    slow, fast = (run_ranks(measured, 2, 2, {"delay_us": delay_us}, engine="shm")[0] for delay_us in (40_000, 0))
    for name in ("copy_latency_s", "nccl_latency_s"):
        assert slow[name] > fast[name] + 0.005  # the longest delay is 40 ms


def without_a_device(here: Here) -> DeviceCosts:
    group = enter(here, 0 if here.rank else 2)
    return device_costs(group, seconds=SOON_S)


def test_a_rank_without_a_device_ends_the_measurement_on_all() -> None:
    assert run_ranks(without_a_device, 2, engine="shm") == [DeviceCosts()] * 2


def cannot_pin(here: Here) -> DeviceCosts:
    group = enter(here)

    def refuse(_driver: CudaDriver, _address: int, size_bytes: int) -> None:
        raise CudaError(f"cannot pin {size_bytes} bytes", 2)

    if here.rank:
        CudaDriver.pin = refuse  # type: ignore[method-assign, assignment]
    return device_costs(group, seconds=SOON_S)


def no_room(here: Here) -> DeviceCosts:
    group = enter(here)

    def refuse(*_arguments: Any) -> Any:
        raise ArgumentError("no room")

    if here.rank:
        Group.allocate = refuse  # type: ignore[method-assign, assignment]
    return device_costs(group, seconds=SOON_S)


@pytest.mark.parametrize(("function", "wanted"), [(cannot_pin, INSIDE), (no_room, set())])
def test_a_rank_without_memory_leaves_costs_unmeasured_on_all(
    function: Callable[[Here], DeviceCosts], wanted: set[str]
) -> None:
    found = run_ranks(function, 2, engine="shm")
    assert found[0] == found[1]
    assert {name for name, value in asdict(found[0]).items() if value is not None} == wanted


def probed(here: Here) -> tuple[str, bool]:
    group = enter(here, nvlinks="0-1:4", kinds="H100")
    ctypes.CDLL(str(nvml_built()), ctypes.RTLD_GLOBAL)
    findings = probe(group, seconds=SOON_S, drain_s=0.0)
    total = np.ones(8)
    group.all_reduce(total)  # the group stays usable
    # The hosts of this test are one machine, and a file names a machine once.
    return text_of(replace(findings.topology, names=("a", "b"))), bool((total == group.size).all())


def test_a_probe_writes_devices_and_their_costs() -> None:
    found = run_ranks(probed, 4, engine="shm+tcp")
    assert all(each == (found[0][0], True) for each in found)
    topology = topology_of(found[0][0])
    assert [(each.kinds, each.link, each.nvlinks) for each in topology.devices] == [
        (("H100", "H100"), DeviceLink.NVLINK, 4)
    ] * 2
    assert None not in [getattr(topology.device_costs, each.name) for each in fields(DeviceCosts)]
