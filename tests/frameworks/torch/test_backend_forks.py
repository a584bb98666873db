"""Forks of processes that are, or were, ranks of torch.distributed."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.grouped_ranks import dist, enter, expect
from tests.support.ranks import Here, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import multiring
from multiring.errors import StateError

COUNT = 300_001
CHILD_S = 240


def test_a_fork_after_the_group_is_a_process_like_any_other(tmp_path: Path) -> None:
    run_ranks(come_again, 2, str(tmp_path))


def come_again(here: Here, place: str) -> None:
    """Fork children that form new groups while the parent forms a group, too.

    The children use the backends "multiring" and "gloo". They cannot join as the launcher's rank, because the parent is
    that rank. Their own children form groups as well.
    """
    kept = sum_up(here, f"{place}/first")
    child = forked(lambda: be_child(here, place, kept))
    sum_up(here, f"{place}/parents")
    require_good(child)
    assert kept[0] == 1


def sum_up(here: Here, place: str) -> torch.Tensor:
    """Use a group of all ranks; return memory of its arena, which outlives the group."""
    group = enter(here, place)
    tensor = torch.full((COUNT,), float(here.rank))
    dist.all_reduce(tensor)
    expect(tensor, torch.ones(COUNT))
    kept: torch.Tensor = group.allocate_tensor(COUNT, dtype=torch.float32)
    kept.fill_(here.rank)
    dist.all_reduce(kept)
    dist.destroy_process_group()
    expect(kept, tensor)
    return kept


def be_child(here: Here, place: str, kept: torch.Tensor) -> None:
    sum_up(here, f"{place}/childs")
    del kept  # the parent's memory: freeing it must not affect this process
    sum_up(here, f"{place}/childs2")
    dist.init_process_group("gloo", init_method=f"file://{place}/gloo", rank=here.rank, world_size=here.size)
    number = torch.full((1,), float(here.rank))
    dist.all_reduce(number)
    assert number == 1
    dist.destroy_process_group()
    with pytest.raises(StateError, match=r"is already this rank and still runs"):  # the parent is the launcher's rank
        multiring.init()
    require_good(forked(lambda: sum_up(here, f"{place}/grandchilds")))


def forked(call: Any) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        watch = threading.Timer(CHILD_S, os._exit, (3,))
        watch.daemon = True
        watch.start()
        call()
        status = 0
    except BaseException as error:  # noqa: BLE001 -- the exit status reports it
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    os._exit(status)


def require_good(child: int) -> None:
    _, status = os.waitpid(child, 0)
    assert status == 0, f"a child ended with status {status}"


def test_children_read_what_stood_there_at_the_fork(tmp_path: Path) -> None:
    run_ranks(fork_while_training, 2, str(tmp_path / "store"))


def fork_while_training(here: Here, place: str) -> None:
    """Fork while training: the child sees gradients and tensors of that moment.

    The parent continues to write to them.
    """
    enter(here, place)
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(600, 600), gradient_as_bucket_view=True)
    tensor = torch.zeros(COUNT)
    for step in range(4):
        model.zero_grad(set_to_none=False)
        model(torch.full((2, 600), step + 1.0)).sum().backward()
        tensor.fill_(1.0)
        dist.all_reduce(tensor)
    gradients: list[Any] = [each.grad for each in model.parameters()]
    before = [each.clone() for each in gradients]
    told, tell = os.pipe()

    def look() -> None:
        os.close(tell)
        os.read(told, 1)  # returns once the parent has written
        expect(tensor, torch.full((COUNT,), 2.0))
        for gradient, wanted in zip(gradients, before, strict=True):
            expect(gradient, wanted)
            gradient.fill_(-1.0)
        tensor.fill_(-1.0)

    children = [forked(look) for _ in range(2)]
    os.close(told)
    model.zero_grad(set_to_none=False)
    model(torch.full((2, 600), 9.0)).sum().backward()
    tensor.fill_(3.0)
    dist.all_reduce(tensor)
    os.close(tell)
    for child in children:
        require_good(child)
    expect(tensor, torch.full((COUNT,), 6.0))
    dist.destroy_process_group()
    expect(tensor, torch.full((COUNT,), 6.0))
