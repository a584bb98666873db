"""`multiring probe` and `multiring plan --measure` in jobs write usable files."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.lab_rig import LabRun

from multiring._topology import topology_of
from multiring.planner import pins_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="virtual hosts need root")
COMMAND = (sys.executable, "-m", "multiring")
QUICK = ("--seconds", "0.05", "--drain", "0.05")


@pytest.fixture
def labs() -> Iterator[list[LabRun]]:
    made: list[LabRun] = []
    yield made
    for lab in made:
        lab.close()


def test_a_probe_writes_a_topology_that_a_job_plans_by(tmp_path: Path, labs: list[LabRun]) -> None:
    file, plans = tmp_path / "t.toml", tmp_path / "p.toml"
    hosts = ("--hosts", "4", "--link", "200mbit", "--rack", "2", "--uplink", "100mbit")
    labs.append(LabRun(*hosts, *COMMAND, "probe", "--save", str(file), *QUICK))
    assert labs[-1].finish() in {0, 1}, labs[-1].err  # 1: on a busy machine links may be slower than stated
    found = topology_of(file.read_text())
    assert found.names == ("host0", "host1", "host2", "host3")
    assert [rack.hosts for rack in found.racks] == [(0, 1), (2, 3)]
    assert all(link.bandwidth_bytes_per_s < 30e6 for link in found.rails)

    measure = ("plan", "--measure", "--sizes", "256KiB", "--top", "3", "--save", str(plans), *QUICK)
    labs.append(LabRun(*hosts, *COMMAND, *measure, MULTIRING_TOPOLOGY=str(file)))
    assert labs[-1].finish() == 0, labs[-1].err
    assert "all_reduce of 256 KiB on 4 ranks, the first 3 of" in labs[-1].out or "on 4 ranks\n" in labs[-1].out
    assert labs[-1].out.count("measured ms") == 1
    ((task, plan),) = pins_of(plans.read_text()).plans
    assert (task.size_bytes, plan.schedule.ranks) == (256 << 10, 4)


def test_on_one_host_a_probe_invents_no_rail() -> None:
    done = subprocess.run(
        [*COMMAND, "run", "-n", "2", "--", *COMMAND, "probe", *QUICK],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "[shm]" in done.stdout
    assert "[[hosts]]" in done.stdout
    assert "rails" not in done.stdout
