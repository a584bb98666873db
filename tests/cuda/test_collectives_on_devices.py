"""Every collective of device tensors gives the bits of the same collective of host tensors."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from tests.support.cuda_torch_ranks import SMALL_SHAPES, run_cuda
from tests.support.ranks import Here
from torch import Tensor

import multiring.torch as mt
from multiring._frontend.submission_line import SubmissionLine
from multiring.errors import ArgumentError, CollectiveError, MismatchError, UnsupportedError

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.uint8, torch.int32, torch.int64, torch.bool, torch.complex64),
)


def of(rank: int, shape: Sequence[int], dtype: torch.dtype = torch.float32, salt: int = 0) -> Tensor:
    """Return a rank's tensor, the same wherever it is called."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 50, shape, generator=generator).to(dtype)


def here_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def check(what: Any, found: Tensor, wanted: Tensor) -> None:
    assert found.device == here_device(), (what, found.device)
    assert found.dtype == wanted.dtype, what
    assert torch.equal(found.cpu(), wanted), (what, found.cpu(), wanted)


def ops_of(dtype: torch.dtype) -> list[str]:
    ops = ["sum"] if dtype is torch.bool else ["sum", "average"]
    if not dtype.is_complex:
        ops += ["min", "max", "product"]
    return [*ops, "adasum"] if dtype.is_floating_point else ops


def reductions(rank: int, dtype: torch.dtype, device: torch.device) -> None:
    for op in ops_of(dtype):
        for shape in ((), (0, 3), (5,), (3, 7), (700, 9)):
            values = of(rank, shape, dtype)
            wanted = mt.allreduce(values, op=op)
            check((dtype, op, shape), mt.allreduce(values.to(device), op=op), wanted)
            own = values.to(device)
            assert mt.allreduce_(own, op=op) is own
            check(("in place", dtype, op, shape), own, wanted)
        turned = of(rank, (6, 4), dtype).to(device).t()
        mt.allreduce_(turned, op=op)
        check(("transposed", dtype, op), turned, mt.allreduce(of(rank, (6, 4), dtype).t(), op=op))
        many = [of(rank, (count,), dtype, count) for count in (1, 17, 3, 100)]
        wanteds = mt.grouped_allreduce(many, op=op)
        for found, wanted in zip(mt.grouped_allreduce([each.to(device) for each in many], op=op), wanteds, strict=True):
            check(("grouped", dtype, op), found, wanted)
        owns = [each.to(device) for each in many]
        for _ in range(2):
            for own, each in zip(owns, many, strict=True):
                own.copy_(each)
            mt.grouped_allreduce_(owns, op=op, name="group")
            for own, wanted in zip(owns, wanteds, strict=True):
                check(("grouped in place", dtype, op), own, wanted)


def movements(rank: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    uneven = of(rank, (2 + rank, 3), dtype)
    check("allgather", mt.allgather(uneven.to(device)), mt.allgather(uneven))
    pairs = mt.grouped_allgather([uneven.to(device)] * 2), mt.grouped_allgather([uneven] * 2)
    for found, wanted in zip(*pairs, strict=True):
        check("grouped allgather", found, wanted)
    values = of(rank, (5, 3), dtype)
    for root in range(size):
        check("broadcast", mt.broadcast(values.to(device), root), mt.broadcast(values, root))
        own = values.to(device)
        assert mt.broadcast_(own, root) is own
        check("broadcast_", own, mt.broadcast(values, root))
    if dtype is not torch.bool:
        for op in ("sum", "average"):
            check("reducescatter", mt.reducescatter(values.to(device), op=op), mt.reducescatter(values, op=op))
    splits = [(5 + each) // size for each in range(size)]
    wanted, counts = mt.alltoall(values, splits)
    for given in (splits, torch.tensor(splits, dtype=torch.int32), torch.tensor(splits, dtype=torch.int32).to(device)):
        found, found_counts = mt.alltoall(values.to(device), given)
        check("alltoall", found, wanted)
        assert torch.equal(found_counts.cpu(), counts)
        assert found_counts.device == (given.device if isinstance(given, Tensor) else device)


def every_type(here: Here) -> None:
    mt.init()
    for dtype in DTYPES:
        reductions(here.rank, dtype, here_device())
        movements(here.rank, here.size, dtype, here_device())


@pytest.mark.parametrize(("hosts", "devices"), SMALL_SHAPES)
def test_collectives_of_every_type(hosts: int, devices: int) -> None:
    run_cuda(every_type, hosts=hosts, devices=devices)


def options(here: Here) -> None:
    mt.init()
    device, rank = here_device(), here.rank
    values = of(rank, (4000,))
    for name in ("fp16", "bf16", "int8"):
        check(name, mt.allreduce(values.to(device), compression=name), mt.allreduce(values, compression=name))
        check(name, mt.reducescatter(values.to(device), compression=name), mt.reducescatter(values, compression=name))
        pair = [values, values[:7]]
        founds = mt.grouped_allreduce([each.to(device) for each in pair], compression=name)
        for found, wanted in zip(founds, mt.grouped_allreduce(pair, compression=name), strict=True):
            check(name, found, wanted)
    for dtype in (torch.float32, torch.float16, torch.int32):
        scales: dict[str, Any] = {"op": "sum", "prescale_factor": 0.3, "postscale_factor": 2.5}
        scaled = of(rank, (100,), dtype)
        check("scales", mt.allreduce(scaled.to(device), **scales), mt.allreduce(scaled, **scales))
        check("scales", mt.reducescatter(scaled.to(device), **scales), mt.reducescatter(scaled, **scales))
    with pytest.raises(ArgumentError, match="bool"):
        mt.allreduce_async(torch.ones(3, dtype=torch.bool, device=device), op="average")
    with pytest.raises(ArgumentError, match="bool"):
        mt.allreduce_async(torch.ones(3, dtype=torch.bool, device=device), op="sum", prescale_factor=2.0)
    with torch.inference_mode():
        inferred = of(rank, (6,)).to(device)
        handle = mt.allreduce_async_(inferred, op="sum")
    mt.synchronize(handle)
    check("inference", inferred, mt.allreduce(of(rank, (6,)), op="sum"))


@pytest.mark.parametrize(("hosts", "devices"), SMALL_SHAPES)
def test_options(hosts: int, devices: int) -> None:
    run_cuda(options, hosts=hosts, devices=devices)


DIFFERENTIABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "allreduce": mt.allreduce,
    "compressed": lambda x: mt.allreduce(x, compression="fp16"),
    "allgather": mt.allgather,
    "broadcast": lambda x: mt.broadcast(x, 0),
    "reducescatter": mt.reducescatter,
    "alltoall": lambda x: mt.alltoall(x, {1: [4], 2: [3, 1], 4: [2, 1, 1, 0]}[mt.size()])[0],
    "grouped_allreduce": lambda x: mt.grouped_allreduce([x, x * 2])[1],
    "grouped_allgather": lambda x: mt.grouped_allgather([x])[0],
    "grouped_reducescatter": lambda x: mt.grouped_reducescatter([x])[0],
}


def gradients(here: Here) -> None:
    mt.init()
    for name, function in DIFFERENTIABLE.items():
        found = []
        for device in (torch.device("cpu"), here_device()):
            leaf = of(here.rank, (4, 3)).to(device).requires_grad_()
            result = function(leaf * 2)
            loss: Any = (result * torch.arange(float(result.numel()), device=device).view_as(result)).sum()
            loss.backward()
            assert leaf.grad is not None
            found.append(leaf.grad)
        check(name, found[1], found[0])


@pytest.mark.parametrize(("hosts", "devices"), SMALL_SHAPES)
def test_gradients(hosts: int, devices: int) -> None:
    run_cuda(gradients, hosts=hosts, devices=devices)


def sparse_tensors(here: Here) -> None:
    mt.init()
    device, rank = here_device(), here.rank
    for dtype in (torch.float32, torch.int32):
        indices = torch.tensor([[0, 2 + rank, 2 + rank], [1, 0, 0]])
        host = torch.sparse_coo_tensor(indices, torch.tensor([1, 2, 3]).to(dtype), (6, 2))
        for op in ("sum", "average"):
            wanted = mt.allreduce(host, op=op)
            own = torch.sparse_coo_tensor(indices.to(device), host._values().to(device), (6, 2))
            for found in (mt.allreduce(own, op=op), mt.sparse_allreduce_async(own, f"{dtype} {op}", op)()):
                assert found.is_coalesced()
                check("values", found.values(), wanted.values())
                check("indices", found.indices(), wanted.indices())
    mixed = [torch.ones(3, device=device), own]
    dense, sparse = mt.grouped_allreduce(mixed, op="sum")
    check("dense beside sparse", dense, torch.full((3,), float(here.size)))
    check("sparse beside dense", sparse._values(), mt.allreduce(host, op="sum")._values())


@pytest.mark.parametrize(("hosts", "devices"), SMALL_SHAPES)
def test_sparse_tensors(hosts: int, devices: int) -> None:
    run_cuda(sparse_tensors, hosts=hosts, devices=devices)


def mixed_groups(here: Here) -> None:
    mt.init()
    device, rank = here_device(), here.rank
    kinds = (torch.float32, torch.float32, torch.int32, torch.int32, torch.float32)

    def tensors() -> Iterator[Tensor]:
        for place, dtype in enumerate(kinds):
            yield of(rank, (3 + place,), dtype, place).to(device if place % 2 else "cpu")

    wanteds = mt.grouped_allreduce([each.cpu() for each in tensors()], op="sum")
    given = list(tensors())
    for own, found, again, wanted in zip(given, mt.grouped_allreduce(given, op="sum"), tensors(), wanteds, strict=True):
        assert found.device == own.device
        assert torch.equal(found.cpu(), wanted)
        assert torch.equal(own.cpu(), again.cpu())
    mt.grouped_allreduce_(given, op="sum")
    for own, wanted in zip(given, wanteds, strict=True):
        assert torch.equal(own.cpu(), wanted)


def zeros_on_the_device(here: Here) -> None:
    mt.init()
    kinds = [torch.ones(3), torch.ones(2, 2), torch.ones(4, dtype=torch.float64), torch.ones(0)]
    like = [each.to(here_device()) if place % 2 else each for place, each in enumerate(kinds)]
    own = mt.shared_zeros_like(like)
    for found, wanted in zip(own, like, strict=True):
        assert (found.device, found.dtype, found.shape) == (wanted.device, wanted.dtype, wanted.shape)
        assert not found.count_nonzero()
        found.add_(here.rank + 1)
    for summed in mt.grouped_allreduce_(own, op=mt.Sum):
        assert (summed == sum(range(1, here.size + 1))).all()
    mt.shutdown()


def test_zeros_for_gradients_are_where_the_tensors_are() -> None:
    run_cuda(zeros_on_the_device)


@pytest.mark.parametrize(("hosts", "devices"), SMALL_SHAPES)
def test_a_group_may_have_tensors_on_host_and_device(hosts: int, devices: int) -> None:
    run_cuda(mixed_groups, hosts=hosts, devices=devices)


def in_order(here: Here) -> None:
    mt.init()
    device, rank, size = here_device(), here.rank, here.size
    started = []
    for number in range(40):
        values = of(rank, (50 + number,), salt=number)
        place = device if number % 3 else torch.device("cpu")
        name = f"named {number}" if number % 2 else None
        started.append((mt.allreduce_async(values.to(place), op="sum", name=name), number))
    mt.barrier()
    for handle, number in reversed(started):
        if number == 20:
            assert mt.synchronize(mt.allgather_async(of(rank, (2,)).to(device))).shape == (2 * size,)
        while not mt.poll(handle):
            pass
        wanted = torch.stack([of(each, (50 + number,), salt=number) for each in range(size)]).sum(0)
        assert torch.allclose(mt.synchronize(handle).cpu(), wanted)
    # Host and device operations were posted in the program's order, so the ranks negotiated nothing.
    assert mt.size() == 1 or _negotiations() == 0
    mt.allreduce_async(torch.ones(3, device=device), name="dropped")
    assert mt.join() in range(size)


def _negotiations() -> int:
    from multiring._frontend.process_sets import global_process_set, members_of  # noqa: PLC0415

    return members_of(global_process_set).named._generation


@pytest.mark.parametrize(("hosts", "devices"), SMALL_SHAPES)
def test_operations_of_host_and_device_tensors_keep_the_programs_order(hosts: int, devices: int) -> None:
    run_cuda(in_order, hosts=hosts, devices=devices)


def slow_copy_on_one_rank(here: Here) -> tuple[int, int]:
    """Return the negotiations of a program whose first copy is slow on rank 1, with the line's order and without it."""
    mt.init()
    found = []
    original = torch.cuda.Event.synchronize
    for is_mutated in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if is_mutated:
                patch.setattr(SubmissionLine, "is_ahead", lambda _: False)
            if here.rank:

                def late(event: Any) -> None:
                    time.sleep(0.5)
                    original(event)

                patch.setattr(torch.cuda.Event, "synchronize", late)
            # Factors are applied on the host, so this operation waits on the line.
            first = mt.allreduce_async(torch.full((3,), 0.5, device=here_device()), op="sum", prescale_factor=2.0)
            time.sleep(0.2)
            second = mt.allreduce_async(torch.full((3,), 2.0), op="sum")
            assert mt.synchronize(second).tolist() == [4.0] * 3
            assert mt.synchronize(first).tolist() == [2.0] * 3
            mt.barrier()
        found.append(_negotiations())
    return found[0], found[1]


@pytest.mark.parametrize(("hosts", "devices"), [(1, 2), (2, 1)])
def test_host_operations_do_not_overtake_device_operations(hosts: int, devices: int) -> None:
    assert set(run_cuda(slow_copy_on_one_rank, hosts=hosts, devices=devices)) == {(0, 1)}


def without_a_host_wait(here: Here) -> None:
    mt.init()
    device, rank = here_device(), here.rank
    ones = torch.ones(4, 3, device=device)
    layer = mt.SyncBatchNorm(3).to(device)
    layer(ones * (rank + 1))
    try:
        torch.cuda.set_sync_debug_mode("error")
        handles = [
            mt.allreduce_async(ones),
            mt.allreduce_async_(ones.clone(), op="max"),
            mt.grouped_allreduce_async([ones, ones.t().contiguous()]),
            mt.allgather_async(ones),
            mt.broadcast_async(ones, 0),
            mt.reducescatter_async(ones),
            mt.alltoall_async(ones),
        ]
        found = [mt.synchronize(handle) for handle in handles]
        mt.allreduce(ones, compression="bf16")
        layer(ones * (rank + 1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found[3].shape == (4 * here.size, 3)


def test_the_callers_thread_does_not_wait_for_the_device() -> None:
    run_cuda(without_a_host_wait, hosts=1, devices=2)


def bad_calls(here: Here) -> None:
    mt.init()
    device, rank = here_device(), here.rank
    on_one = torch.ones(3, device=device if rank else "cpu")
    text = "do not agree on the device: rank 0: cpu; rank 1: cuda; inputs are intact"
    for call in (mt.allreduce, mt.allgather, lambda x: mt.broadcast(x, 0), lambda x: mt.grouped_allreduce([x])):
        with pytest.raises(MismatchError, match=text):
            call(on_one)
    mt.allreduce_async(torch.ones(3, device=device), name="x")
    for place in (device, "cpu"):
        with pytest.raises(ArgumentError, match=r"currently being processed: allreduce\.x"):
            mt.allreduce_async(torch.ones(3, device=place), name="x")
    with pytest.raises(CollectiveError, match="of no dimensions"):
        mt.allgather(torch.tensor(1.0, device=device))
    with pytest.raises(MismatchError, match=r"shape: rank 0: \(3,\); rank 1: \(4,\)"):
        mt.allreduce(torch.ones(3 + rank, device=device))
    with pytest.raises(UnsupportedError, match="is on meta"):
        mt.allreduce(torch.ones(3, device="meta"))
    intact = torch.full((3 + rank,), 7.0, device=device)
    with pytest.raises(MismatchError):
        mt.allreduce_(intact)
    assert intact.eq(7.0).all()
    exhausted(rank, device)
    assert mt.allreduce(torch.ones(2, device=device), op="sum").tolist() == [2.0, 2.0]


def exhausted(rank: int, device: torch.device) -> None:
    """Rank 0's device has no memory for the copy in row-major order of what it sends."""
    large = torch.ones(6 << 20, device=device)  # 24 MiB
    turned = large.view(2, -1).t()
    held = []
    with suppress(torch.OutOfMemoryError):
        while not rank:
            held.append(torch.empty(4 << 20, device=device))
    error = MismatchError if rank else torch.OutOfMemoryError
    with pytest.raises(error, match="rank 0: cuda:0 has no memory for 25165824 bytes"):
        mt.allreduce(turned)
    held.clear()


def test_bad_calls_are_told_on_all_ranks() -> None:
    run_cuda(bad_calls, hosts=1, devices=2, standin={"memory_mb": 128})
