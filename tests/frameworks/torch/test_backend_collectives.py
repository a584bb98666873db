"""Every collective, form and type of backend "multiring", against torch's results."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.grouped_ranks import dist, enter, expect, functional
from tests.support.ranks import Here, run_ranks
from torch import Tensor
from torch.distributed import ReduceOp

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
MOVED = (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2)
COUNT = 7
Combine = Callable[[Tensor], Tensor]


@pytest.mark.parametrize(("ranks", "engine"), [(2, "shm"), (3, "tcp"), (4, "shm+tcp")])
def test_collectives(ranks: int, engine: str, tmp_path: Path) -> None:
    run_ranks(use_all, ranks, str(tmp_path / "store"), engine=engine)


def use_all(here: Here, place: str) -> None:
    if here.engine == "shm+tcp":
        here.join()  # torch's group then uses this job
    enter(here, place)
    for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64):
        for op, combine in reductions_of(dtype, here.size):
            reduce_all(here, dtype, op, combine)
    for dtype in MOVED:
        move_all(here, dtype)
    differ_in_size(here)
    sum_sparse_ones(here)
    lie_anyhow(here)
    coalesce(here)
    call_functional_ones(here)
    call_by_other_spellings(here)
    dist.destroy_process_group()


def reductions_of(dtype: torch.dtype, ranks: int) -> list[tuple[Any, Combine]]:
    """Return the reductions that `dtype` supports, each with a reference function.

    The function computes the expected result from the stacked contributions of the ranks.
    """

    def average(each: Tensor) -> Tensor:
        wide = each.sum(0, dtype=torch.complex128 if dtype.is_complex else torch.float64) / ranks
        return (wide if dtype.is_floating_point or dtype.is_complex else wide.trunc()).to(dtype)

    found: list[tuple[Any, Combine]] = [(ReduceOp.SUM, lambda each: each.sum(0).to(dtype))]
    if dtype is not torch.bool:
        found.append((ReduceOp.AVG, average))
    if not dtype.is_complex:
        found += [
            (ReduceOp.MIN, lambda each: each.min(0).values),
            (ReduceOp.MAX, lambda each: each.max(0).values),
            (ReduceOp.PRODUCT, lambda each: each.prod(0).to(dtype)),
        ]
    if dtype.is_floating_point or dtype.is_complex:
        premultiplied = dist._make_nccl_premul_sum(0.5)
        found.append((premultiplied, lambda each: (each * 0.5).sum(0).to(dtype)))
    else:
        found += [
            (ReduceOp.BAND, functools.partial(fold, torch.bitwise_and)),
            (ReduceOp.BOR, functools.partial(fold, torch.bitwise_or)),
            (ReduceOp.BXOR, functools.partial(fold, torch.bitwise_xor)),
        ]
    return found


def fold(combine: Callable[[Tensor, Tensor], Tensor], each: Tensor) -> Tensor:
    return functools.reduce(combine, each.unbind())


def brought(rank: int, dtype: torch.dtype, part: int = 0) -> Tensor:
    """Return the contribution of `rank`: small integers.

    Every order of summation gives the same sum of them.
    """
    numbers = torch.arange(COUNT) % 4 + (rank + part) % 3
    return (numbers % 2 if dtype is torch.bool else numbers).to(dtype)


def reduce_all(here: Here, dtype: torch.dtype, op: Any, combine: Combine) -> None:
    """Reduce with every form of call."""
    ranks = range(here.size)
    mine = brought(here.rank, dtype)
    wanted = combine(torch.stack([brought(rank, dtype) for rank in ranks]))
    tensor = mine.clone()
    dist.all_reduce(tensor, op)
    expect(tensor, wanted)
    tensor = mine.clone()
    work = dist.all_reduce(tensor, op, async_op=True)
    assert work is not None
    work.wait()
    expect(tensor, wanted)
    tensor = mine.clone()
    dist.reduce(tensor, 1, op)
    expect(tensor, wanted if here.rank == 1 else mine)
    parts = [brought(here.rank, dtype, part) for part in ranks]
    wanted = combine(torch.stack([brought(rank, dtype, here.rank) for rank in ranks]))
    for single in (False, True):
        output = torch.empty(COUNT, dtype=dtype)
        if single:
            dist.reduce_scatter_single(output, torch.cat(parts), op)
        else:
            dist.reduce_scatter(output, parts, op)
        expect(output, wanted)


def move_all(here: Here, dtype: torch.dtype) -> None:
    """Move tensors with every form of call, also tensors that need the arena."""
    ranks = range(here.size)
    for repeats in (1, 9000):

        def make(*of_ranks: int, repeats: int = repeats) -> Tensor:
            return torch.cat([brought(rank, torch.float32).repeat(repeats) for rank in of_ranks]).to(dtype)

        everyone = make(*ranks)
        outputs = [torch.empty(COUNT * repeats, dtype=dtype) for _ in ranks]
        dist.all_gather(outputs, make(here.rank))
        for rank in ranks:
            expect(outputs[rank], make(rank))
        output = torch.empty(COUNT * repeats * here.size, dtype=dtype)
        dist.all_gather(list(output.chunk(here.size)), make(here.rank))
        expect(output, everyone)
        output = torch.empty_like(output)
        dist.all_gather_single(output, make(here.rank))
        expect(output, everyone)
        tensor = make(here.rank)
        dist.broadcast(tensor, 1)
        expect(tensor, make(1))
        output = torch.empty_like(output)
        dist.all_to_all_single(output, make(*[here.rank] * here.size))
        expect(output, everyone)


def differ_in_size(here: Here) -> None:
    """Use different sizes on each rank, wherever torch allows it."""
    ranks, own = range(here.size), here.rank
    outputs = [torch.empty(rank, 2) for rank in ranks]
    dist.all_gather(outputs, torch.full((own, 2), float(own)))
    for rank in ranks:
        expect(outputs[rank], torch.full((rank, 2), float(rank)))
    output = torch.empty(own + 1)
    dist.reduce_scatter(output, [torch.full((rank + 1,), float(own)) for rank in ranks])
    expect(output, torch.full((own + 1,), float(sum(ranks))))
    sent, received = [own * rank for rank in ranks], [rank * own for rank in ranks]
    source = torch.cat([torch.full((rows, 2), own + 10.0 * rank) for rank, rows in enumerate(sent)])
    for waits in (True, False):
        place = torch.empty(sum(received), 2)
        work = dist.all_to_all_single(place, source, received, sent, async_op=not waits)
        if work is not None:
            work.wait()
        expect(place, torch.cat([torch.full((rows, 2), rank + 10.0 * own) for rank, rows in enumerate(received)]))
    targets = [torch.empty(rank + own) for rank in ranks]
    dist.all_to_all(targets, [torch.full((rank + own,), own + 10.0 * rank) for rank in ranks])
    for rank in ranks:
        expect(targets[rank], torch.full((rank + own,), rank + 10.0 * own))


def sum_sparse_ones(here: Here) -> None:
    """Sum sparse tensors with different entries on each rank.

    Rank 0's tensor has no entries; the other ranks' tensors have rows twice.
    """

    def rows_of(rank: int) -> Tensor:
        places = torch.arange(rank).repeat(2)
        return torch.sparse_coo_tensor(
            places[None], torch.ones(2 * rank, 3) * rank, (here.size, 3), check_invariants=False
        )

    if rows_of(1).is_cuda:
        with pytest.raises(ValueError, match=r"is sparse; want a dense tensor, or \.cpu\(\)"):
            dist.all_reduce(rows_of(here.rank))
        return
    wanted = sum((rows_of(rank).to_dense() for rank in range(here.size)), torch.zeros(here.size, 3))
    for op, scale in (ReduceOp.SUM, 1), (ReduceOp.AVG, here.size):
        for waits in (True, False):
            tensor = rows_of(here.rank)
            work = dist.all_reduce(tensor, op, async_op=not waits)
            if work is not None:
                assert work.get_future().wait()[0] is tensor
            expect(tensor.to_dense(), wanted / scale)
    with pytest.raises(ValueError, match="max of a sparse tensor; want SUM or AVG"):
        dist.all_reduce(rows_of(1), ReduceOp.MAX)


def lie_anyhow(here: Here) -> None:
    """Use memory that is not contiguous, or that input and output share."""
    wanted = sum((torch.arange(12.0).view(3, 4).t() + rank for rank in range(here.size)), torch.zeros(4, 3))
    tensor = torch.arange(24.0).view(3, 8)[:, ::2].t()
    tensor.copy_(torch.arange(12.0).view(3, 4).t() + here.rank)
    dist.all_reduce(tensor)
    expect(tensor.contiguous(), wanted)
    whole = torch.empty(3, 2 * here.size).t()
    dist.all_gather_single(whole, torch.full((2, 3), float(here.rank)))
    expect(whole.contiguous(), torch.arange(float(here.size)).repeat_interleave(6).view(-1, 3))
    # As in FSDP, the input may be this rank's part of the output. A conjugate tensor has no memory of its own.
    whole = torch.full((5 * here.size,), float(here.rank))
    dist.all_gather_single(whole, whole[5 * here.rank : 5 * here.rank + 5])
    expect(whole, torch.arange(float(here.size)).repeat_interleave(5))
    source = torch.arange(4.0 * here.size)
    dist.reduce_scatter_single(source[:4], source.clone())
    dist.reduce_scatter_single(source[4 * here.rank : 4 * here.rank + 4], source)
    numbers = torch.full((3,), 1.0 + here.rank * 1j).conj()
    group: Any = dist.group.WORLD
    group.broadcast(numbers, 0).wait()  # torch.distributed's functions reject conjugates
    expect(numbers.resolve_conj(), torch.full((3,), 1.0 + 0j))
    empty = torch.empty(0)
    dist.all_reduce(empty)
    dist.broadcast(empty, 0)


def coalesce(here: Here) -> None:
    """Coalesce several collectives into one call."""
    total = float(sum(range(here.size)))
    for asynchronous in (False, True):
        first, second = torch.full((3,), float(here.rank)), torch.full((20_000,), 2.0 * here.rank)
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            dist.all_reduce(first)
            dist.all_reduce(second)
        manager.wait()
        expect(first, torch.full((3,), total))
        expect(second, torch.full((20_000,), 2 * total))
        outputs = [torch.empty(here.size), torch.empty(2 * here.size)]
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            for count, output in enumerate(outputs, 1):
                dist.all_gather_single(output, torch.full((count,), float(here.rank)))
        manager.wait()
        for count, output in enumerate(outputs, 1):
            expect(output, torch.arange(float(here.size)).repeat_interleave(count))
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            for output in outputs:
                part = output.new_empty(output.numel() // here.size)
                dist.reduce_scatter_single(part, output)
        manager.wait()
    # On a device torch calls the collectives one by one, and the final Work covers all of them.
    tensors = [torch.full((2,), float(here.rank)) for _ in range(2)]
    with dist._coalescing_manager(device=torch.device("cpu")):
        for tensor in tensors:
            dist.broadcast(tensor, 1)
    for tensor in tensors:
        expect(tensor, torch.ones(2))


def call_functional_ones(here: Here) -> None:
    """Call the collectives that autograd and torch.compile use."""
    whole, ranks = dist.group.WORLD, range(here.size)
    mine = torch.full((2,), float(here.rank))
    everyone = torch.arange(float(here.size)).repeat_interleave(2)
    expect(functional.wait_tensor(functional.all_reduce(mine, "sum", whole)), torch.full((2,), float(sum(ranks))))
    expect(functional.wait_tensor(functional.all_gather_single(mine, 0, whole)), everyone)
    scattered = functional.reduce_scatter_single(torch.ones(2 * here.size), "avg", 0, whole)
    expect(functional.wait_tensor(scattered), torch.ones(2))
    expect(functional.wait_tensor(functional.broadcast(mine, 1, whole)), torch.ones(2))
    exchanged = functional.all_to_all_single(mine.repeat(here.size), None, None, whole)
    expect(functional.wait_tensor(exchanged), everyone)
    first, second = functional.all_reduce_coalesced([mine, mine], "max", whole)
    expect(functional.wait_tensor(first), functional.wait_tensor(second))


def call_by_other_spellings(here: Here) -> None:
    """Call a process group in forms that torch.distributed itself does not use."""
    whole: Any = dist.group.WORLD
    mine = torch.full((2,), float(here.rank))
    total = torch.full((2,), float(sum(range(here.size))))
    for call in (
        whole.allreduce,
        lambda tensor: whole.allreduce([tensor], ReduceOp.SUM),
        lambda tensor: whole.allreduce(tensor, op=ReduceOp.SUM),
        lambda tensor: whole.allreduce_coalesced([tensor]),
    ):
        tensor = mine.clone()
        assert call(tensor).wait()
        expect(tensor, total)
    tensor = mine.clone()
    whole.broadcast(tensor, 1).wait()
    expect(tensor, torch.ones(2))
    whole.broadcast(tensor.fill_(here.rank), root=0).wait()
    expect(tensor, torch.zeros(2))
    whole.reduce(tensor, 0).wait()
    outputs = [torch.empty(2) for _ in range(here.size)]
    whole.allgather(outputs, mine).wait()
    expect(torch.stack(outputs)[:, 0], torch.arange(float(here.size)))
    pairs = [[torch.empty(2), torch.empty(1)] for _ in range(here.size)]
    whole.allgather_coalesced(pairs, [mine, -mine[:1]]).wait()
    for rank, (plain, negative) in enumerate(pairs):
        expect(plain, torch.full((2,), float(rank)))
        expect(negative, torch.full((1,), -float(rank)))
    output = torch.empty(2 * here.size)
    whole._allgather_base(output, mine).wait()
    whole.allgather_into_tensor_coalesced([output], [mine]).wait()
    expect(output, torch.arange(float(here.size)).repeat_interleave(2))
    part = torch.empty(2)
    whole._reduce_scatter_base(part, output).wait()
    whole.reduce_scatter_tensor_coalesced([part], [output]).wait()
    expect(part, torch.full((2,), float(here.rank * here.size)))
    whole.reduce_scatter(part, outputs).wait()
    whole.alltoall_base(output, output.clone(), [], []).wait()
    whole.alltoall(outputs, outputs).wait()
    whole.barrier().wait()
    objects: list[Any] = [None] * here.size
    dist.all_gather_object(objects, {"rank": here.rank})
    assert objects == [{"rank": rank} for rank in range(here.size)]
    found = [here.rank]
    dist.broadcast_object_list(found, 1)
    assert found == [1]
