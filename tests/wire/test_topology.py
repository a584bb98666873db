"""A job with a topology file: every rank plans by it, or every rank reports why it cannot."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.lab_rig import LabRun
from tests.support.ranks import Here, run_ranks

from multiring.errors import ArgumentError, RendezvousError

RAILS = '[[rails]]\ninterface = "eth0"\nbandwidth_mbit_per_s = 800\n'


def look(here: Here) -> tuple[object, ...]:
    group = here.join()
    whole = np.ones(1000, np.float32)
    group.all_reduce(whole)
    part = group.subgroup([3, 1])
    assert whole.tolist() == [4.0] * 1000
    assert len(set(group.topology.names)) == 1  # one machine plays all hosts
    rails = [group.topology.rails] if part is None else [group.topology.rails, part.topology.rails]
    return group.grid, [[link.bandwidth_bytes_per_s for link in each] for each in rails]


def test_a_group_plans_by_the_file(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(RAILS)
    found = run_ranks(look, 4, engine="shm+tcp", topology=str(tmp_path / "t.toml"))
    assert found == [((2, 2), [[1e8]] * (2 if rank in {1, 3} else 1)) for rank in range(4)]


def refused(here: Here) -> str:
    with pytest.raises((RendezvousError, ArgumentError)) as raised:
        here.join()
    return str(raised.value)


def test_ranks_with_different_files_all_raise(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(RAILS)
    own = [{"topology": str(tmp_path / "t.toml")}, {}, {"topology": str(tmp_path / "t.toml")}]
    (text,) = set(run_ranks(refused, 3, by_rank=own))
    assert "ranks have different topology files: file " in text
    assert "on ranks [0, 2]; no file on ranks [1]; set MULTIRING_TOPOLOGY to the same file everywhere" in text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[nvlink]", "unknown key 'nvlink'"),
        ("[[hosts]]\nname = 'elsewhere'", "does not know host"),
        (None, "No such file"),
    ],
)
def test_a_file_that_does_not_fit_is_an_error_on_all(tmp_path: Path, text: str | None, reason: str) -> None:
    if text is not None:
        (tmp_path / "t.toml").write_text(text)
    for found in run_ranks(refused, 2, engine="tcp", topology=str(tmp_path / "t.toml")):
        assert reason in found


RACKS = """
[[racks]]
name = "a"
[[racks]]
name = "b"
[[hosts]]
name = "host[0,2]"
rack = "a"
[[hosts]]
name = "host[1,3]"
rack = "b"
"""
SUM = """
import numpy, multiring
group = multiring.init()
whole = numpy.ones(100_000, numpy.float32)
group.all_reduce(whole)
assert (whole == 8).all()
print(group.grid, group.topology.names, [rack.hosts for rack in group.topology.racks])
multiring.shutdown()
"""


@pytest.fixture
def run_lab() -> Iterator[list[LabRun]]:
    labs: list[LabRun] = []
    yield labs
    for lab in labs:
        lab.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="virtual hosts need root")
def test_racks_become_an_axis(tmp_path: Path, run_lab: list[LabRun]) -> None:
    (tmp_path / "t.toml").write_text(RACKS)
    options = ("--hosts", "4", "--slots", "2", "--rack", "2", "--uplink", "200mbit")
    lab = LabRun(*options, sys.executable, "-c", SUM, MULTIRING_TOPOLOGY=str(tmp_path / "t.toml"))
    run_lab.append(lab)
    assert lab.finish() == 0, lab.err
    assert lab.out.count("(2, 2, 2) ('host0', 'host1', 'host2', 'host3') [(0, 2), (1, 3)]") == 8
