"""All-reduces of device tensors whose ranks expect their agreement: by NCCL ahead of it, or on the host without one."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.standin.loading import nccl
from tests.support.cuda_torch_ranks import run_cuda
from tests.support.lateness import stretched
from tests.support.mutants import LATE, LATE_US, SEEDS, Patch, judged, late_copy, require_needed
from tests.support.orderings import without as left_out
from tests.support.ranks import Here

import multiring.torch as mt
from multiring._frontend import follow_ups
from multiring._runtime.engines.nccl import NcclEngine
from multiring._runtime.engines.nccl_communicator import NcclCommunicator
from multiring._runtime.engines.nccl_device import NcclOperation
from multiring._runtime.group import starting
from multiring.errors import CollectiveError
from multiring.torch.collectives import by_nccl

DECISION_S, SOON_S = 20.0, 9.0


def settle(**options: Any) -> torch.device:
    """Join the job, and reduce until the ranks expect the answer of their agreements."""
    by_nccl.LEAST_BYTES = 0
    follow_ups.BEHIND, follow_ups.EQUAL = 4, 2
    mt.init(**options)
    device, end_s = torch.device("cuda", torch.cuda.current_device()), time.monotonic() + DECISION_S
    while set(mt.allgather_object(mt.device_path())) == {"undecided"} or time.monotonic() > end_s:
        mt.allreduce(torch.ones(2, device=device))
    for _ in range(10):
        assert mt.allreduce(torch.ones(2, device=device), op="sum").tolist() == [mt.size()] * 2
    return device


def counted(patch: Patch) -> Counter[str]:
    """Count agreements, and operations that this rank gives to NCCL."""
    found: Counter[str] = Counter()
    put, agree = NcclCommunicator.put, starting.start_agreement

    def counted_put(*arguments: Any) -> None:
        found["put"] += 1
        put(*arguments)

    def counted_agreement(*arguments: Any, **options: Any) -> Any:
        found["agreements"] += 1
        return agree(*arguments, **options)

    patch.setattr(NcclCommunicator, "put", counted_put)
    patch.setattr(follow_ups, "start_agreement", counted_agreement)
    return found


def ahead(here: Here, folder: str) -> bool:
    """Return whether NCCL gets an operation that the other rank has not called yet."""
    device, is_ahead = settle(), True
    with Patch.context() as patch:
        found = counted(patch)
        for number in range(3):
            x, go, end_s = (
                torch.full((3,), float(number), device=device),
                Path(folder, str(number)),
                time.monotonic() + 9,
            )
            while here.rank and not go.exists():
                time.sleep(0.001)
            handle = mt.allreduce_async(x, op="sum")
            if not here.rank:
                while found["put"] <= number and time.monotonic() < end_s:
                    time.sleep(0.001)
                is_ahead = is_ahead and found["put"] == number + 1 and not mt.poll(handle)
                go.touch()
            assert mt.synchronize(handle).tolist() == [number * 2.0] * 3
    return is_ahead


def test_nccl_starts_ahead_of_the_agreement(tmp_path: Path) -> None:
    assert run_cuda(ahead, str(tmp_path), devices=2) == [True, True]


def without(here: Here) -> int:
    """Return how many agreements the ranks make if they have known for long that NCCL is impossible."""
    device = settle()
    assert mt.device_path().startswith("staged: ranks 0 and 1 share the GPU")
    with Patch.context() as patch:
        found = counted(patch)
        for number in range(6):
            x = torch.full((5, 3), float(number + here.rank), device=device)
            handles = [
                mt.allreduce_async(x, op="sum", name="one"),
                mt.allreduce_async_(x * 1, op="max"),
                mt.grouped_allreduce_async([x, x], op="sum"),
                mt.allreduce_async(torch.ones(3), op="sum"),
            ]
            del x
            one, highest, group, host = [mt.synchronize(each) for each in handles]
            assert one.unique().tolist() == [2.0 * number + 1]
            assert highest.unique().tolist() == [number + 1.0]
            assert group[1].unique().tolist() == [2.0 * number + 1]
            assert host.tolist() == [2.0] * 3
        handles = [
            mt.allreduce_async(torch.ones(each, device=device), name=str(each))
            for each in (3, 4, 5)[:: 1 - 2 * here.rank]
        ]
        assert sorted(len(mt.synchronize(each)) for each in handles) == [3, 4, 5]
        count = found["agreements"]
    mt.join()
    assert mt.allreduce(torch.ones(3, device=device), op="sum").tolist() == [2.0] * 3
    return count


def test_ranks_that_share_a_gpu_stop_agreeing() -> None:
    found = run_cuda(without, devices=2, standin={"devices": 1})
    # Only for the names whose order differs: the middle one comes before or after that is known.
    assert found in ([2, 2], [3, 3]), found


def sum_of(here: Here, device: torch.device, name: str | None = None, elements: int = 4) -> bool:
    """Return whether a sum over all ranks is right."""
    x = torch.full((elements,), 1.0 + here.rank, device=device)
    return mt.allreduce(x, op="sum", name=name).tolist() == [sum(1.0 + rank for rank in range(here.size))] * elements


def half(x: torch.Tensor, total: list[float], *, last: bool) -> None:
    """Let the ranks find that their orders differ before NCCL's agreement shows it, and then start more operations."""
    refuse, handles = NcclEngine.refuse, {}

    def late_refuse(self: NcclEngine, *arguments: Any) -> bool:
        time.sleep(0.05)
        return refuse(self, *arguments)

    with Patch.context() as patch:
        patch.setattr(NcclEngine, "refuse", late_refuse)
        for name in ("a", "b", "c", "d")[:: -1 if last else 1]:
            handles[name] = mt.allreduce_async(x, op="sum", name=name)
            time.sleep(0.02 * (len(handles) == 2))
        ended = [mt.synchronize(handles[name]).tolist() for name in "abcd"]
    assert ended == [total] * 4, ended


def disagree(here: Here, device: torch.device, case: str) -> None:
    """Start operations on which the ranks do not agree, and look at what comes of them."""
    last = here.rank == here.size - 1
    x = torch.full((3,), 1.0 + here.rank, device=device)
    total = [sum(1.0 + rank for rank in range(here.size))] * 3
    before = [mt.allreduce_async(x, op="sum") for _ in range(2)]
    after: list[int] = []
    if case == "order":
        names = ["a", "b", "c", "d"]
        handles = {name: mt.allreduce_async_(x * 1, op="sum", name=name) for name in names[:: -1 if last else 1]}
        ended = [mt.synchronize(handles[name]).tolist() for name in names]
        assert ended == [total] * 4, ended
    elif case == "half":
        half(x, total, last=last)
    elif case == "late":  # the last rank has started less than the others when they find that the order differs
        if last:
            mt.synchronize(mt.allgather_async(torch.ones(2), name="other"))
        handles = {name: mt.allreduce_async(x, op="sum", name=name) for name in ("a", "b", "c")}
        if not last:
            mt.synchronize(mt.allgather_async(torch.ones(2), name="other"))
        assert all(mt.synchronize(handle).tolist() == total for handle in handles.values())
    elif case == "join":
        if not last:
            handles = {name: mt.allreduce_async(x, op="sum", name=name) for name in ("a", "b")}
            assert all(mt.synchronize(handle).tolist() == [total[0] - here.size] * 3 for handle in handles.values())
    elif case == "memory":
        with Patch.context() as patch:
            if last:
                patch.setattr(by_nccl._Reduction, "_copy_on_device", lambda *_: None)
            after = [mt.allreduce_async(x, op="sum") for _ in range(2)]
    else:
        wrong = {"shape": torch.ones(3 + last, device=device), "host": torch.ones(3, device="cpu" if last else device)}
        wrong["type"] = torch.ones(3, device=device, dtype=torch.int16 if last else torch.float32)
        handle = mt.allreduce_async(wrong[case], op="sum", name="wrong")
        after = [mt.allreduce_async(x, op="sum") for _ in range(3)]
        with pytest.raises(CollectiveError, match="the ranks do not agree on"):
            mt.synchronize(handle)
    ended = [mt.synchronize(handle).tolist() for handle in (*after, *before)]
    assert ended == [total] * len(ended), ended


def disagreements(here: Here, case: str) -> tuple[bool, int]:
    """Return whether sums are right after a disagreement, and how many of the last ones NCCL did."""
    device, is_right = settle(), True
    assert mt.device_path() == "nccl"
    for _ in range(3):
        disagree(here, device, case)
        if case in {"order", "half", "late", "join"}:
            mt.join()
        is_right = is_right and all(sum_of(here, device, name) for name in ("a", None, "b"))
    torch.cuda.synchronize()
    with Patch.context() as patch:
        found = counted(patch)
        is_right = is_right and all(sum_of(here, device) for _ in range(12))
        torch.cuda.synchronize()
    return is_right, found["put"]


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("case", ["order", "half", "late", "join", "memory", "shape", "host", "type"])
def test_values_are_right_if_the_ranks_do_not_agree(case: str, devices: int) -> None:
    assert run_cuda(disagreements, case, devices=devices) == [(True, 12)] * devices


# ---- orderings ----

Program = Callable[[Here, torch.device], bool]


def restores(here: Here, device: torch.device) -> bool:
    """Return whether sums are right that the ranks repeat because their orders differ, after memory was freed."""
    elements, total = 3000, sum(1.0 + rank for rank in range(here.size))
    names = ["a", "b", "c", "d"][:: -1 if here.rank == here.size - 1 else 1]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # so that freed memory is used again at once
    handles = {
        name: mt.allreduce_async(torch.full((elements,), 1.0 + here.rank, device=device), op="sum", name=name)
        for name in names
    }
    end_s, has_ended = time.monotonic() + SOON_S, False
    while not has_ended and time.monotonic() < end_s:
        has_ended = all(mt.poll(each) for each in handles.values())  # then nobody keeps the sources
        junk = [torch.full((elements,), 77.0, device=device) for _ in range(8)]  # in all that was freed
        time.sleep(0.001)
        del junk
    ended = [mt.synchronize(handles[name]) for name in sorted(names)]
    is_right = all(bool(each.eq(total).all()) for each in ended)
    mt.join()
    for _ in range(8):
        mt.allreduce(torch.ones(2, device=device))
    torch.cuda.synchronize()
    return is_right


def repeats(here: Here, device: torch.device) -> bool:
    """Return whether sums are right that the ranks repeat while NCCL, aborted, still writes for a while."""
    refuse, controls = NcclEngine.refuse, nccl()

    def late_refuse(self: NcclEngine, *arguments: Any) -> bool:
        time.sleep(stretched(LATE_US) / 1e6)  # the operation has begun on the device
        controls.standin_nccl_write_late(0)
        return refuse(self, *arguments)

    mt.barrier()
    controls.standin_nccl_write_late(10 * int(stretched(LATE_US)))
    with Patch.context() as patch:
        patch.setattr(NcclEngine, "refuse", late_refuse)
        return restores(here, device)


def freed(patch: Patch) -> None:
    site = "torch/collectives/by_nccl.py _Reduction._restore: stream.synchronize"
    patch.setattr(torch.cuda.Stream, "synchronize", left_out(torch.cuda.Stream.synchronize, site))


def hasty_repetition(patch: Patch) -> None:
    patch.setattr(NcclOperation, "await_device", lambda _: None)


def delay(patch: Patch, program: Program) -> None:
    """Have the second copies come late."""
    copy = torch._foreach_copy_

    def late_again(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        is_second = threading.current_thread().name == "multiring follow-ups"
        (late_copy if is_second and program is restores else copy)(targets, sources)

    patch.setattr(torch, "_foreach_copy_", late_again)


MUTANTS: dict[str, tuple[Program, Callable[[Patch], None]]] = {
    "freed under the second copy": (restores, freed),
    "second copy before NCCL has ended": (repeats, hasty_repetition),
}


def caught(here: Here) -> dict[str, tuple[bool, bool]]:
    """Return for each mutant whether the program is right without it, and whether it is found."""
    device = settle()
    return judged(MUTANTS, lambda program: program(here, device), delay)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_ordering_is_needed(seed: int) -> None:
    require_needed(run_cuda(caught, devices=2, standin={"seed": seed, **LATE}))
