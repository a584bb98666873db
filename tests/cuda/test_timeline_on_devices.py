"""Events, timelines and warnings about CUDA tensors: each operation of the program once, by whichever way it goes."""

import json
import logging
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cuda.test_nccl_buckets import optimizer_of
from tests.cuda.test_nccl_collectives import enter_nccl
from tests.support.cuda_torch_ranks import run_cuda
from tests.support.device_training import mean_loss, model_of, own_batch
from tests.support.ranks import Here

import multiring
import multiring.torch as mt
from multiring.torch.collectives import by_nccl
from multiring.torch.path_agreement import settle_reductions

ELEMENTS, STEPS = 1 << 15, 3


def mixed(here: Here, folder: str, path: str) -> tuple[list[int], list[int]]:
    """Return the sizes of the all-reduces of a program and of its buckets, from events; leave a timeline."""
    device = enter(here, path)
    tensor = torch.ones(ELEMENTS, device=device)
    mt.allreduce(tensor, name="before")
    settle_reductions()  # NCCL's event comes when the ranks have agreed, which `allreduce` does not wait for
    multiring.drain_events()
    mt.start_timeline(f"{folder}/{path}.json")
    mt.allreduce(tensor, name="large")
    mt.synchronize(mt.allreduce_async_(tensor, name="async"))
    mt.grouped_allreduce([tensor, tensor[:7]], name="several")
    by_nccl.LEAST_BYTES = 64 << 10
    mt.allreduce(tensor[:5], name="small")
    mt.stop_timeline()
    own = sizes()
    model = model_of("perceptron", device)
    optimizer = optimizer_of(model)
    found = []
    for step in range(STEPS + 2):  # the first steps compare the ranks
        multiring.drain_events()
        optimizer.zero_grad()
        mean_loss(model, own_batch(here, step, "perceptron", device)).backward()
        optimizer.step()
        found.append(sizes())
    assert all(each == found[-1] for each in found[2:])
    return own, found[-1]


def enter(here: Here, path: str) -> torch.device:
    if path == "nccl":
        return enter_nccl(here)
    os.environ["MULTIRING_DEVICE_PATH"] = path
    mt.init()
    return torch.device("cuda", torch.cuda.current_device())


def sizes() -> list[int]:
    return [
        each.size_bytes
        for each in multiring.drain_events()
        if each.kind == "operation" and each.name == "all_reduce" and each.size_bytes
    ]


def operations_in(file: Path, rank: int) -> list[dict[str, Any]]:
    events = json.loads(file.read_text())["traceEvents"]
    return [each for each in events if each.get("cat") == "operation" and each["pid"] == rank]


def test_each_operation_is_shown_once(tmp_path: Path) -> None:
    ways = {path: run_cuda(mixed, str(tmp_path), path, devices=2) for path in ("staged", "nccl")}
    own = [4 * ELEMENTS, 4 * ELEMENTS, 4 * (ELEMENTS + 7), 4 * 5]
    for path, found in ways.items():
        for rank, (of_program, of_buckets) in enumerate(found):
            assert of_program == pytest.approx(own, abs=64), path  # a fused buffer has gaps
            assert len(of_buckets) == len(ways["staged"][0][1]) > 1, path
            shown = operations_in(tmp_path / f"{path}.json", rank)
            assert Counter(each["name"] for each in shown)["all_reduce"] == len(own), path
            for name, each in zip(
                ("large", "async", "several", "small"),
                [each for each in shown if each["name"] == "all_reduce"],
                strict=True,
            ):
                told = each["args"]
                assert f"allreduce.{name}" in told["title"], told
                by = "nccl" if path == "nccl" and name != "small" else None
                assert told.get("engine") == by
                assert ("algbw GB/s" in told) == (by is None), told
    agreements = [each for each in operations_in(tmp_path / "nccl.json", 0) if each["name"] == "agreement"]
    assert agreements
    assert all(each["args"]["bytes"] < 100 for each in agreements)
    assert not [each for each in operations_in(tmp_path / "staged.json", 0) if each["name"] == "agreement"]


class Warnings(logging.Handler):
    """Collects the warnings of multiring."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []
        logging.getLogger("multiring").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def late(here: Here, path: str) -> list[list[str]]:
    """Return the warnings while the last rank is late: for a named operation, and for a bucket."""
    os.environ["MULTIRING_STALL_WARN_S"] = "1"
    device, warnings, found = enter(here, path), Warnings(), []
    model = model_of("perceptron", device)
    optimizer = mt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(STEPS + 2):
        is_last = step == STEPS + 1
        optimizer.zero_grad()
        loss = mean_loss(model, own_batch(here, step, "perceptron", device))
        mt.barrier()
        warnings.told.clear()
        time.sleep(3.0 if here.rank and is_last else 0.0)
        loss.backward()
        optimizer.step()
    found.append(list(warnings.told))
    mt.barrier()
    warnings.told.clear()
    time.sleep(3.0 if here.rank else 0.0)
    mt.allreduce(torch.ones(ELEMENTS, device=device), name="late")
    return [*found, list(warnings.told)]


@pytest.mark.parametrize("path", ["staged", "nccl"])
def test_a_late_rank_is_reported_once(path: str) -> None:
    of_bucket, of_operation = run_cuda(late, path, devices=2)[0]
    assert [text.partition(" ")[0] for text in of_bucket] == ["all_reduce"], of_bucket
    assert len(of_operation) == 1, of_operation
    assert "'allreduce.late'" in of_operation[0]
    assert all("nothing has come from rank 1" in text for text in of_bucket + of_operation)
