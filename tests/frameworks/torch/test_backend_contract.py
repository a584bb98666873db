"""Process groups called directly: several tensors per rank, errors, options."""

import itertools
import time
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.grouped_ranks import dist, enter, expect
from tests.support.ranks import Here, run_ranks
from torch._C._distributed_c10d import Backend
from torch.distributed import DistBackendError, ReduceOp

SOON_S = 60.0  # several times the time to report an error; time-outs are PATIENCE


def test_several_tensors_a_rank(tmp_path: Path) -> None:
    run_ranks(use_several, 3, str(tmp_path))


def use_several(here: Here, place: str) -> None:
    """Results equal those of Gloo for the same calls."""
    ours = enter(here, f"{place}/ours")
    store = dist.FileStore(f"{place}/gloo", here.size)
    theirs = dist.ProcessGroupGloo(store, here.rank, here.size, timedelta(seconds=40))
    for sizes in ((2, 5), (3, 5), (2, 30_000)):
        for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR):
            expect_both(ours, theirs, reduced, here, sizes, op)
        for at in itertools.product(range(here.size), range(sizes[0])):
            expect_both(ours, theirs, sent, here, sizes, at)
        expect_both(ours, theirs, gathered, here, sizes)
    means = numbered(here.rank, (2, 5), torch.float32)
    ours.allreduce(means, op=ReduceOp.AVG).wait()
    everything = [each for rank in range(here.size) for each in numbered(rank, (2, 5), torch.float32)]
    assert all(torch.allclose(each, torch.stack(everything).mean(0)) for each in means)
    dist.destroy_process_group()


def expect_both(ours: Any, theirs: Any, call: Any, *arguments: Any) -> None:
    for one, other in zip(call(ours, *arguments), call(theirs, *arguments), strict=True):
        expect(one, other)


def numbered(rank: int, sizes: tuple[int, int], dtype: torch.dtype = torch.int64) -> list[torch.Tensor]:
    tensors, count = sizes
    return [torch.arange(count).remainder(7).add(1 + rank + 10 * number).to(dtype) for number in range(tensors)]


def reduced(group: Any, here: Here, sizes: tuple[int, int], op: Any) -> list[torch.Tensor]:
    tensors, options = numbered(here.rank, sizes), dist.AllreduceOptions()
    options.reduceOp = op
    group.allreduce(tensors, options).wait()
    return tensors


def sent(group: Any, here: Here, sizes: tuple[int, int], at: tuple[int, int]) -> list[torch.Tensor]:
    tensors, options = numbered(here.rank, sizes), dist.BroadcastOptions()
    options.rootRank, options.rootTensor = at
    group.broadcast(tensors, options).wait()
    return tensors


def gathered(group: Any, here: Here, sizes: tuple[int, int]) -> list[torch.Tensor]:
    tensors, count = sizes
    lists = [[torch.zeros(count, dtype=torch.int64) for _ in range(tensors * here.size)] for _ in range(tensors)]
    group.allgather(lists, numbered(here.rank, sizes)).wait()
    return reduce(lambda one, other: one + other, lists)


def test_what_one_rank_refuses_ends_on_the_others_as_its_mistake(tmp_path: Path) -> None:
    run_ranks(refuse, 3, str(tmp_path / "store"))


def refuse(here: Here, place: str) -> None:
    """Each call is wrong on rank 1 only; all ranks stay in step afterwards."""
    group = enter(here, place)
    one, ranks = torch.ones(6), here.size
    wrong: list[tuple[Any, Any, str]] = [
        (lambda: group.allreduce([one.to(torch.float8_e5m2)]), lambda: group.allreduce([one]), "has no meaning"),
        (lambda: group.allreduce([one, one[:3]]), lambda: group.allreduce([one, one]), "invalid tensor size"),
        (lambda: group.broadcast([one], ranks), lambda: group.broadcast([one], 0), "invalid root rank 3"),
        (
            lambda: group.allgather([[one] * 2], [one]),
            lambda: group.allgather([[torch.ones(6) for _ in range(ranks)]], [one]),
            "got a list of 2 tensors",
        ),
        (
            lambda: group.reduce_scatter_single(one[:1], one),
            lambda: group.reduce_scatter_single(torch.ones(2), one),
            "3 times as many",
        ),
        (
            lambda: group.allreduce_coalesced([one.clone(), one.to_sparse()]),
            lambda: group.allreduce_coalesced([one.clone(), one.clone()]),
            "is sparse",
        ),
        (
            lambda: group.alltoall_base(one, one, [1, 2, 4], []),
            lambda: group.alltoall_base(one.clone(), one, [], []),
            "split sizes",
        ),
        (lambda: group.reduce([one, one], 0), lambda: group.reduce([one], 0), "got 2 tensors"),
        (lambda: group.allreduce([one.to("meta")]), lambda: group.allreduce([one]), "No backend type"),
    ]
    for bad, good, text in wrong:
        one.fill_(1)
        start = time.monotonic()
        if here.rank == 1:
            with pytest.raises(RuntimeError, match=text):
                bad().wait()  # tensors of devices are checked after the call
        else:
            with pytest.raises(DistBackendError, match=rf"rank 1: .*{text}"):
                good().wait()
        assert time.monotonic() - start < SOON_S
        number = torch.ones(3)
        group.allreduce([number]).wait()
        expect(number, torch.full((3,), 3.0))
    dist.destroy_process_group()


def test_numbers_options_and_splitting(tmp_path: Path) -> None:
    run_ranks(tell, 2, str(tmp_path / "store"))


def tell(here: Here, place: str) -> None:
    patience = timedelta(seconds=21)
    group = enter(here, place)
    number = torch.ones(1)
    assert group._get_sequence_number_for_group() == 0
    for turn in range(1, 5):
        dist.all_reduce(number)
        assert group._get_sequence_number_for_group() == turn
    other = dist.new_group([0, 1], pg_options=Backend.Options("multiring", patience))
    assert other.options._timeout == patience
    assert other._get_sequence_number_for_group() == 0
    backend: Any = group._get_backend(torch.device("cpu"))
    assert backend.supports_splitting
    options = backend.options
    assert options.backend == "multiring"
    assert options.global_ranks_in_group == [0, 1]
    options._timeout = patience
    part = group.split_group([0, 1], opts=options)
    assert part.options._timeout == patience
    part.allreduce([number]).wait()
    with pytest.raises(ValueError, match="takes no options but"):
        group.split_group([0, 1], opts=3)
    with pytest.raises(DistBackendError, match="barrier"):
        dist.barrier() if here.rank else dist.broadcast(number, 0)
    dist.destroy_process_group()
