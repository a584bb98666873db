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
from tests.standin.torch_devices import host_waits
from tests.support.cuda_torch_ranks import run_cuda
from tests.support.device_training import join, mean_loss, model_of, own_batch
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


def operations_in(file: Path, rank: int, kind: str = "operation") -> list[dict[str, Any]]:
    events = json.loads(file.read_text())["traceEvents"]
    return [each for each in events if each.get("cat") == kind and each["pid"] == rank]


def train(here: Here, file: str) -> int:
    """Return how often steps wait for the device while a timeline is recorded, after the first ones."""
    device = join(here)
    model = model_of("perceptron", device)
    optimizer, waits = optimizer_of(model), 0
    mt.start_timeline(file)
    for step in range(STEPS + 2):
        inputs = own_batch(here, step, "perceptron", device)
        torch.cuda.synchronize()
        before = host_waits()
        optimizer.zero_grad()
        mean_loss(model, inputs).backward()
        optimizer.step()
        waits += (host_waits() - before) if step > 1 else 0
    mt.stop_timeline()
    return waits


@pytest.mark.parametrize(("hosts", "names"), [(1, {"all_reduce"}), ((2, 1), {"reduce_scatter", "all_gather"})])
def test_the_device_tells_when_it_reduced_buckets(tmp_path: Path, hosts: Any, names: set[str]) -> None:
    file = tmp_path / "trace.json"
    waits = run_cuda(train, str(file), hosts=hosts)
    assert waits == [0] * len(waits)
    for rank in range(len(waits)):
        found = operations_in(file, rank, "device")
        assert {each["name"] for each in found} == names
        backwards = [(each["ts"], each["ts"] + each["dur"]) for each in operations_in(file, rank, "backward")]
        assert len(found) % (len(backwards) * len(names)) == 0
        assert len(found) > len(backwards) * len(names)  # several buckets
        assert all(each["args"]["title"] for each in found)
        assert min(each["ts"] for each in found) > backwards[0][0]


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
            on_device = [each["args"]["title"] for each in operations_in(tmp_path / f"{path}.json", rank, "device")]
            names = ("large", "async", "several") if path == "nccl" else ()
            assert len(on_device) == len(names)
            assert all(f"allreduce.{name}" in text for name, text in zip(names, on_device, strict=True)), on_device
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
