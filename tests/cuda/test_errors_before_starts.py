"""An error of CUDA that does not stay, at any call on one rank, is an error on all ranks that wait for this rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from tests.cuda.test_backend import join as join_torch
from tests.standin.torch_devices import last_error
from tests.support.cuda_torch_ranks import run_cuda
from tests.support.device_training import join
from tests.support.failing_calls import Failing
from tests.support.ranks import Here
from torch import Tensor

import multiring.torch as mt
from multiring.errors import StallError

dist: Any = torch.distributed  # typed Any, because torch's stubs are incomplete

MOST_CALLS = 300
LATE_S = 20.0  # no error may take as long

Call = Callable[[], Tensor]


def sweep(here: Here, failing: Failing, name: str, call: Call) -> None:
    """Let each call of CUDA on rank 1 fail in turn while all ranks make the same call of multiring."""
    wanted, told = call().cpu(), 0
    for after in range(MOST_CALLS):
        error, found = None, None
        if here.rank == 1:
            failing.begin(after)
        try:
            found = call()
        except Exception as caught:  # noqa: BLE001 -- of any library
            error = caught
        is_over = here.rank == 1 and not failing.end()
        if error is None and found is not None:
            assert torch.equal(found.cpu(), wanted), (name, after)
        assert not isinstance(error, StallError), (name, after, error)
        assert not failing.kept, (name, after, failing.kept)
        assert not last_error(), (name, after)
        ends = mt.allgather_object((None if error is None else f"{type(error).__name__}: {error}", is_over))
        if ends[1][1]:  # the call of multiring has fewer calls of CUDA
            assert [each for each, _ in ends] == [None] * here.size, (name, after, error, ends)
            break
        others = [text for rank, (text, _) in enumerate(ends) if rank != 1 and text is not None]
        for text in others:
            assert "rank 1" in text, (name, after, error, ends)
            assert "timed out" not in text, (name, after, error, ends)
            assert ends[1][0] is not None, (name, after, error, ends)
        told += bool(others)
    else:
        raise AssertionError(f"{name}: more than {MOST_CALLS} calls")
    assert told, f"{name}: all errors came after the start"


def calls_of(device: torch.device, rank: int) -> dict[str, Call]:
    """Return calls of each kind of collective, with the same results in each turn."""
    small, large = torch.full((4,), rank + 1.0, device=device), torch.full((40000,), rank + 1.0, device=device)
    turned = torch.arange(600.0, device=device).view(20, 30).t()
    integers = torch.arange(6, device=device)
    norm = mt.SyncBatchNorm(3).to(device)
    batch = torch.arange(12.0, device=device).view(4, 3) + rank
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[rank, 2]]), torch.tensor([1.0, 2.0]), (4,), device=device, check_invariants=False
    )

    def normalised() -> Tensor:
        norm.reset_running_stats()
        found: Tensor = norm(batch)
        return found.detach()

    return {
        "allreduce": lambda: mt.allreduce(small),
        "allreduce_async": lambda: mt.synchronize(mt.allreduce_async(small, name="x")),
        "allreduce of 160 kB": lambda: mt.allreduce(large, op="sum"),
        "allreduce with gaps": lambda: mt.synchronize(mt.allreduce_async(turned)),
        "grouped_allreduce": lambda: torch.cat(mt.grouped_allreduce([small, large], op="sum")),
        "allgather": lambda: mt.allgather(small),
        "broadcast": lambda: mt.broadcast(integers, 0),
        "alltoall": lambda: mt.alltoall(small),
        "reducescatter": lambda: mt.reducescatter(small, op="sum"),
        "sparse": lambda: mt.allreduce(sparse, op="sum").to_dense(),
        "SyncBatchNorm": normalised,
    }


def fail_everywhere(here: Here, names: list[str], path: str) -> None:
    failing = Failing()
    device = join(here, stall_timeout_s=LATE_S, device_path=path)
    calls = calls_of(device, here.rank)
    for name in names:
        sweep(here, failing, name, calls[name])


NAMES = {
    "reductions": (["allreduce", "allreduce_async", "allreduce with gaps", "grouped_allreduce"], "staged"),
    "others": (["allgather", "broadcast", "alltoall", "reducescatter", "sparse", "SyncBatchNorm"], "staged"),
    "nccl": (["allreduce of 160 kB", "grouped_allreduce"], "nccl"),
}


@pytest.mark.parametrize("kind", NAMES)
def test_a_call_that_fails_on_one_rank_fails_on_all(kind: str) -> None:
    run_cuda(fail_everywhere, *NAMES[kind], deadline_s=240.0)


def fail_in_the_backend(here: Here, place: str) -> None:
    failing = Failing()
    join(here, stall_timeout_s=LATE_S)
    device = join_torch(here, place, timeout_s=LATE_S)
    own = torch.full((50,), here.rank + 1.0, device=device)

    def reduced() -> Tensor:
        found = own.clone()
        dist.all_reduce(found)
        return found

    def gathered() -> Tensor:
        found = torch.empty(2, 50, device=device)
        dist.all_gather_single(found, own)
        return found

    for name, call in {"all_reduce": reduced, "all_gather_single": gathered}.items():
        sweep(here, failing, name, call)


def fail_in_messages(here: Here, place: str) -> None:
    failing = Failing()
    join(here, stall_timeout_s=LATE_S)
    device = join_torch(here, place, timeout_s=LATE_S)
    own = torch.full((50,), 3.0, device=device)

    def message(sender: int, source: int | None, tag: int = 0) -> Call:
        def call() -> Tensor:
            found = torch.zeros(50, device=device)
            if here.rank == sender:
                dist.send(own, 1 - sender, tag=tag)
                return own
            dist.recv(found, source, tag=tag)
            return found

        return call

    sweep(here, failing, "recv", message(0, 0))
    sweep(here, failing, "send", message(1, 1))
    sweep(here, failing, "recv from any rank", message(0, None, tag=1))
    sweep(here, failing, "send to a receive from any rank", message(1, None, tag=2))


def test_messages_of_the_backend(tmp_path: Path) -> None:
    run_cuda(fail_in_messages, str(tmp_path / "meeting"), deadline_s=240.0)


def test_in_the_backend(tmp_path: Path) -> None:
    run_cuda(fail_in_the_backend, str(tmp_path / "meeting"), deadline_s=240.0)
