"""Under MULTIRING_DEVICE_PATH=auto, device tensors take the way that the planner chooses by the topology's costs."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.cuda_torch_ranks import run_cuda
from tests.support.device_training import join
from tests.support.mutants import Patch
from tests.support.ranks import Here

import multiring.torch as mt
from multiring._runtime.job.job import current
from multiring._schedule import Collective
from multiring._topology import DeviceCosts, Topology, text_of
from multiring.planner import Task, auto_route, device_plans
from multiring.torch.path_agreement import DevicePath

SHAPES = ((1, 2), (2, 2), (2, 1))
ELEMENTS = (1 << 8, 1 << 16, 1 << 20)
DECISION_S = 120
COPIES = {"copy_latency_s": 1e-6, "to_host_bytes_per_s": 1e9, "to_device_bytes_per_s": 1e9}


def costs(inside: tuple[float, float], network: tuple[float, float]) -> DeviceCosts:
    """Return costs with the latency and the rate of NCCL inside the hosts and between them."""
    return DeviceCosts(
        **COPIES,
        nccl_latency_s=inside[0],
        nccl_bytes_per_s=inside[1],
        nccl_network_latency_s=network[0],
        nccl_network_bytes_per_s=network[1],
    )


FAST, SLOW, FAR = (0.0, 1e12), (1.0, 1e6), (1e-3, 1e12)
CASES = {
    "fast": costs(FAST, FAST),
    "slow": costs(SLOW, SLOW),
    "fast inside": costs(FAST, SLOW),
    "fast for large tensors": costs(FAR, FAR),
    "not measured": DeviceCosts(nccl_latency_s=1.0),
}
# The way of each size on 1 x 2, 2 x 2 and 2 x 1 ranks.
STAGED, NCCL, HIERARCHICAL = "staged", "nccl", "hierarchical"
WAYS = {
    ("fast", (1, 2)): [NCCL] * 3,
    ("fast", (2, 2)): [NCCL] * 3,
    ("fast", (2, 1)): [NCCL] * 3,
    ("slow", (1, 2)): [STAGED] * 3,
    ("slow", (2, 2)): [STAGED] * 3,
    ("slow", (2, 1)): [STAGED] * 3,
    ("fast inside", (1, 2)): [NCCL] * 3,
    ("fast inside", (2, 1)): [STAGED] * 3,
    ("fast for large tensors", (1, 2)): [STAGED, STAGED, NCCL],
    ("not measured", (1, 2)): [STAGED, NCCL, NCCL],
    ("not measured", (2, 2)): [STAGED, HIERARCHICAL, HIERARCHICAL],
    ("not measured", (2, 1)): [STAGED] * 3,
}


def reductions(patch: Any) -> list[str]:
    """Return a list to which each reduction by NCCL adds its path."""
    found: list[str] = []
    known = DevicePath.all_reduce

    def counting(path: DevicePath, *arguments: Any, **options: Any) -> Any:
        found.append(path.choice.path)
        return known(path, *arguments, **options)

    patch.setattr(DevicePath, "all_reduce", counting)
    return found


def taken(here: Here) -> tuple[list[str], list[str], str, int, str]:
    """Return the ways of the sizes by the plan and in truth, the decision, and the same of gradient buckets."""
    device = join(here)
    group = current().group
    end_s = time.monotonic() + DECISION_S
    while "undecided" in mt.allgather_object(mt.device_path()) and time.monotonic() < end_s:
        # Until the ranks have decided, tensors are staged. Those that are always staged need no decision.
        mt.allreduce(torch.ones(ELEMENTS[-1], device=device), op="sum")
        if auto_route(task(ELEMENTS[-1]), group.topology).value == STAGED:
            break
    planned, real = list[str](), list[str]()
    for elements in ELEMENTS:
        assert group.device_plans(elements) == device_plans(task(elements), group.topology)
        planned.append(auto_route(task(elements), group.topology).value)
        with Patch.context() as patch:
            by_nccl = reductions(patch)
            total = mt.allreduce(torch.ones(elements, device=device), op="sum")
            assert total.eq(here.size).all()
            real.append(*by_nccl or [STAGED])
    with Patch.context() as patch:
        by_nccl = reductions(patch)
        model = torch.nn.Linear(256, 256, bias=False, device=device)
        optimizer = mt.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
        model(torch.ones(2, 256, device=device)).sum().backward()
        optimizer.step()
        buckets = len(by_nccl)
    return planned, real, mt.device_path(), buckets, auto_route(task(1 << 16), group.topology, 0).value


def task(elements: int) -> Task:
    return Task(collective=Collective.ALL_REDUCE, size_bytes=4 * elements)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
@pytest.mark.parametrize("case", CASES)
def test_the_plans_choice_is_taken(case: str, shape: tuple[int, int], tmp_path: Path) -> None:
    file = tmp_path / "topology.toml"
    text = text_of(Topology(((0,),), device_costs=CASES[case]))
    file.write_text(text[: text.index("[[hosts]]")])  # for any hosts
    hosts, devices = shape
    for planned, real, decision, buckets, of_buckets in run_cuda(
        taken, hosts=hosts, devices=devices, topology=str(file)
    ):
        assert real == planned
        assert planned == WAYS.get((case, shape), planned)
        assert (buckets > 0) == (of_buckets != STAGED)
        if case == "slow" and shape != (2, 1):
            assert decision == "staged: it is cheaper, by the topology's measured costs"
        if case == "fast" and shape == (1, 2):
            assert decision == "nccl"
