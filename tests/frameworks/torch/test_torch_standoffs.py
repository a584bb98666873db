"""One rank calls an operation while the others train: the error shows both calls.

The error names the program's lines.
"""

import threading
import time

import pytest
import torch
from tests.support.ranks import Here, run_ranks
from torch import Tensor, nn

import multiring.torch as mt
from multiring.errors import StallError

LINES = ("in log_alone (mt.allreduce(loss.detach()))", "in train (loss.backward()")


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_allreduce_of_one_rank_beside_gradients(ranks: int) -> None:
    for rank, text in enumerate(run_ranks(log_on_one_rank, ranks)):
        assert text.startswith("StallError"), text
        assert "_tensor.py" not in text
        assert "rank 0 is at test_torch_standoffs.py" in text
        assert LINES[0] in text
        # With three ranks, a rank may get its error from another rank; that error shows only rank 0's call.
        assert LINES[1] in text or (ranks == 3 and rank > 0), text


def log_on_one_rank(here: Here) -> str:
    here.join(stall_warn_s=3.0)
    torch.set_num_threads(1)
    model = nn.Linear(4, 2)
    optimizer = mt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    train(model, optimizer)
    with pytest.raises(StallError) as raised:
        log_and_train(here.rank, model, optimizer)
    time.sleep(1)  # other ranks may fail a moment later
    return f"{type(raised.value).__name__}: {raised.value}"


def log_and_train(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = train(model, optimizer)
    if rank == 0:
        log_alone(loss)
    train(model, optimizer)


def log_alone(loss: Tensor) -> None:
    mt.allreduce(loss.detach())


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = model(torch.ones(3, 4)).square().mean()
    loss.backward()  # type: ignore[no-untyped-call] # torch has no type for it
    optimizer.step()
    return loss


def test_a_second_thread_may_make_the_call() -> None:
    assert run_ranks(log_from_a_thread, 2) == [3.0, 3.0]


def log_from_a_thread(here: Here) -> float:
    here.join(stall_warn_s=3.0)
    torch.set_num_threads(1)
    model = nn.Linear(4, 2)
    optimizer = mt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    found: list[Tensor] = []

    def log() -> None:
        if here.rank:
            time.sleep(2.0)
        found.append(mt.allreduce(torch.full((1,), 1.0 + here.rank), op="sum"))

    train(model, optimizer)
    thread = threading.Thread(target=log)
    if here.rank == 0:
        log()
    else:
        thread.start()
    train(model, optimizer)
    if here.rank:
        thread.join()
    return float(found[0])
