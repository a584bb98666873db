"""A job with a plan file runs the pinned plans on every rank, or fails on every rank."""

from pathlib import Path

import numpy as np
import pytest
from tests.support.ranks import Here, run_ranks

from multiring._collectives import build
from multiring._schedule import Collective, Frame
from multiring._topology import Topology
from multiring.errors import ArgumentError, RendezvousError
from multiring.planner import Plan, Task, pins_text

TOPOLOGY = Topology(((0, 1), (2, 3)))
FLAT = build("ring", Frame(collective=Collective.ALL_REDUCE, grid=(4,), order=(0, 2, 1, 3)))
TASK = Task(collective=Collective.ALL_REDUCE, size_bytes=4096)


def write(folder: Path, topology: Topology = TOPOLOGY) -> str:
    path = folder / "plan.toml"
    path.write_text(pins_text([(TASK, Plan(FLAT, "shm+tcp", 1.0, 1 << 16))], topology))
    return str(path)


def pinned(here: Here) -> list[object]:
    group = here.join()
    array = np.arange(100_000, dtype=np.float32)
    group.all_reduce(array)
    assert array.tolist() == (4 * np.arange(100_000)).tolist()
    group.all_reduce(np.zeros(4, np.float32))
    half = group.subgroup([0, 1])
    if half is not None:
        half.all_reduce(np.zeros(10_000, np.float32))
    plans = [
        group.plan_of("all_reduce", 100_000),
        group.plan_of("all_reduce", 1_000_000),
        group.plan_of("all_reduce", 4),
        *([] if half is None else half.plans.values()),
    ]
    with pytest.raises(ArgumentError, match="collective='reduce': want one of all_reduce"):
        group.plan_of("reduce", 1)
    assert Task(collective=Collective.ALL_REDUCE, size_bytes=16) in group.plans
    return [(plan.schedule.algorithm, plan.schedule.order, plan.segment_bytes) for plan in plans]


def test_what_is_pinned_runs(tmp_path: Path) -> None:
    for found in run_ranks(pinned, 4, engine="shm+tcp", plan=write(tmp_path)):
        assert found[:2] == [("ring", (0, 2, 1, 3), 1 << 16)] * 2
        assert found[2] != found[0]  # smaller than the pinned size
        assert all(order == (0, 1) for _, order, _ in found[3:])  # a group of another shape makes its own plans


def refused(here: Here) -> str:
    with pytest.raises((RendezvousError, ArgumentError)) as raised:
        here.join()
    return str(raised.value)


def test_a_plan_of_another_topology_is_an_error_on_all(tmp_path: Path) -> None:
    for text in run_ranks(refused, 4, plan=write(tmp_path)):
        assert "the pinned plans are of another topology" in text


def test_ranks_with_different_plans_all_raise(tmp_path: Path) -> None:
    own = [{"plan": write(tmp_path)}, {}]
    (text,) = set(run_ranks(refused, 2, by_rank=own))
    assert "ranks have different plan files: file " in text
    assert "on ranks [0]; no file on ranks [1]; set MULTIRING_PLAN to the same file everywhere" in text


def test_a_plan_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    for text in run_ranks(refused, 2, plan=str(tmp_path / "none.toml")):
        assert "want a file from multiring plan --save" in text
