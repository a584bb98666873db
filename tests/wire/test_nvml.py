"""The devices of a host by NVML: the classes of their links, and what each process sees; on the stand-in of NVML."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.standin.build import nvml_built, run_compiler
from tests.wire.test_gpu_launch import management_library

from multiring._probe.devices import used_devices
from multiring._runtime.engines.nvml import FoundDevice, host_devices, visible_devices, visible_gpus
from multiring._topology import DeviceIsland, DeviceLink, HostDevices

NVLINK, SWITCH, PCIE, SOCKETS = DeviceLink.NVLINK, DeviceLink.PCIE_SWITCH, DeviceLink.PCIE, DeviceLink.PCIE_SOCKETS


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Any:
    def ask(visible: str | None = None, **settings: object) -> HostDevices | None:
        for name, value in settings.items():
            monkeypatch.setenv(f"STANDIN_{name.upper()}", str(value))
        environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        found = visible_devices(environment, str(nvml_built()))
        if "nvmlDeviceGetUUID" not in str(settings):
            assert len(found) == visible_gpus(environment, str(nvml_built()))
        return host_devices(found) if found else None

    return ask


def test_pcie_has_three_classes(standin: Any) -> None:
    found = standin(devices=4, ancestors="0-1:10,2-3:20,0-2:50,0-3:50,1-2:50,1-3:50", kinds="H100,H100,L4")
    assert found.kinds == ("H100", "H100", "L4", "L4")
    assert found.link is SOCKETS
    assert found.islands == (DeviceIsland(devices=(0, 1), link=SWITCH), DeviceIsland(devices=(2, 3), link=SWITCH))
    for level, link in ((0, SWITCH), (10, SWITCH), (20, SWITCH), (30, PCIE), (40, PCIE), (50, SOCKETS)):
        assert standin(devices=2, ancestors=f"0-1:{level}").link is link


def test_nvlink_joins_pairs_or_all_devices_of_a_switch(standin: Any) -> None:
    pairs = standin(devices=4, nvlinks="0-1:4,2-3:4")
    assert (pairs.link, pairs.nvlinks) == (PCIE, 4)
    assert {island.devices for island in pairs.islands} == {(0, 1), (2, 3)}
    assert all(island.link is NVLINK for island in pairs.islands)
    switch = standin(devices=8, nvlinks="switch:18")
    assert switch == HostDevices(host=0, kinds=("Stand-in",) * 8, link=NVLINK, nvlinks=18)


def test_two_links_to_the_same_device_are_no_switch(standin: Any) -> None:
    square = standin(devices=4, nvlinks="0-1:1,1-2:1,2-3:1,0-3:1")
    assert square.between(0, 1) is square.between(3, 0) is NVLINK
    assert square.between(0, 2) is square.between(1, 3) is PCIE
    assert square.ring_class(range(4)) is NVLINK


@pytest.mark.parametrize(
    ("visible", "kinds"),
    [
        ("2,0", "cc aa"),
        ("3", "dd"),
        ("1,7,0", "bb"),
        ("", ""),
        ("GPU-2aaa,GPU-0aaa-bbbb", "cc aa"),
        ("GPU-2,GPU-9,GPU-1", "cc"),
        ("GPU-", ""),  # the beginning of several names
        ("MIG-1,0", "bb aa"),
        ("MIG-2,0", ""),  # the device has no parts
    ],
)
def test_hidden_devices_are_left_out(standin: Any, visible: str, kinds: str) -> None:
    found = standin(visible, devices=4, kinds="aa,bb,cc,dd", mig="1", nvlinks="0-2:3")
    assert ("" if found is None else " ".join(found.kinds)) == kinds
    if kinds == "cc aa":
        assert (found.link, found.nvlinks) == (NVLINK, 3)


def test_parts_of_a_device_reach_others_through_the_host(standin: Any) -> None:
    found = standin(devices=3, nvlinks="switch:4", mig="2")
    assert found.link is SOCKETS
    assert found.islands == (DeviceIsland(devices=(0, 1), link=NVLINK),)


@pytest.mark.parametrize(
    ("lacks", "link"),
    [
        ("nvmlDeviceGetNvLinkState", SWITCH),
        ("nvmlDeviceGetNvLinkRemotePciInfo_v2", NVLINK),  # both have links to ends without a name
        ("nvmlDeviceGetPciInfo_v3", NVLINK),
        ("nvmlDeviceGetNvLinkState,nvmlDeviceGetTopologyCommonAncestor", PCIE),
        ("nvmlDeviceGetMigMode", NVLINK),
    ],
)
def test_what_a_driver_does_not_tell_counts_as_unknown(standin: Any, lacks: str, link: DeviceLink) -> None:
    found = standin(devices=2, nvlinks="switch:2", ancestors="0-1:10", nvml_lacks=lacks)
    assert found.link is link


def test_a_device_without_a_name_is_an_unknown_gpu(standin: Any) -> None:
    assert standin(devices=1, nvml_lacks="nvmlDeviceGetName").kinds == ("unknown GPU",)
    assert standin("GPU-0", devices=1, nvml_lacks="nvmlDeviceGetUUID") is None


def test_hosts_without_a_usable_nvml_have_no_devices(standin: Any, tmp_path: Path) -> None:
    assert standin(devices=0) is None
    assert standin(devices=2, nvml_refuses=9) is None
    assert visible_devices({}, str(tmp_path / "none.so")) == []
    # A library that has only the functions of the oldest drivers counts devices, but cannot tell them apart.
    old = str(management_library(tmp_path, 4))
    assert visible_gpus({}, old) == 4
    assert visible_devices({}, old) == []
    # And one without the function that counts.
    broken = tmp_path / "broken.so"
    run_compiler("-shared", "-x", "c++", "/dev/null", "-o", str(broken))
    assert visible_gpus({}, str(broken)) == 0


def device(index: int, *classes: DeviceLink) -> FoundDevice:
    return FoundDevice(index=index, kind=f"kind {index}", classes=classes, nvlinks=2)


def test_each_device_of_a_hosts_ranks_counts_once() -> None:
    first, last = device(0, NVLINK, PCIE, SOCKETS), device(2, SOCKETS, PCIE, NVLINK)
    kinds = ("kind 2", "kind 0")
    apart = used_devices([last, first])  # each rank sees its own device only
    assert apart == HostDevices(host=0, kinds=kinds, link=SOCKETS, nvlinks=2, used=(0, 1))
    assert used_devices([last, first, last]) == HostDevices(
        host=0, kinds=kinds, link=SOCKETS, nvlinks=2, used=(0, 1, 0)
    )
    assert used_devices([first, None]) is None


def planned(*settings: str, ranks: int = 2) -> str:
    """Return what `multiring plan --device cuda` prints in a job on the stand-in of NVML."""
    command = (sys.executable, "-m", "multiring")
    done = subprocess.run(
        [*command, "run", "-n", str(ranks), "--", *command, "plan", "--device", "cuda", "--sizes", "64KiB"],
        env=os.environ
        | {"LD_LIBRARY_PATH": str(nvml_built().parent)}
        | dict(setting.split("=", 1) for setting in settings),
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return done.stdout


def test_the_plans_of_a_job_know_its_devices(tmp_path: Path) -> None:
    joined = planned("STANDIN_DEVICES=2", "STANDIN_NVLINKS=0-1:4")
    assert "all_reduce of 64 KiB of device tensors on 2 ranks" in joined
    assert "MULTIRING_DEVICE_PATH=auto takes: nccl (the usual way, because costs are not measured)" in joined
    assert "Assumed" not in joined
    shared = planned("STANDIN_DEVICES=1")
    assert "takes: staged (the only way)" in shared
    assert "Not nccl: 2 ranks of a host share its devices" in shared
    # A topology file that states the devices is believed.
    file = tmp_path / "topology.toml"
    name = os.uname().nodename
    file.write_text(f"[[hosts]]\nname = '{name}'\ndevices = {{ kind = 'x', count = 2 }}\n", encoding="utf-8")
    assert "takes: nccl" in planned("STANDIN_DEVICES=1", f"MULTIRING_TOPOLOGY={file}")
    unknown = planned("STANDIN_DEVICES=0")
    assert "Assumed: a device for each rank of a host whose devices are unknown" in unknown


def test_devices_are_read_by_the_name_of_the_library() -> None:
    program = "from multiring._runtime.engines.nvml import visible_devices; print(len(visible_devices({})))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"LD_LIBRARY_PATH": str(nvml_built().parent), "STANDIN_DEVICES": "3", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert done.stdout == "3\n"
