"""A training loop in the timeline: forward, backward, wait and optimizer events."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.plain import backward, join, loss_of, network
from tests.support.ranks import Here, run_ranks
from tests.support.sharing import kept
from torch import nn

import multiring
import multiring.torch as mt


class Slow(nn.Module):
    """A model that sleeps in its forward and backward pass; it returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, images: torch.Tensor) -> dict[str, Any]:
        time.sleep(0.01)
        inner = self.body[0](images)
        inner.register_hook(lambda _: time.sleep(0.02))
        return {"all": [self.body[1:](inner)]}


def train(here: Here, folder: str) -> None:
    join(here)
    mt.start_timeline(f"{folder}/a.json")
    with pytest.raises(ValueError, match="a timeline is on already"):
        mt.start_timeline(f"{folder}/b.json")
    mt.stop_timeline()
    mt.stop_timeline()  # as in Horovod, no error
    model = Slow()
    optimizer: Any = mt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    kept.append(optimizer)
    with pytest.raises(ValueError, match="no directory"):
        mt.start_timeline(f"{folder}/no/c.json")
    mt.start_timeline(f"{folder}/c.json", True)
    for step in range(3):
        optimizer.zero_grad()
        with multiring.trace.span("data"):
            images = torch.ones(2, 1, 4, 4, dtype=torch.float64) * step
        loss = model(images)["all"][0].square().mean()
        backward(loss)
        optimizer.step()
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 3))  # an error also closes open events
    with torch.no_grad():
        model.body(images)
    mt.stop_timeline()
    backward(loss_of(network(), here.rank))  # not in the timeline: the hooks were removed
    assert not torch.nn.modules.module._global_forward_hooks
    multiring.shutdown()
    with pytest.raises(ValueError, match="not initialised"):
        mt.start_timeline(f"{folder}/d.json")
    with pytest.raises(ValueError, match="not initialised"):
        mt.stop_timeline()


def test_a_step_in_the_timeline(tmp_path: Path) -> None:
    run_ranks(train, 2, str(tmp_path))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.json", "c.json"]
    found = json.loads((tmp_path / "c.json").read_text())
    for rank in range(2):
        program = [
            event
            for event in found["traceEvents"]
            if event["ph"] == "X" and (event["pid"], event["tid"]) == (rank, 1) and event["cat"] != "wait"
        ]
        step = ["data", "forward Slow", "backward", "optimizer SGD"]
        assert [event["name"] for event in program] == [*step * 3, "forward Slow", "forward Sequential"]
        ends = [event["ts"] + event["dur"] for event in program]
        assert all(end <= event["ts"] + 0.01 for end, event in zip(ends, program[1:], strict=False))
        assert all(event["dur"] > 1e4 for event in program if event["name"] == "forward Slow")
        backwards = [event for event in program if event["name"] == "backward"]
        assert all(event["dur"] > 2e4 for event in backwards)
        waits = [event for event in found["traceEvents"] if event.get("cat") == "wait" and event["pid"] == rank]
        operations = [
            event for event in found["traceEvents"] if event.get("cat") == "operation" and event["pid"] == rank
        ]
        buckets = [event for event in operations if event["name"] == "all_reduce"]
        assert len(buckets) == 3
        # A bucket's reduction starts after the backward pass starts, and before the optimizer's step.
        for bucket, before, after in zip(buckets, backwards, program[3::4], strict=False):
            assert before["ts"] <= bucket["ts"] <= after["ts"]
            assert any(bucket["ts"] <= wait["ts"] + wait["dur"] <= after["ts"] for wait in waits)


def read_while_it_goes_on(here: Here, folder: str) -> None:
    path = f"{folder}/{here.rank}.json"
    os.environ.update(HOROVOD_TIMELINE=path, HOROVOD_TIMELINE_MARK_CYCLES="1")
    mt.init()
    mt.allreduce(torch.tensor([1, 2, 3], dtype=torch.float32), name="test_allreduce")
    words = ("allreduce.test_allreduce", "NEGOTIATE_ALLREDUCE", "ALLREDUCE", "CYCLE_START")
    until = time.monotonic() + 240
    while here.rank == 0 and not all(word in text_of(path) for word in words):
        assert time.monotonic() < until
        time.sleep(0.01)
    mt.shutdown()


def text_of(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else ""


def test_horovods_variables_and_what_its_own_test_looks_for(tmp_path: Path) -> None:
    run_ranks(read_while_it_goes_on, 2, str(tmp_path))
    assert [each.name for each in tmp_path.iterdir()] == ["0.json"]
    events = json.loads((tmp_path / "0.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}


def train_twice_at_once(here: Here, folder: str) -> list[str]:
    join(here)
    multiring.start_timeline(f"{folder}/trace.json")
    model = network()
    outputs = [model(torch.ones(1, 1, 4, 4, dtype=torch.float64)) for _ in range(2)]
    backward(outputs[0].sum() + outputs[1].sum())  # one backward pass of two forward passes
    failing = model(torch.ones(1, 1, 4, 4, dtype=torch.float64))
    failing.register_hook(raise_an_error)
    with pytest.raises(ZeroDivisionError):
        backward(failing.sum())
    backward(model(torch.ones(1, 1, 4, 4, dtype=torch.float64)).sum())
    compiled: Any = torch.compile(model, backend="eager")
    backward(compiled(torch.ones(1, 1, 4, 4, dtype=torch.float64)).sum())
    multiring.stop_timeline()
    events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    return [event["name"] for event in events if event["ph"] == "X" and event["tid"] == 1]


def raise_an_error(_gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


def test_backwards_are_told_apart(tmp_path: Path) -> None:
    (names,) = run_ranks(train_twice_at_once, 1, str(tmp_path))
    forward = "forward Sequential"
    assert names == [forward, forward, "backward", forward, forward, "backward", "forward OptimizedModule", "backward"]
