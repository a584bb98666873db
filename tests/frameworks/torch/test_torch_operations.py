"""Operations of multiring.torch beyond the cells: handles, names, groups, objects."""

import math
import runpy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.faults import kill
from tests.support.plain import backward, enter
from tests.support.ranks import Here, report_of, run_ranks
from torch import nn

import multiring
import multiring.torch as mt
from multiring._frontend.process_sets import members_of
from multiring._schedule import WIRES
from multiring.errors import ArgumentError, MismatchError, PeerLostError, StateError, UnsupportedError
from multiring.torch.fusion_buffer import Packing

Change = Callable[[torch.Tensor], object]


def test_handles_and_names() -> None:
    run_ranks(use_handles, 2)


def use_handles(here: Here) -> None:
    enter()
    tensor = torch.full((3,), float(here.rank + 1))
    first, second = mt.allreduce_async(tensor, name="a"), mt.allreduce_async(tensor, op=mt.Sum, name="b")
    while not mt.poll(second):
        pass
    assert mt.synchronize(second).tolist() == [3.0] * 3
    assert mt.synchronize(first).tolist() == [1.5] * 3
    assert mt.synchronize(first) is None
    with pytest.raises(ArgumentError, match=f"Handle {first} was not created or has been cleared"):
        mt.poll(first)
    # A name is free again once its handle is synchronized, or polled as done.
    again = mt.allreduce_async_(tensor, None, "a", mt.Sum)
    while not mt.poll(again):
        pass
    mt.synchronize(mt.allreduce_async(tensor, name="a"))
    assert mt.synchronize(again) is tensor
    # A local error does not count as a call, so later unnamed calls still match.
    for _ in range(here.rank + 1):
        with pytest.raises(ArgumentError, match="tensor is a list"):
            mt.allreduce([1.0])  # type: ignore[arg-type]
    assert mt.allreduce(torch.ones(1)).item() == 1.0
    with pytest.warns(DeprecationWarning, match="`average` has been replaced"):
        assert mt.allreduce(torch.ones(1), average=False).item() == 2.0
    with pytest.raises(UnsupportedError, match="tensor is on meta and has no values yet"):
        mt.allreduce(torch.ones(2, device="meta"))
    with pytest.raises(ArgumentError, match="factors 'x'"):
        mt.allreduce(torch.ones(1), prescale_factor="x")  # type: ignore[arg-type]


def test_what_autograd_knows() -> None:
    run_ranks(use_autograd, 2)


def use_autograd(here: Here) -> None:
    enter()
    # A program may change a Function's result in place, also a result in the arena.
    for count in (3, 10_000):
        value = torch.ones(count, requires_grad=True)
        for found in (mt.allreduce(value), *mt.grouped_allreduce([value, value]), mt.allgather(value)):
            found.mul_(2)
            backward(found.sum())
        assert value.grad is not None
    # autograd sees an operation in place as a change, except on the root of a broadcast.
    weight = torch.ones(3, requires_grad=True)
    changes: dict[str, Change] = {
        "allreduce_": mt.allreduce_,
        "grouped_allreduce_": lambda factor: mt.grouped_allreduce_([factor]),
        "broadcast_": lambda factor: mt.broadcast_(factor, 0),
    }
    for name, change in changes.items():
        for factor in (torch.ones(3), mt.shared_zeros_like([torch.ones(3)])[0], torch.ones(3, 2)[:, 0]):
            product = (factor * weight).sum()
            change(factor)
            if here.rank or name != "broadcast_":
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    backward(product)
    sent = torch.ones(2, requires_grad=True)
    backward((mt.broadcast(sent, 1) * (here.rank + 1)).sum())
    assert sent.grad is not None
    assert sent.grad.tolist() == ([1.5, 1.5] if here.rank == 1 else [0.0, 0.0])  # the root gets the average
    parameter = nn.Parameter(torch.full((2,), float(here.rank)))
    mt.allreduce_(parameter)
    assert parameter.tolist() == [0.5, 0.5]
    with torch.inference_mode():
        assert mt.allreduce_(torch.ones(2), op=mt.Sum).tolist() == [2.0, 2.0]
    for op in (mt.Min, mt.Max, mt.Product):
        with pytest.raises(NotImplementedError, match="gradient of an allreduce by"):
            backward(mt.allreduce(torch.ones(2, requires_grad=True), op=op).sum())


def test_groups() -> None:
    run_ranks(use_groups, 2)


def use_groups(here: Here) -> None:
    enter()
    shapes = [(3, 5), (7,), (), (0, 2), (1000,), (4, 4)]
    own = mt.shared_zeros_like([torch.empty(shape) for shape in shapes])
    assert all(not tensor.any() for tensor in own)
    packing = members_of(mt.global_process_set).kept(Packing)
    for turn in (1, 2, 3):
        for tensor in own:
            tensor.fill_(here.rank + turn)
        places = [tensor.data_ptr() for tensor in own]
        found = mt.grouped_allreduce_(own, op=mt.Sum)
        if own[0].is_cpu:  # tensors of devices are copied
            assert packing.known_span(own) is not None
            assert not packing._spare  # nothing was copied
        for tensor, other, place in zip(own, found, places, strict=True):
            assert other is tensor
            assert tensor.data_ptr() == place
            assert torch.equal(tensor, torch.full_like(tensor, 2 * turn + 1))
    # One rank's tensors are in the arena and the other's are not; the result is the same.
    apart = [torch.full(shape, 1.0) for shape in shapes]
    for tensor in own:
        tensor.fill_(1.0)
    mt.grouped_allreduce_(own if here.rank else apart, op=mt.Sum)
    assert all(torch.equal(each, torch.full_like(each, 2.0)) for each in (own if here.rank else apart))
    # The elements between two slices of a tensor must not change.
    whole = torch.ones(64)
    mt.grouped_allreduce_([whole[:8], whole[16:32]], op=mt.Sum)
    assert whole.tolist() == [2.0] * 8 + [1.0] * 8 + [2.0] * 16 + [1.0] * 32
    # A group with several types is reduced by several collectives.
    mixed = [
        torch.ones(2),
        torch.ones(3, dtype=torch.int64),
        torch.full((2,), 2.0),
        torch.ones(1, dtype=torch.bfloat16),
    ]
    assert [each.tolist() for each in mt.grouped_allreduce(mixed, op=mt.Sum)] == [[2, 2], [2, 2, 2], [4, 4], [2]]
    assert [each.tolist() for each in mt.grouped_allreduce_(mixed, op=mt.Sum)] == [[2, 2], [2, 2, 2], [4, 4], [2]]
    for empty in (mt.grouped_allreduce, mt.grouped_allgather, mt.grouped_reducescatter):
        with pytest.raises(ArgumentError, match="group of no tensors"):
            empty([])
    with pytest.raises(mt.HorovodInternalError, match=r"Mismatched tensors: .*rank 0: 1; rank 1: 2"):
        mt.grouped_allreduce([torch.ones(1)] * (1 + here.rank))
    assert mt.allreduce(torch.ones(1)).item() == 1.0


def test_compression() -> None:
    run_ranks(compress, 2)


def compress(here: Here) -> None:
    enter()
    for compression in (mt.Compression.none, mt.Compression.fp16, mt.Compression.bf16, mt.Compression.int8):
        for dtype in (torch.float64, torch.float32, torch.float16, torch.int32):
            tensor = torch.full((4,), here.rank + 1).to(dtype)
            packed, context = compression.compress(tensor)
            assert compression.decompress(packed, context).dtype == dtype
            for found in (
                mt.allreduce(tensor, op=mt.Sum, compression=compression),
                mt.grouped_allreduce([tensor], op=mt.Sum, compression=compression)[0],
                mt.reducescatter(tensor, op=mt.Sum, compression=compression),
            ):
                assert found.dtype == dtype
                assert torch.allclose(found.double(), torch.full(found.shape, 3.0).double(), atol=0.05)
    assert mt.Compression.fp16.compress(torch.ones(2))[0].dtype == torch.float16
    assert mt.Compression.bf16.compress(torch.ones(2))[0].dtype == torch.bfloat16
    assert [each.wire for each in (mt.Compression.fp16, mt.Compression.bf16, mt.Compression.int8)] == [
        "fp16",
        "bf16",
        "int8",
    ]
    assert mt.allreduce(torch.ones(1) / 3, compression="fp16", op=mt.Sum) == mt.allreduce(
        torch.ones(1) / 3, compression=mt.Compression.fp16, op=mt.Sum
    )
    for call in (mt.allreduce, mt.reducescatter, lambda tensor, **more: mt.grouped_allreduce([tensor], **more)):
        with pytest.raises(ArgumentError, match=r"compression='fp8': want Compression\.none"):
            call(torch.ones(1), compression="fp8")


def test_a_wire_type_without_a_compressor_of_its_own_is_a_member_of_compression(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("multiring._schedule.WIRES", (*WIRES, "fp24"))
    found = runpy.run_path(str(mt.compression.__file__))["Compression"]
    assert found.fp24.wire == "fp24"
    assert [name for name in vars(found) if not name.startswith("_")] == ["none", *WIRES, "fp24"]


def test_sparse() -> None:
    run_ranks(add_sparse, 2)


def add_sparse(here: Here) -> None:
    enter()
    table = torch.sparse_coo_tensor(torch.tensor([[1, 1, here.rank]]), torch.ones(3, 2), (4, 2), check_invariants=True)
    wait = mt.sparse_allreduce_async(table, None, mt.Sum)
    found = wait()
    assert found.is_coalesced()
    assert found.indices().tolist() == [[0, 1]]
    assert found.values().tolist() == [[1.0, 1.0], [5.0, 5.0]]
    same = table.clone()
    assert mt.allreduce_(same) is same
    assert torch.equal(same.to_dense(), found.to_dense() / 2)
    with pytest.raises(ArgumentError, match="max of a sparse tensor"):
        mt.sparse_allreduce_async(table, "x", mt.Max)
    with pytest.raises(ArgumentError, match=r"sparse_allreduce_async of float32 of shape \(2,\)"):
        mt.sparse_allreduce_async(torch.ones(2), "x", mt.Sum)
    with pytest.raises(mt.HorovodInternalError, match="Mismatched ALLREDUCE tensor shapes"):
        mt.sparse_allreduce_async(
            torch.sparse_coo_tensor(torch.tensor([[0]]), [1.0], (4 + here.rank,), check_invariants=True), None, mt.Sum
        )()
    assert mt.allreduce(torch.ones(1)).item() == 1.0


def test_sparse_tensors_of_every_form() -> None:
    """Indices and values travel in one row each, at whose places in memory the values' type may not begin."""
    run_ranks(add_sparse_forms, 2)


def add_sparse_forms(here: Here) -> None:
    enter()
    for dtype in (torch.float32, torch.complex128, torch.int16):
        for shape, dimensions in (((4,), 1), ((3, 2), 1), ((3, 2), 2), ((2, 3, 2), 2), ((3, 0), 1), ((5, 1), 2)):
            ones = torch.arange(1, 1 + math.prod(shape)).reshape(shape).to(dtype)
            entries, nothing = (each.to_sparse(dimensions) for each in (ones * (here.rank + 1), ones * 0))
            for sent, total in ((entries, 3), (nothing if here.rank else entries, 1)):
                found = mt.allreduce(sent, op=mt.Sum)
                assert (found.dtype, found.sparse_dim(), found.shape) == (dtype, dimensions, ones.shape)
                assert torch.equal(found.to_dense(), ones * total), (dtype, shape, dimensions, found)


def test_objects() -> None:
    run_ranks(share_objects, 3)


def share_objects(here: Here) -> None:
    enter(process_sets="dynamic")
    mine = {"rank": here.rank, "list": [1, (2, "three")]}
    assert mt.broadcast_object(mine, 1) == {**mine, "rank": 1}
    assert mt.broadcast_object(mine if here.rank == 2 else None, root_rank=2, name="o")["rank"] == 2
    assert [each["rank"] for each in mt.allgather_object(mine)] == [0, 1, 2]
    pair = mt.add_process_set([2, 1])
    if here.rank:
        assert mt.broadcast_object(here.rank, 2, process_set=pair) == 2
        assert mt.allgather_object("x" * here.rank, process_set=pair) == ["x", "xx"]
    strange = (each for each in "")  # generators cannot be pickled
    calls = (
        lambda: mt.broadcast_object(strange if here.rank == 1 else 0, 1),
        lambda: mt.allgather_object(strange if here.rank == 1 else 0),
    )
    for call in calls:
        kind: Any = TypeError if here.rank == 1 else mt.HorovodInternalError
        with pytest.raises(kind, match="pickle"):
            call()
    assert mt.broadcast_object(here.rank) == 0


def test_what_shutdown_leaves() -> None:
    run_ranks(shut_down, 2, engine="shm")


def shut_down(here: Here) -> None:
    with pytest.raises(ValueError, match=r"^multiring is not initialised; call multiring\.init\(\).*mt\.init"):
        mt.rank()
    with pytest.raises(mt.HorovodInternalError, match="is not initialised"):
        mt.allreduce(torch.ones(1))
    for _ in range(3):
        enter()
        mt.init()  # a second init does nothing
        mt.init(comm=[0, 1], process_sets=[])
        for wrong in ({"comm": [0]}, {"process_sets": "dynamic"}, {"process_sets": [mt.ProcessSet([1])]}):
            with pytest.raises(ValueError, match=r"want all 2 ranks|already"):
                mt.init(**wrong)
        assert (mt.rank(), mt.size(), mt.local_rank(), mt.local_size()) == (here.rank, 2, here.rank, 2)
        assert (mt.cross_rank(), mt.cross_size(), mt.is_homogeneous()) == (0, 1, True)
        assert mt.global_process_set.ranks == [0, 1]
        assert str(mt.global_process_set) == "ProcessSet(process_set_id=0, ranks=[0, 1], mpi_comm=None)"
        mt.allreduce(torch.ones(1))
        mt.barrier()
        mt.shutdown()
        mt.shutdown()
        assert not mt.is_initialized()
        with pytest.raises(mt.HorovodInternalError, match="this process has left the job"):
            mt.allreduce(torch.ones(1))
        with pytest.raises(ValueError, match="is not initialised"):
            mt.size()
    with pytest.raises(StateError):
        mt.local_rank()
    assert (mt.gloo_built(), mt.gloo_enabled(), mt.mpi_enabled(), mt.nccl_built()) == (True, True, False, 0)
    assert not any([mt.ddl_built(), mt.ccl_built(), mt.cuda_built(), mt.rocm_built()])
    assert mt.mpi_built() in (True, False)
    for comm in ("ranks", 3, [0.5]):
        with pytest.raises(ArgumentError, match="comm="):
            mt.init(comm=comm)
    with pytest.raises(ArgumentError, match=r"comm=\[0\]: want all 2 ranks"):
        mt.init(comm=[0])
    assert not mt.is_initialized()
    mt.init(comm=[1, 0])
    with pytest.raises(ArgumentError, match="MPI carries no bytes"):
        mt.mpi_threads_supported()


def test_multirings_own_init_will_do() -> None:
    run_ranks(join_by_multiring, 2)


def join_by_multiring(here: Here) -> None:
    here.join()
    assert mt.is_initialized()
    assert mt.allreduce(torch.ones(2), op="sum").tolist() == [2.0, 2.0]
    multiring.shutdown()
    here.join()
    assert mt.allreduce(torch.ones(2), op="sum").tolist() == [2.0, 2.0]


def test_a_death_is_horovods_error_and_ours() -> None:
    report = report_of(reduce_until_death, 3, faults=[kill(1).at("reducing").after(0.1)])
    for outcome in report.outcomes:
        if outcome.rank != 1:
            assert isinstance(outcome.error, PeerLostError)
            assert isinstance(outcome.error, mt.HorovodInternalError)
            assert "rank 1" in str(outcome.error)


def reduce_until_death(here: Here) -> None:
    enter()
    here.reach("reducing")
    while True:
        mt.allreduce(torch.ones(3))


def test_errors_are_of_both_kinds() -> None:
    run_ranks(disagree, 2)


def disagree(here: Here) -> None:
    enter()
    with pytest.raises(MismatchError) as caught:
        mt.allreduce(torch.ones(2 + here.rank), name="loss")
    assert isinstance(caught.value, mt.HorovodInternalError)
    assert "Mismatched ALLREDUCE tensor shapes" in str(caught.value)
    assert "allreduce.loss" in str(caught.value)
    assert isinstance(caught.value.__cause__, MismatchError)
