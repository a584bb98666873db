"""Large tensors that are reduced again and again get memory of the arena behind them, and nobody notices."""

import copy
import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.frameworks.plain import backward
from tests.frameworks.processes import in_arena, process_group
from tests.wire.ranks import Here, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import multiring
import multiring.torch as mt

COUNT = 300_001  # somewhat more than 1 MiB of float32


def reduce(tensor: Tensor, times: int, here: Here, **options: Any) -> None:
    """Sum over the ranks what each fills `tensor` with, so many times, and look at all of it."""
    ranks = here.size
    for turn in range(times):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape).remainder(977 + turn) + here.rank)
        dist.all_reduce(tensor, **options)
        wanted = ranks * torch.arange(tensor.numel()).view(tensor.shape).remainder(977 + turn)
        assert torch.equal(tensor, (wanted + ranks * (ranks - 1) // 2).to(tensor.dtype))


@pytest.mark.parametrize("engine", ["shm", "tcp", "shm+tcp"])
def test_sums_are_right_before_and_after(tmp_path: Path, engine: str) -> None:
    run_ranks(sums, 3 if engine == "shm+tcp" else 2, tmp_path / "store", engine=engine)


def sums(here: Here, store: Path) -> None:
    """Of any type and place in memory; with aliases, and with neighbours on the same pages."""
    with process_group(here, store) as group:
        shares = len(group.topology.hosts) < here.size
        for dtype in (torch.float32, torch.float64, torch.int32, torch.bfloat16, torch.complex64):
            size = 400_003 + (2 << 20) // dtype.itemsize
            whole = torch.full((size,), 7, dtype=dtype)
            part = whole[99_999 : 99_999 + (1 << 20) // dtype.itemsize + 17]
            alias = part.view(-1)[5:]
            if dtype is torch.bfloat16:  # of which small numbers are exact
                for turn in range(4):
                    part.fill_(here.rank + turn)
                    dist.all_reduce(part)
                    assert (part == sum(range(here.size)) + here.size * turn).all()
            else:
                reduce(part, 4, here)
            # With one rank of its host there is nobody to read it.
            alone = not shares or (here.size == 3 and group.topology.host_of().count(host_of(group)) == 1)
            assert in_arena(part[part.numel() // 2 :]) != alone
            assert torch.equal(alias, part[5:])
            assert (whole[:99_999] == 7).all()
            assert (whole[99_999 + part.numel() :] == 7).all()
            address = part.data_ptr()
            dist.all_reduce(whole[: whole.numel() // 2])  # another tensor, which has some of the same pages
            assert part.data_ptr() == address
            assert torch.equal(alias, part[5:])


def host_of(group: multiring.Group) -> int:
    return group.topology.host_of()[group.rank]


def test_every_way_of_asking(tmp_path: Path) -> None:
    run_ranks(ask, 2, tmp_path / "store")


def ask(here: Here, store: Path) -> None:
    """Futures, coalesced operations, averages and sub-groups; pieces that lie apart are copied as before."""
    with process_group(here, store):
        tensor = torch.zeros(COUNT)
        for turn in range(4):
            tensor.fill_(turn + here.rank)
            work: Any = dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True)
            work.get_future().wait()
            assert (tensor == turn + 0.5).all()
        assert in_arena(tensor[COUNT // 2 :])
        several = [torch.zeros(COUNT), torch.zeros(300, 1000).t(), torch.zeros(10)]
        for turn in range(4):
            for each in several:
                each.fill_(turn + here.rank)
            with dist.distributed_c10d._coalescing_manager():
                for each in several:
                    dist.all_reduce(each)
            assert all((each == 2 * turn + 1).all() for each in several)
        assert [in_arena(each.flatten()[each.numel() // 2 :]) for each in several] == [True, False, False]
        group = dist.new_group([0, 1])
        reduce(tensor, 4, here, group=group)  # backed by the other group, and still right
        other = torch.zeros(COUNT)
        reduce(other, 4, here, group=group)
        assert in_arena(other[COUNT // 2 :])
        dist.destroy_process_group(group)
        assert not in_arena(other[COUNT // 2 :])
        reduce(other, 4, here)


def test_memory_comes_and_goes(tmp_path: Path) -> None:
    run_ranks(come_and_go, 2, tmp_path / "store")


def come_and_go(here: Here, store: Path) -> None:
    with process_group(here, store) as group:
        arena_bytes = group.calls.membership.context.arena_bytes
        before = arena_bytes()
        for _ in range(30):  # each is freed while it is backed; all of them would take 36 MB
            reduce(torch.zeros(COUNT), 3, here)
        gc.collect()
        assert arena_bytes() <= before + 3 * COUNT * 4
        # What a storage had before it was resized is somebody else's by now; the tensor is reduced as it is.
        tensor = torch.zeros(COUNT)
        reduce(tensor, 3, here)
        for _ in range(3):
            tensor.untyped_storage().resize_(0)
            others = [torch.full((COUNT,), 5.0) for _ in range(3)]
            tensor.untyped_storage().resize_(4 * COUNT)
            reduce(tensor, 4, here)
            assert all((each == 5).all() for each in others)
        fresh = [torch.zeros(1000) for _ in range(3)]  # the same again, and no two of one address
        for _ in range(3):
            for each in fresh:
                reduce(each, 1, here)
        kept = torch.zeros(COUNT)
        reduce(kept, 3, here)
        kept.copy_(torch.arange(COUNT))
    assert torch.equal(kept, torch.arange(COUNT, dtype=kept.dtype))
    assert not in_arena(kept[COUNT // 2 :])


def test_memory_of_a_file_or_shared_stays_what_it_is(tmp_path: Path) -> None:
    run_ranks(leave_files, 2, tmp_path / "store")


def leave_files(here: Here, store: Path) -> None:
    with process_group(here, store):
        path = store.parent / f"{here.rank}.bin"
        mapped = np.memmap(path, dtype=np.float32, mode="w+", shape=(COUNT,))
        shared: Any = torch.zeros(COUNT)
        shared.share_memory_()
        for tensor in (torch.from_numpy(mapped), shared):
            reduce(tensor, 4, here)
            assert not in_arena(tensor[COUNT // 2 :])
        mapped.flush()
        assert np.array_equal(np.fromfile(path, dtype=np.float32), mapped)


def test_a_forked_child_changes_nothing(tmp_path: Path) -> None:
    run_ranks(fork, 2, tmp_path / "store")


def fork(here: Here, store: Path) -> None:
    with process_group(here, store):
        tensor = torch.zeros(COUNT)
        reduce(tensor, 3, here)
        tensor.fill_(1.0)
        child = os.fork()
        if child == 0:
            seen = bool((tensor == 1).all())
            tensor.fill_(2.0)
            os._exit(0 if seen and bool((tensor == 2).all()) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert (tensor == 1).all()
        reduce(tensor, 2, here)
        assert in_arena(tensor[COUNT // 2 :])
        told, tell = os.pipe()
        tensor.fill_(1.0)
        child = os.fork()
        if child == 0:
            os.read(told, 1)
            os._exit(0 if bool((tensor == 1).all()) else 1)
        tensor.fill_(5.0)
    os.write(tell, b"x")  # the child looks once the parent's group has ended
    assert os.waitpid(child, 0)[1] == 0
    assert (tensor == 5).all()


def test_buckets_of_distributed_data_parallel(tmp_path: Path) -> None:
    run_ranks(train, 2, tmp_path / "store")


def train(here: Here, store: Path) -> None:
    """With the backend's name alone, and with the hook: the same gradients; those that are views are in the arena."""
    with process_group(here, store):
        for view, hooked in ((True, False), (False, False), (True, True), (False, True)):
            torch.manual_seed(1)
            plain = nn.Sequential(nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 600))
            model = DistributedDataParallel(copy.deepcopy(plain), gradient_as_bucket_view=view)
            if hooked:
                model.register_comm_hook(mt.BucketSharing(), mt.share_bucket)
            for step in range(6):
                model.zero_grad(set_to_none=step % 2 == 0)
                inputs = [torch.randn(4, 600, generator=torch.Generator().manual_seed(10 * step + r)) for r in (0, 1)]
                backward(model(inputs[here.rank]).square().mean())
                plain.zero_grad()
                for each in inputs:
                    backward(plain(each).square().mean() / 2)
                found, wanted = gradients_of(model), gradients_of(plain)
                assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(found, wanted, strict=True))
            assert all(in_arena(each[300]) == view for each in gradients_of(model) if each.dim() == 2)


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [each.grad for each in model.parameters() if each.grad is not None]


def test_a_group_ends_while_gradients_are_written(tmp_path: Path) -> None:
    run_ranks(end_early, 2, tmp_path / "store")


def end_early(here: Here, store: Path) -> None:
    """What is in the tensors when the group ends is what was put there last, also behind its back."""
    kept: list[Tensor] = []
    with process_group(here, store):
        for _ in range(3):
            kept.append(torch.zeros(COUNT))
            reduce(kept[-1], 3, here)
        work: Any = dist.all_reduce(kept[0], async_op=True)
        work.wait()
        for place, each in enumerate(kept):
            each.fill_(place)
    for place, each in enumerate(kept):
        assert (each == place).all()
        each.add_(1)
        assert (each == place + 1).all()


def test_memory_of_others_is_left_to_them(tmp_path: Path) -> None:
    run_ranks(leave_to_numpy, 2, tmp_path / "store")


def leave_to_numpy(here: Here, store: Path) -> None:
    """NumPy's memory outlives the tensor, which torch does not count; slices of one storage go together."""
    with process_group(here, store) as group:
        array = np.ones(COUNT, dtype=np.float32)
        reduce(torch.from_numpy(array), 1, here)
        tensor = torch.from_numpy(array)
        reduce(tensor, 3, here)
        assert not in_arena(tensor[COUNT // 2 :])
        kept = array.copy()
        del tensor
        before = group.calls.membership.context.arena_bytes()
        whole = torch.zeros(3 * COUNT)
        for part in whole.chunk(3):
            reduce(part, 3, here)
            assert in_arena(part[COUNT // 2 :])
        del whole, part
        for _ in range(3):  # when others come, those that nobody has are forgotten
            reduce(torch.zeros(COUNT), 1, here)
        assert group.calls.membership.context.arena_bytes() <= before + COUNT * 4
    assert np.array_equal(array, kept)


def test_operations_that_nobody_waits_for_and_groups_that_end_before_them(tmp_path: Path) -> None:
    run_ranks(hurry, 2, tmp_path / "store")


def hurry(here: Here, store: Path) -> None:
    with process_group(here, store):
        tensor, other = torch.zeros(COUNT), torch.zeros(COUNT)
        for each in (tensor, other):
            reduce(each, 3, here)
        for turn in range(3):
            tensor.fill_(turn + here.rank)
            dist.all_reduce(tensor, async_op=True)
            dist.barrier()
            dist.all_reduce(other)
            assert (tensor == 2 * turn + 1).all()
        tensor.fill_(here.rank)
        first: Any = dist.all_reduce(tensor, async_op=True)
        other.fill_(3.0)
        last: Any = dist.all_reduce(other, async_op=True)
    for work in (first, last):
        work.wait()
    assert (tensor == 1).all()
    assert (other == 6).all()
    assert not in_arena(tensor[COUNT // 2 :])


def test_it_can_be_turned_off(tmp_path: Path) -> None:
    run_ranks(leave_alone, 2, tmp_path / "store", back_tensors=False)


def leave_alone(here: Here, store: Path) -> None:
    with process_group(here, store):
        tensor = torch.zeros(COUNT)
        reduce(tensor, 4, here)
        assert not in_arena(tensor[COUNT // 2 :])
