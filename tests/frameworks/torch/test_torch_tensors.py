"""Odd tensors and odd moments: results are right, or an error names the cause."""

import sys
import warnings
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.support.plain import backward, enter
from tests.support.ranks import Here, run_ranks
from torch import Tensor, nn
from torch._dynamo import compiled_autograd

import multiring
import multiring.torch as mt
from multiring.errors import UnsupportedError
from multiring.torch.interop import overlaps_itself

LARGE = 2**62 + 12_345
WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def test_what_overlaps_itself_is_found() -> None:
    x = torch.arange(24.0).view(2, 3, 4)
    for whole in (x, x.permute(2, 0, 1), x[:, ::2, 1:3], x[1:], x[..., 0], torch.empty(0, 3).expand(0, 3), x[:0]):
        assert not overlaps_itself(whole)
    assert not overlaps_itself(torch.arange(12.0).as_strided((2, 3), (3, 2)))  # interleaved strides
    for shared in (
        x[:1].expand(3, 3, 4),
        x.view(-1).unfold(0, 4, 2),
        torch.ones(1).expand(5),
        torch.ones(()).expand(2),
    ):
        assert overlaps_itself(shared)


def average_whole_numbers(here: Here) -> None:
    """Average integers whose sums need more bits; averages are truncated."""
    group = multiring.init()
    for name in ("int8", "int32", "int64", "uint32", "uint64"):
        limits = np.iinfo(name)
        own = np.array([limits.max, limits.max - here.rank, limits.min, 2 * here.rank + 1], name)
        every = [[limits.max, limits.max - rank, limits.min, 2 * rank + 1] for rank in range(here.size)]
        sums = [sum(map(int, column)) for column in zip(*every, strict=True)]
        wanted = [abs(each) // here.size * (1 if each >= 0 else -1) for each in sums]
        group.all_reduce(own, "average")
        assert own.tolist() == wanted, f"{name}: {own} instead of {wanted}"


@pytest.mark.parametrize(("engine", "ranks"), [("shm", 3), ("shm+tcp", 4)])
def test_averages_of_whole_numbers_are_exact(engine: str, ranks: int) -> None:
    run_ranks(average_whole_numbers, ranks, engine=engine)


def sum_sparse_ones(here: Here) -> None:
    for dtype in WHOLE:
        most = min(LARGE, torch.iinfo(dtype).max)
        own = torch.tensor([0, most, most - 1]).to(dtype).to_sparse()
        if own.is_cuda:
            with pytest.raises(ValueError, match="is sparse; want a dense tensor"):
                dist.all_reduce(own)
            return
        dist.all_reduce(own, dist.ReduceOp.AVG)
        assert own.to_dense().tolist() == [0, most, most - 1], dtype
    values = torch.tensor([[1 + 2j, 0], [3j, 4]]) * (here.rank + 1)
    for op, scale in (dist.ReduceOp.SUM, 3.0), (dist.ReduceOp.AVG, 1.5):
        own = values.to_sparse()
        dist.all_reduce(own, op)
        assert torch.equal(own.to_dense(), values / (here.rank + 1) * scale), op


def lie_over_themselves(_here: Here) -> None:
    windows = torch.arange(6.0).as_strided((4, 2), (1, 1))
    with pytest.raises(ValueError, match="at one memory address"):
        dist.all_reduce(windows)
    with pytest.raises(ValueError, match="at one memory address"):
        dist.all_gather([windows, windows], torch.ones(4, 2))
    assert torch.equal(windows.as_strided((6,), (1,)), torch.arange(6.0))


def combine_negated_ones(here: Here) -> None:
    own = [torch.complex(torch.ones(3), torch.arange(3.0) + here.rank).conj().imag for _ in range(2)]
    assert own[0].is_neg()
    mt.grouped_allreduce_(own, op=mt.Sum)
    assert all(torch.equal(each, -(2 * torch.arange(3.0) + 1)) for each in own)


def step_with_what_is_frozen(here: Here) -> None:
    """A frozen layer's old gradient does not block an added parameter group."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = mt.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    rows = torch.ones(1, 2) * (here.rank + 1)
    backward(model(rows).sum())
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    model[0].requires_grad_(False)
    more = nn.Linear(2, 2)
    optimizer.add_param_group({"params": list(more.parameters())})
    backward(more(model(rows)).sum())
    optimizer.step()
    sums = mt.allgather(torch.stack([each.detach().sum() for each in (*model.parameters(), *more.parameters())])[None])
    assert torch.equal(sums[0], sums[1])


def compile_backward(_here: Here) -> None:
    model = nn.Linear(2, 1)
    optimizer = mt.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())

    def run(x: Tensor) -> None:
        with compiled_autograd._enable(torch.compile(backend="eager")):
            backward(model(x).sum())

    with pytest.raises(UnsupportedError, match="compiled autograd makes one function of the whole backward"):
        run(torch.ones(1, 2))
    optimizer.zero_grad()
    backward(model(torch.ones(1, 2)).sum())
    optimizer.step()


def try_odd_ones(here: Here, place: str) -> None:
    enter()
    sys.modules["ignite.distributed"] = ModuleType("ignite.distributed")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dist.init_process_group("multiring", init_method=f"file://{place}", rank=here.rank, world_size=here.size)
    assert [str(each.message).count("idist.auto_model") for each in told] == [1] * (here.rank == 0)
    sum_sparse_ones(here)
    lie_over_themselves(here)
    combine_negated_ones(here)
    step_with_what_is_frozen(here)
    warnings.simplefilter("ignore")  # the compiler's warnings
    compile_backward(here)
    dist.destroy_process_group()


def test_odd_tensors_and_moments(tmp_path_factory: pytest.TempPathFactory) -> None:
    run_ranks(try_odd_ones, 2, str(tmp_path_factory.mktemp("store") / "store"))
