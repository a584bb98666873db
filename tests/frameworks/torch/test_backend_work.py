"""Work of backend "multiring": waits, futures, time-outs and errors."""

import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.faults import kill
from tests.support.grouped_ranks import dist, enter, expect, functional
from tests.support.ranks import Here, report_of, run_ranks
from torch.distributed import DistBackendError, ReduceOp

from multiring.errors import MismatchError


def test_work_and_errors(tmp_path: Path) -> None:
    run_ranks(use_work, 2, str(tmp_path / "store"))


def use_work(here: Here, place: str) -> None:
    enter(here, place)
    wait_in_every_way(here)
    wait_no_longer(here)
    wait_in_vain(here)
    be_refused(here)
    differ(here)
    dist.barrier()
    dist.destroy_process_group()


def started(tensor: torch.Tensor, **options: Any) -> Any:
    return dist.all_reduce(tensor, async_op=True, **options)


def wait_in_every_way(here: Here) -> None:
    tensor = torch.full((3,), float(here.rank))
    work = started(tensor)
    while not work.is_completed():
        time.sleep(0.001)
    expect(tensor, torch.ones(3))  # complete without a wait
    assert work.wait()
    assert work.wait(timedelta(seconds=1))
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is tensor
    work.synchronize()
    assert work.get_future().wait()[0] is tensor
    # A future completes by itself. A tensor that is not contiguous is in place by then, so callbacks see the result.
    strided = torch.full((6,), float(here.rank))[::2]
    seen = started(strided).get_future().then(lambda future: future.value()[0].sum().item())
    assert seen.wait() == 3.0
    several = [started(torch.ones(20_000)).get_future() for _ in range(20)]
    for future in several:
        expect(future.wait()[0], torch.full((20_000,), 2.0))
    # An operation whose Work was dropped continues. A tensor that is not contiguous is in place after a wait for any
    # later operation.
    started(tensor)
    del work
    strided = torch.full((6,), float(here.rank))[::2]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True):
        dist.broadcast(strided, 1, async_op=True)
    deadline, missing = time.monotonic() + 240, torch.ones(1)
    while missing.item():
        assert time.monotonic() < deadline
        missing = strided.ne(1).sum().float()[None]
        started(missing).wait()
    dist.barrier()
    waited = dist.all_reduce(tensor)
    assert waited is None
    # torch's C++ code can wait for the operation, too.
    found = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    expect(found + 0, torch.full((2,), 2.0))
    group: Any = dist.group.WORLD
    done = group.allreduce([tensor], blocking_options())
    assert done.is_completed()
    assert done.get_future().wait()[0] is tensor


def blocking_options() -> Any:
    options = dist.AllreduceOptions()
    options.asyncOp = False
    return options


def wait_no_longer(here: Here) -> None:
    """A wait may end before the operation, which then continues."""
    tensor = torch.ones(2)
    if here.rank == 0:
        work = started(tensor)
        with pytest.raises(DistBackendError, match=r"all_reduce is still in flight after 0.05 s; it continues"):
            work.wait(timedelta(seconds=0.05))
        assert not work.is_completed()
        with pytest.raises(RuntimeError, match="work needs to be completed before calling result"):
            work.result()
        store().set("go", "on")
        work.wait()
    else:
        store().wait(["go"])
        dist.all_reduce(tensor)
    expect(tensor, torch.full((2,), 2.0))


def wait_in_vain(here: Here) -> None:
    """Wait for a rank that does not come.

    The operation fails on all ranks, and its group is unusable afterwards.
    """
    tensor = torch.ones(2)
    hasty = dist.new_group([0, 1], timeout=timedelta(seconds=0.2))
    if here.rank == 0:
        named = "timed out: nothing has come from rank 1 within 0.2 s"
        with pytest.raises(DistBackendError, match=f"all_reduce: {named}") as caught:
            dist.all_reduce(tensor, group=hasty)
        assert isinstance(caught.value.__cause__, TimeoutError)
        with pytest.raises(DistBackendError, match="the group is unusable"):
            dist.all_reduce(tensor, group=hasty)
        patient = dist.new_group([0, 1])
        with pytest.raises(DistBackendError, match=r"barrier: timed out: .* rank 1 within 0.1 s"):
            dist.barrier(patient, timeout=timedelta(seconds=0.1))
    else:
        patient = dist.new_group([0, 1])
    futures = dist.new_group([0, 1], timeout=timedelta(seconds=0.2))
    if here.rank == 0:
        with pytest.raises(RuntimeError, match="timed out: nothing has come from rank 1"):
            started(tensor, group=futures).get_future().wait()
        slow = started(tensor, group=dist.new_group([0, 1], timeout=timedelta(seconds=0.1)))
        while not slow.is_completed():
            time.sleep(0.01)
        assert not slow.is_success()
        assert "timed out" in str(slow.exception())
    else:
        dist.new_group([0, 1], timeout=timedelta(seconds=0.1))
    dist.barrier()
    with pytest.raises(DistBackendError, match="nothing came from"):
        dist.all_reduce(tensor, group=patient)
    dist.barrier()


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


def be_refused(here: Here) -> None:
    """Pass wrong arguments on one rank: nothing starts, and the ranks stay in step."""
    two, group = torch.ones(2), dist.group.WORLD
    lists = [torch.ones(2) for _ in range(here.size)]
    wrong: list[tuple[Any, type[Exception], str]] = [
        (lambda: dist.all_reduce(two.to("meta")), RuntimeError, "No backend type associated with device type meta"),
        (lambda: dist.broadcast(two.to_sparse(), 0), ValueError, "is sparse"),
        (lambda: dist.all_reduce(two, ReduceOp.BAND), ValueError, "bitwise and has no meaning for float32"),
        (lambda: dist.all_reduce(two.bool(), ReduceOp.AVG), ValueError, "average has no meaning for bool"),
        (lambda: dist.all_reduce(two.to(torch.float8_e5m2)), ValueError, "sum has no meaning for float8_e5m2"),
        (lambda: dist.all_gather(lists[:1], two), ValueError, "a list of 1 tensors; want one for each of the 2 ranks"),
        (
            lambda: dist.all_gather([two, torch.ones(3)][:: 1 - 2 * here.rank][::-1], two),
            ValueError,
            "its place in the",
        ),
        (lambda: dist.all_gather_single(torch.empty(3), two), ValueError, "want the same type, and 2 times as many"),
        (lambda: dist.reduce_scatter_single(two, torch.ones(3)), ValueError, "want the same type, and 2 times as many"),
        (lambda: dist.reduce_scatter(torch.ones(3), lists), ValueError, "its place in the list"),
        (lambda: dist.all_to_all_single(two, torch.ones(3)), ValueError, "does not divide equally across the group"),
        (lambda: dist.all_to_all_single(two, two, [1, 2], [1, 1]), ValueError, r"split sizes \[1, 2\] of the output"),
        (lambda: dist.all_to_all_single(torch.ones(2, 2), two), ValueError, r"rows of shape \(\) into rows of shape"),
        (lambda: group.reduce([two, two]), ValueError, "got 2 tensors; want one"),
        (lambda: group.broadcast(two, 7), ValueError, "invalid root rank 7; want 0 to 1"),
        (lambda: group.allreduce([3]), TypeError, "got a int; want a torch.Tensor"),
        (lambda: group.all_gather_single_coalesced([], []), ValueError, "got 0 outputs"),
        (lambda: group._get_backend(torch.device("xpu")), RuntimeError, "device type xpu"),
        (lambda: dist.new_group(pg_options=3), ValueError, "takes no options"),
    ]
    for call, kind, text in wrong[: len(wrong) - here.rank]:
        with pytest.raises(kind, match=text):
            wait_for(call())
    if here.rank:
        dist.distributed_c10d._world.group_count += 1  # the other rank's failed new_group used up a name
    dist.all_reduce(two)
    expect(two, torch.full((2,), 2.0))


def wait_for(work: Any) -> None:
    """Wait for a call's Work, because tensors of devices are checked after the call."""
    if work is not None:
        work.wait()


def differ(here: Here) -> None:
    """Call with different sizes, types or operations; each error lists all calls."""
    sizes = torch.ones(2 + here.rank)
    calls: list[tuple[Any, str]] = [
        (lambda: dist.all_reduce(sizes), r"rank 0: all_reduce sum of float32 of shape \(2,\); rank 1: .*\(3,\)"),
        (lambda: dist.all_reduce(sizes[:2].to(torch.float64 if here.rank else torch.float32)), "float64"),
        (lambda: dist.all_reduce(sizes[:2], ReduceOp.MAX if here.rank else ReduceOp.MIN), "all_reduce max"),
        (lambda: dist.broadcast(sizes[:2], here.rank), "broadcast from rank 1"),
        (lambda: dist.reduce(sizes[:2], here.rank), "reduce to rank 1"),
        (lambda: dist.barrier() if here.rank else dist.all_reduce(sizes), "rank 1: barrier"),
        (lambda: dist.all_gather_single(sizes.repeat(2), sizes), "all_gather of 2 times 3 float32"),
        (lambda: dist.reduce_scatter_single(sizes.clone(), sizes.repeat(2)), "reduce_scatter sum of 2 times 3"),
    ]
    for call, text in calls:
        with pytest.raises(DistBackendError, match=text) as caught:
            call()
        assert isinstance(caught.value.__cause__, MismatchError)
    work = started(sizes)
    with pytest.raises(RuntimeError, match=re.escape("of shape (3,)")):
        work.get_future().wait()
    assert not work.is_success()
    with pytest.raises(DistBackendError):
        work.wait()
    expected, kind = [2 + here.rank, 2], ValueError if here.rank else DistBackendError
    with pytest.raises(kind, match=r"this rank expects \[3, 2\] rows by sender, but the ranks send \[2, 2\]"):
        dist.all_to_all_single(torch.empty(sum(expected)), torch.ones(4), expected, [2, 2])


def test_a_death_is_named(tmp_path: Path) -> None:
    report = report_of(lose_one, 3, str(tmp_path / "store"), faults=[kill(2).at("ready")])
    for outcome in report.outcomes[:2]:
        assert outcome.error is None, outcome.output


def lose_one(here: Here, place: str) -> None:
    enter(here, place)
    pair = dist.new_group([0, 1])
    dist.barrier()
    here.reach("ready")
    if here.rank == 2:
        time.sleep(60)
    tensor = torch.ones(3)
    work = started(tensor)
    with pytest.raises(DistBackendError, match="rank 2"):
        work.wait()
    with pytest.raises(RuntimeError, match="rank 2"):
        work.get_future().wait()
    with pytest.raises(DistBackendError, match="rank 2"):
        dist.all_gather_single(torch.empty(9), tensor)
    dist.all_reduce(tensor, group=pair)  # the survivors can continue in their own group
    dist.destroy_process_group()


def test_an_abort_ends_what_waits(tmp_path: Path) -> None:
    run_ranks(abort, 2, str(tmp_path / "store"))


def abort(here: Here, place: str) -> None:
    enter(here, place)
    doomed: Any = dist.new_group([0, 1])
    dist.barrier()
    if here.rank == 0:
        work = started(torch.ones(2), group=doomed)
        dist.distributed_c10d._abort_process_group(doomed)
        with pytest.raises(DistBackendError):
            work.wait()
        with pytest.raises(DistBackendError, match="the process group was aborted; make it anew"):
            doomed.allreduce([torch.ones(2)])
        dist.barrier()
    else:
        dist.barrier()  # if this rank started earlier, the operation might end before the abort
        with pytest.raises(DistBackendError, match=r"rank 0 aborted the group|was aborted by rank 0"):
            dist.all_reduce(torch.ones(2), group=doomed)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    expect(tensor, torch.full((2,), 2.0))
    dist.distributed_c10d._abort_process_group()
    assert not dist.is_initialized()
