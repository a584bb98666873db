"""A rank dies while buckets of devices are reduced: the other ranks get an error with its name, and can continue."""

import os
import signal
import time
from typing import Any

import pytest
import torch
from tests.support.cuda_torch_ranks import report_of_cuda
from tests.support.device_training import join, mean_loss, model_of, own_batch
from tests.support.ranks import Here

import multiring.torch as mt
from multiring.errors import CollectiveError

SOON_S = 20  # far below the time-out of a stall, with a loaded machine


def dying(here: Here, phase: str) -> bool:
    device = join(here)
    model: Any = model_of("perceptron", device)
    optimizer = mt.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        bucket_bytes=600,
        op=mt.Adasum if phase == "adasum" else mt.Average,
        compression=mt.PowerSGD(rank=1) if phase == "powersgd" else mt.Compression.none,
    )
    lag = mt.gradient_lag(optimizer) if phase == "lag" else None
    start_s = time.monotonic()
    with pytest.raises(CollectiveError, match="rank 1"):  # noqa: PT012 -- in which step is not known
        for step in range(6):
            if step == 3 and here.rank == 1:
                if phase == "backward":
                    model[0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
                elif phase == "after":
                    mean_loss(model, own_batch(here, step, "perceptron", device)).backward()
                os.kill(os.getpid(), 0 if phase == "backward" else signal.SIGKILL)
            start_s = time.monotonic()
            mean_loss(model, own_batch(here, step, "perceptron", device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if lag is not None:
            lag.flush()
    assert time.monotonic() - start_s < SOON_S
    total = torch.ones(3, device=device).sum()
    return float(total) == 3


@pytest.mark.parametrize("phase", ["before", "backward", "after", "lag", "adasum", "powersgd"])
def test_a_rank_dies(phase: str) -> None:
    report = report_of_cuda(dying, phase, devices=2)
    assert report.outcomes[0].value is True, report.outcomes[0]
    assert report.outcomes[1].exit_code == -signal.SIGKILL
