"""One call with the same memory twice gives the results of separate memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.grouped_ranks import dist, enter, expect
from tests.support.ranks import Here, run_ranks
from torch import Tensor
from torch.distributed import ReduceOp

from multiring.torch.c10d.buffers import touching

COUNTS = [3, 700, 70_000]  # exchanged in slots, copied to a buffer, read in place


@pytest.mark.parametrize(("ranks", "engine"), [(3, "shm"), (3, "shm+tcp")])
def test_memory_given_twice(tmp_path: Path, ranks: int, engine: str) -> None:
    run_ranks(give_twice, ranks, str(tmp_path / "store"), engine=engine)


def give_twice(here: Here, place: str) -> None:
    whole: Any = enter(here, place)
    for turn in range(10):
        for count in COUNTS:
            reduce(here, whole, count, turn)
            reduce_scatter(here, whole, count, turn)
            gather(here, whole, count, turn)
            exchange(here, whole, count, turn)
    refuse_expanded(here, whole)
    dist.destroy_process_group()


def numbered(rank: int, count: int, turn: int) -> Tensor:
    return torch.arange(float(count)).add(1000 * rank + turn)


def summed(ranks: int, count: int, turn: int) -> Tensor:
    return torch.stack([numbered(rank, count, turn) for rank in range(ranks)]).sum(0)


def reduce(here: Here, whole: Any, count: int, turn: int) -> None:
    wanted = summed(here.size, count, turn)
    part = max(1, count // 3)
    views: list[Any] = [
        lambda tensor: [tensor, tensor],
        lambda tensor: [tensor[: -part // 2], tensor[part:]],
        lambda tensor: [tensor[1:], tensor, tensor[::2]],
        lambda tensor: [tensor[:part], torch.ones(5), tensor[part:], tensor[part - 1 : part + 1]],
        lambda tensor: [tensor.view(1, -1), tensor.t() if tensor.dim() > 1 else tensor.view(-1, 1)],
    ]
    for several in views:
        tensor = numbered(here.rank, count, turn)
        whole.allreduce_coalesced(several(tensor)).wait()
        changed = torch.zeros(count, dtype=torch.bool)
        for each in several(torch.arange(count)):
            if each.dtype is torch.int64:  # views of the aliased memory, unlike torch.ones(5)
                changed[each.flatten()] = True
        expect(tensor[changed], wanted[changed])
        expect(tensor[~changed], numbered(here.rank, count, turn)[~changed])
    whole_number = numbered(here.rank, count, turn).long()
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = ReduceOp.BOR
    whole.allreduce_coalesced([whole_number, whole_number[1:]], options).wait()
    parts = [numbered(rank, count, turn).long() for rank in range(here.size)]
    found = parts[0]
    for each in parts[1:]:
        found = found | each
    expect(whole_number, found)


def reduce_scatter(here: Here, whole: Any, count: int, turn: int) -> None:
    """Reduce into the same output twice, and into another operation's input."""
    own = summed(here.size, here.size * count, turn).chunk(here.size)[here.rank]
    source, output = numbered(here.rank, here.size * count, turn), torch.empty(count)
    whole.reduce_scatter_tensor_coalesced([output, output], [source, source]).wait()
    expect(output, own)
    other = source.clone()
    whole.reduce_scatter_tensor_coalesced([other[:count], output], [source, other]).wait()
    expect(output, own)
    expect(other[:count], own)
    expect(other[count:], source[count:])


def gather(here: Here, whole: Any, count: int, turn: int) -> None:
    everyone = torch.cat([numbered(rank, count, turn) for rank in range(here.size)])
    mine, output = numbered(here.rank, count, turn), torch.empty(here.size * count)
    whole.allgather_into_tensor_coalesced([output, output], [mine, mine]).wait()
    expect(output, everyone)
    other = torch.empty(here.size * count)
    other[:count] = mine  # the second operation reads it, and the first overwrites it
    whole.allgather_into_tensor_coalesced([other, output], [mine + 1, other[:count]]).wait()
    expect(other, everyone + 1)
    expect(output, everyone)
    column = [torch.empty(count) for _ in range(here.size)]
    whole.allgather_coalesced([[each, each] for each in column], [mine + 1, mine]).wait()
    expect(torch.cat(column), everyone)  # the result of the last operation
    last = torch.empty(count)
    whole.allgather([[last] * here.size], [mine]).wait()
    expect(last, numbered(here.size - 1, count, turn))


def exchange(here: Here, whole: Any, count: int, turn: int) -> None:
    last = torch.empty(count)
    mine = numbered(here.rank, count, turn)
    whole.alltoall([last] * here.size, [mine] * here.size).wait()
    expect(last, numbered(here.size - 1, count, turn))
    if here.rank == 0:
        whole.gather([[last] * here.size], [mine]).wait()
        whole.scatter([mine], [[mine] * here.size]).wait()
    else:
        whole.gather([], [mine]).wait()
        whole.scatter([mine], []).wait()
    expect(last, numbered(here.size - 1, count, turn))
    expect(mine, numbered(0, count, turn))


def refuse_expanded(here: Here, whole: Any) -> None:
    """Reject outputs whose elements share one address; nothing starts on any rank."""
    wide, lists = torch.ones(1).expand(4), [torch.ones(1).expand(4) for _ in range(here.size)]
    calls: list[Any] = [
        lambda: whole.allreduce([wide]),
        lambda: whole.allreduce([wide.long()[:1].expand(4)], ReduceOp.BAND),
        lambda: whole.allgather([lists], [torch.ones(4)]),
        lambda: whole.alltoall(lists, lists),
        lambda: whole.reduce_scatter_single(wide, torch.ones(4 * here.size)),
        lambda: whole.recv([wide], 0),
    ]
    for call in calls:
        with pytest.raises((ValueError, RuntimeError), match="at one memory address"):
            call()
    whole.barrier().wait()


def test_what_touches() -> None:
    memory = torch.zeros(10)
    apart = ([memory[:5]], [memory[8:]]), ([memory[5:7]], [memory[8:]])
    assert touching(apart) == [False, False]
    assert touching((*apart, ([memory[6:7]], []))) == [False, True, True]
    assert touching((*apart, ([memory[9:]], []))) == [True, True, True]
    assert touching([([memory[::2]], []), ([memory[1::2]], []), ([torch.zeros(3)], [memory])]) == [True, True, True]
    assert touching([([], [memory]), ([], [memory])]) == [False, False]
    assert touching([([memory], [memory])]) == [False]
    assert touching([([memory[:0]], [memory]), ([memory[3:3]], [])]) == [False, False]
