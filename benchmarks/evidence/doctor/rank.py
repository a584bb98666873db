"""Make this host ill as told, then run `multiring doctor` on it: rank.py FAULTS [OPTIONS of the doctor].

FAULTS is a JSON list of faults. Each is applied on its host only, whose name is the item "host". Most faults are real:
the kernel's routes, filters, limits and interfaces are changed. The versions, the clock and the share of throttled time
are changed where the doctor reads them.
"""

import ctypes
import json
import os
import platform
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyroute2

from multiring._cli import main
from multiring._diagnosis import checker, host
from multiring._settings import become_rank
from multiring.lab.network import _shape as shape

Fault = dict[str, Any]


def put(owner: Any, name: str, value: Any) -> None:
    """Replace what the doctor reads."""
    setattr(owner, name, value)


def version(fault: Fault) -> None:
    """Change the version of a package as its metadata tells it, or that of multiring or Python."""
    if fault["package"] == "multiring":
        put(host, "VERSION", fault["value"])
    elif fault["package"] == "Python":
        put(platform, "python_version", lambda: fault["value"])
    else:
        place = Path(tempfile.mkdtemp(dir="/dev/shm"), f"{fault['package']}-{fault['value']}.dist-info")
        place.mkdir()
        text = f"Metadata-Version: 2.1\nName: {fault['package']}\nVersion: {fault['value']}\n"
        (place / "METADATA").write_text(text, encoding="utf-8")
        sys.path.insert(0, str(place.parent))


def mtu(fault: Fault) -> None:
    """Change the MTU of an interface."""
    with pyroute2.IPRoute() as kernel:
        kernel.link("set", index=kernel.link_lookup(ifname=fault["interface"])[0], mtu=fault["value"])


def rate(fault: Fault) -> None:
    """Change the rate at which an interface sends, in bits per second."""
    with pyroute2.IPRoute() as kernel:
        shape(kernel, kernel.link_lookup(ifname=fault["interface"])[0], fault["value"])


def link(fault: Fault) -> None:
    """Change the rate to one other host, in bits per second; all others share the interface's own rate."""
    with pyroute2.IPRoute() as kernel:
        index = kernel.link_lookup(ifname=fault["interface"])[0]
        kernel.tc("del", index=index, parent=0xFFFFFFFF)
        kernel.tc("add", "htb", index, 0x10000, default=0x10)
        for handle, bits in ((0x10010, fault["full"]), (0x10020, fault["value"])):
            kernel.tc("add-class", "htb", index, handle, parent=0x10000, rate=f"{bits // 1000}kbit", burst=32768)
        address = int.from_bytes(socket.inet_aton(fault["address"]), "big")
        kernel.tc(
            "add-filter",
            "u32",
            index,
            parent=0x10000,
            prio=10,
            protocol=0x0800,  # ETH_P_IP
            target=0x10020,
            keys=[f"0x{address:08x}/0xffffffff+16"],
        )


def firewall(fault: Fault) -> None:
    """Drop what comes from another host to some ports, or to any: by a rule of routing, which every host has."""
    chosen = {"dport_range": fault["ports"]} if fault.get("ports") else {}
    local = 255  # the table of the host's own addresses, whose rule is the first one
    with pyroute2.IPRoute() as kernel:
        kernel.rule("add", priority=10, table=local)
        kernel.rule("del", priority=0, table=local)
        tcp = socket.IPPROTO_TCP
        kernel.rule(
            "add", priority=5, src=fault["address"], src_len=32, ip_proto=tcp, action="FR_ACT_BLACKHOLE", **chosen
        )


def no_route(fault: Fault) -> None:
    """Drop all packets to another host."""
    with pyroute2.IPRoute() as kernel:
        kernel.route("add", type="blackhole", dst=fault["address"], dst_len=32)


def down(fault: Fault) -> None:
    """Take an interface down."""
    with pyroute2.IPRoute() as kernel:
        kernel.link("set", index=kernel.link_lookup(ifname=fault["interface"])[0], state="down")


def variable(fault: Fault) -> None:
    """Set a variable of the environment."""
    become_rank({fault["name"]: fault["value"]})


def memory(fault: Fault) -> None:
    """Limit the address space, in bytes."""
    resource.setrlimit(resource.RLIMIT_AS, (fault["value"], fault["value"]))


def files(fault: Fault) -> None:
    """Limit the number of descriptors."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (fault["value"], fault["value"]))


def shm(fault: Fault) -> None:
    """Change the size of /dev/shm, in bytes."""
    subprocess.run(["mount", "-o", f"remount,size={fault['value']}", "/dev/shm"], check=True)  # noqa: S108, S603, S607


def clock(fault: Fault) -> None:
    """Add seconds to the reading of the clock."""
    put(checker.HostChecker, "clock", lambda _self: time.time() + fault["value"])


def slow_work(fault: Fault) -> None:
    """Multiply the time of the piece of work."""
    usual = host.work_seconds
    put(checker, "work_seconds", lambda: usual() * fault["value"])


def throttled(fault: Fault) -> None:
    """Let the control group's counter of throttled time go at this share of the time."""
    put(host, "_throttled_s", lambda: fault["value"] * time.monotonic())


def devices(fault: Fault) -> None:
    """Show the host stand-ins of GPUs, their driver and NCCL. tests/standin/nvml.cc lists their settings."""
    become_rank(fault["settings"])
    for path in fault["libraries"]:
        ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    put(host, "torch_cuda", lambda: fault["torch_cuda"])


def late(fault: Fault) -> None:
    """Come later by some seconds, or, beyond a minute, never."""
    time.sleep(min(fault["value"], 60))
    if fault["value"] > 60:
        sys.exit(0)


FAULTS: dict[str, Callable[[Fault], None]] = {
    each.__name__: each
    for each in (
        *(version, mtu, rate, link, firewall, no_route, down, variable, memory, files, shm, clock, slow_work),
        *(throttled, devices, late),
    )
}


if __name__ == "__main__":
    for told in json.loads(sys.argv[1]):
        if told["host"] == os.uname().nodename:
            FAULTS[told["do"]](told)
    sys.exit(main(["doctor", "--json", *sys.argv[2:]]))
