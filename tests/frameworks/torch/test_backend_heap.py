"""Reductions in torch's memory change nothing else when torch resizes or frees it."""

import contextlib
import gc
import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from tests.support.heap_programs import Program
from tests.support.processes import process_group
from tests.support.ranks import Here, run_ranks

COUNT = 300_001  # slightly more than 1 MiB of float32


def test_a_random_program(tmp_path: Path) -> None:
    run_ranks(play, 2, tmp_path, 4)  # benchmarks/evidence/torch/heap.py runs other seeds


def play(here: Here, folder: Path, seed: int) -> None:
    gc.freeze()
    torch.set_num_threads(1)
    numbers = itertools.count()

    @contextlib.contextmanager
    def meet() -> Iterator[None]:
        store: object = dist.FileStore(str(folder / f"store{next(numbers)}"), here.size)  # type: ignore[attr-defined]
        dist.init_process_group("multiring", store=store, rank=here.rank, world_size=here.size)  # type: ignore[arg-type]
        yield
        dist.destroy_process_group()

    Program(seed, meet).run(120)


def test_a_storage_that_has_shrunk(tmp_path: Path) -> None:
    run_ranks(shrink, 2, tmp_path / "store")


def shrink(here: Here, store: Path) -> None:
    """Reductions must not touch memory that a storage gave up.

    This also holds after the storage is freed and after the group has ended.
    """
    # These tensors, once freed, make the allocator use its heap for smaller tensors.
    del_me = [torch.ones(4_000_000) for _ in range(2)]
    del del_me
    others: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []
    with process_group(here, store):
        for turn in range(8):
            tensor = torch.zeros(COUNT)
            for _ in range(3):
                tensor.fill_(1.0)
                dist.all_reduce(tensor)
            storage = tensor.untyped_storage()
            storage.resize_(0)
            storage.resize_(COUNT)
            others += [torch.full((COUNT // 8,), 5.0) for _ in range(5)]
            del storage, tensor
            if turn % 2:
                kept.append(torch.zeros(COUNT))
                dist.all_reduce(kept[-1])
            assert all((each == 5).all() for each in others)
    assert all((each == 5).all() for each in others)
