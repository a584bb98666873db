"""The only wire of a host: a cut raises on every rank and names host and ranks; a slow or idle wire raises nothing."""

import os
import re
import sys
import time

import pytest
from tests.support.lab_rig import LabRun

from multiring.lab import ask_lab

TIMEOUT_S = 4.0
# Ranks 0 and 1 are on one host, 2 and 3 on the other. Each receives across the wire, and some also send.
RECEIVE = """
import sys, time
import numpy as np
import multiring, multiring.errors
group = multiring.init()
array = np.zeros(1000)
across = (group.rank + 2) % 4
handle = group.recv_async(array, across, tag=group.rank)
group.barrier()
print("up", flush=True)
time.sleep({before_s})
start = time.monotonic()
try:
    if {sends}:
        group.send(np.ones(1000), across, tag=across)
    handle.wait()
    print(f"{{group.rank}} received {{int(array.sum())}}", flush=True)
except multiring.errors.MultiringError as error:
    print(f"{{group.rank}} {{type(error).__name__}} {{time.monotonic() - start:.3f}} {{error}}", flush=True)
multiring.shutdown()
"""


def lab_of(name: str, *, before_s: float, sends: bool) -> LabRun:
    script = RECEIVE.format(before_s=before_s, sends=sends)
    wires = ("--hosts", "2", "--slots", "2", "--link", "100mbit", "--name", name)
    return LabRun(*wires, sys.executable, "-c", script, MULTIRING_WIRE_TIMEOUT_S=str(TIMEOUT_S))


@pytest.mark.skipif(os.geteuid() != 0, reason="virtual hosts need root")
def test_a_host_whose_only_wire_is_cut_is_named_by_all_who_wait_for_it() -> None:
    name = f"wires-{os.getpid()}"
    lab = lab_of(name, before_s=0, sends=False)
    try:
        lab.wait_for_lines(4)
        time.sleep(1.5 * TIMEOUT_S)  # the wire is idle, and no rank is lost
        assert lab.process.poll() is None
        cut_s = time.monotonic()
        ask_lab(name, fault=["cut", "host1"])
        lab.finish()
        assert time.monotonic() - cut_s < 60  # the kernel itself would take a quarter of an hour
    finally:
        lab.close()
    told = sorted(line for line in lab.out.splitlines() if " PeerLostError " in line)
    assert len(told) == 4, (lab.out, lab.err)
    for rank, line in enumerate(told):
        there = r"host1 \(ranks 2-3\)" if rank < 2 else r"host0 \(ranks 0-1\)"
        lost = rf"rank {(rank + 2) % 4} cannot be reached \(nothing .*from {there} "
        assert re.search(rf"{rank} PeerLostError [0-9.]+ message from .*{lost}", line), line


@pytest.mark.skipif(os.geteuid() != 0, reason="virtual hosts need root")
def test_a_host_that_is_frozen_or_slow_answers() -> None:
    name = f"wires-slow-{os.getpid()}"
    lab = lab_of(name, before_s=3, sends=True)
    try:
        lab.wait_for_lines(4)
        ask_lab(name, fault=["slow", "host0", "1mbit"])
        ask_lab(name, fault=["freeze", "host1"])
        time.sleep(2 * TIMEOUT_S)
        ask_lab(name, fault=["thaw", "host1"])
        assert lab.finish() == 0, (lab.out, lab.err)
    finally:
        lab.close()
    received = {line for line in lab.out.splitlines() if "received" in line}
    assert received == {f"[{rank}] {rank} received 1000" for rank in range(4)}
