"""Ranks that wait for each other in calls with CUDA tensors: an error with both lines, long before a time-out."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from tests.cuda.test_backend import join as join_torch
from tests.support.cuda_torch_ranks import run_cuda
from tests.support.device_training import join, mean_loss, model_of, own_batch
from tests.support.ranks import Here

import multiring.torch as mt
from multiring.errors import StallError

dist: Any = torch.distributed  # typed Any, because torch's stubs are incomplete
ELEMENTS = 1 << 15  # for the path by NCCL


def train(here: Here, model: torch.nn.Module, optimizer: Any, device: torch.device) -> None:
    optimizer.zero_grad()
    mean_loss(model, own_batch(here, 0, "perceptron", device)).backward()
    optimizer.step()


def log_alone(device: torch.device) -> None:
    mt.allreduce(torch.ones(ELEMENTS, device=device))


def log_and_train(here: Here, model: torch.nn.Module, optimizer: Any, device: torch.device) -> None:
    if here.rank == 0:
        log_alone(device)
    train(here, model, optimizer, device)


def stand(here: Here) -> tuple[str, str]:
    """Train, call an operation on one rank only, and return the path and the error."""
    device = join(here, stall_warn_s=3.0)
    model = model_of("perceptron", device)
    optimizer = mt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for _ in range(3):
        log_alone(device)
        train(here, model, optimizer, device)
    with pytest.raises(StallError) as raised:
        log_and_train(here, model, optimizer, device)
    time.sleep(1)  # other ranks may fail a moment later
    return mt.device_path().partition(":")[0], str(raised.value)


@pytest.mark.parametrize(("path", "hosts"), [("hierarchical", (2, 1)), ("nccl", 1)])
def test_an_allreduce_of_one_rank_beside_gradients(path: str, hosts: Any) -> None:
    told = run_cuda(stand, hosts=hosts)
    for found, text in told:
        assert found == path
        assert "rank 0 is at test_standoffs_on_devices.py" in text, text
        assert "in log_alone (mt.allreduce(torch.ones(ELEMENTS, device=device)))" in text, text
    # A rank outside of the circle gets its error from another rank; that error shows only rank 0's call.
    assert any("a circle, in which each rank waits" in text and "in train (" in text for _, text in told), told


def receive_beside_a_collective(here: Here, place: str) -> str:
    join(here, stall_warn_s=3.0)
    device = join_torch(here, place, timeout_s=300.0)  # a wait of less than a minute may end by itself
    tensor = torch.ones(4, device=device)
    dist.all_reduce(tensor)
    with pytest.raises(dist.DistBackendError) as raised:
        dist.recv(tensor, 1) if here.rank == 0 else dist.all_reduce(tensor)
    return str(raised.value)


def test_a_receive_that_faces_a_collective(tmp_path: Path) -> None:
    for text in run_cuda(receive_beside_a_collective, str(tmp_path / "meeting")):
        assert "a circle, in which each rank waits" in text, text
        for rank in range(2):
            assert f"rank {rank} is at test_standoffs_on_devices.py" in text, text
