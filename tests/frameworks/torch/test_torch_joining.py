"""Optimizers beside joined ranks, which contribute nothing until all have joined."""

from typing import Any

import torch
from tests.support.plain import backward, join, loss_of, network
from tests.support.ranks import Here, run_ranks
from tests.support.sharing import expect, expect_same_parameters, sgd
from torch import Tensor, nn

import multiring.torch as mt


def test_ranks_that_have_joined() -> None:
    run_ranks(join_early, 3)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 2, sparse=True)
        self.last = nn.Linear(2, 1)
        nn.init.ones_(self.rows.weight)

    def forward(self, words: list[int]) -> Tensor:
        found: Tensor = self.last(self.rows(torch.tensor(words))).sum()
        return found


def join_early(here: Here) -> None:
    """Rank r has r + 1 steps; the average still divides by all ranks."""
    join(here)
    model, table = network(), Table()
    optimizers = sgd(model), sgd(table)
    delta = network()
    combined: Any = torch.optim.SGD(delta.parameters(), lr=0.1)
    mt.DistributedOptimizer(combined, op=mt.Adasum)
    for step in range(here.rank + 1):
        backward(loss_of(model, here.rank + 10 * step))
        expect(model, [rank + 10 * step for rank in range(step, 3)], scale=(3 - step) / 3)
        backward(table([here.rank, 7]))
        found = table.rows.weight.grad
        assert found is not None
        assert found.is_sparse
        share = (3 - step) / 3 * table.last.weight.detach()[0]
        assert torch.allclose(found.to_dense()[7], share)
        assert torch.allclose(found.to_dense()[2], table.last.weight.detach()[0] / 3)
        backward(loss_of(delta, here.rank))
        combined.step()
        combined.zero_grad()
        for optimizer in optimizers:
            optimizer.synchronize()
            optimizer.zero_grad()
    last = torch.tensor(mt.join())
    assert mt.allreduce(last, op=mt.Min) == mt.allreduce(last, op=mt.Max)
    # Afterwards all ranks continue.
    for each, optimizer in zip((model, table), optimizers, strict=True):
        optimizer.zero_grad()
        backward(loss_of(each, here.rank) if each is model else each([1]))
    expect(model, [0, 1, 2])
    backward(loss_of(delta, 1))
    mt.broadcast_parameters(delta.state_dict(), root_rank=2)
    combined.step()
    expect_same_parameters(delta)
    join_before_a_first_step(here)


def join_before_a_first_step(here: Here) -> None:
    """Rank 0 has no step. The other ranks learn that a gradient is sparse, and compare their first steps."""
    table = Table()
    mt.broadcast_parameters(table.state_dict(), root_rank=0)
    optimizer = sgd(table)
    for _ in range(2 if here.rank else 0):
        optimizer.zero_grad()
        backward(table([here.rank]))
        optimizer.step()
    assert mt.join() in (1, 2)
    assert here.rank == 0 or table.rows.weight[2].tolist() != [1.0, 1.0]
