"""Process sets: static sets, dynamic sets, and operations in them."""

import time

import pytest
import torch
from tests.support.plain import enter
from tests.support.ranks import Here, run_ranks

import multiring.torch as mt
from multiring.errors import ArgumentError, StallError


def test_static_sets() -> None:
    run_ranks(use_static_sets, 3)


def use_static_sets(here: Here) -> None:
    pair, last = mt.ProcessSet([2, 0]), mt.ProcessSet([2])
    assert (pair.size(), pair.rank(), pair.included()) == (None, None, None)
    assert str(pair) == "ProcessSet(process_set_id=None, ranks=[0, 2], mpi_comm=None)"
    before = mt.global_process_set
    for _ in range(2):
        enter(process_sets=[pair, last])
        assert mt.global_process_set is before
        assert (pair.process_set_id, last.process_set_id) == (1, 2)
        alike = mt.ProcessSet([0, 2])
        mt.init(process_sets=[alike])  # does not join the job again
        assert alike.process_set_id == 1
        with pytest.raises(ArgumentError, match="is not known, and this process has joined the job already"):
            mt.init(process_sets=[mt.ProcessSet([1])])
        assert str(pair) == "ProcessSet(process_set_id=1, ranks=[0, 2], mpi_comm=None)"
        assert pair.size() == 2
        assert pair.included() == (here.rank != 1)
        if here.rank == 1:
            with pytest.raises(ArgumentError, match=r"rank 1 is not in ProcessSet\(process_set_id=1, ranks=\[0, 2\]"):
                pair.rank()
            with pytest.raises(ArgumentError, match="only ranks"):
                mt.barrier(process_set=pair)
        else:
            assert pair.rank() == here.rank // 2
            use_pair(here, pair)
        assert mt.allreduce(torch.ones(1), op=mt.Sum).item() == 3.0
        with pytest.raises(ArgumentError, match="MULTIRING_DYNAMIC_PROCESS_SETS=1"):
            mt.add_process_set([0, 1])
        with pytest.raises(ArgumentError, match="remove_process_set: process sets are fixed"):
            mt.remove_process_set(pair)
        mt.shutdown()
    for sets in ([mt.ProcessSet([0, 1]), mt.ProcessSet([1, 0])], [mt.ProcessSet([0, 1, 2])]):
        with pytest.raises(ArgumentError, match="A process set with the same ranks exists already"):
            mt.init(process_sets=sets)
        assert not mt.is_initialized()
    for wrong, text in ([[0, 1]], "has a list"), ("fixed", "'dynamic'"):
        with pytest.raises(ArgumentError, match=text):
            mt.init(process_sets=wrong)


def use_pair(here: Here, pair: mt.ProcessSet) -> None:
    """Call every kind of operation in the set of ranks 0 and 2."""
    value = torch.full((4,), float(here.rank))
    assert mt.allreduce(value, process_set=pair).tolist() == [1.0] * 4
    assert mt.allreduce(value, op=mt.Sum, process_set=pair, name="sum").tolist() == [2.0] * 4
    assert mt.grouped_allreduce([value], process_set=pair)[0].tolist() == [1.0] * 4
    assert mt.allgather(value[: here.rank // 2 + 1], process_set=pair).tolist() == [0.0, 2.0, 2.0]
    assert mt.broadcast(value, 2, process_set=pair).tolist() == [2.0] * 4
    received, splits = mt.alltoall(value[:3], [1, 2], process_set=pair)
    assert splits.tolist() == [here.rank // 2 + 1] * 2
    assert len(received) == 2 * (here.rank // 2 + 1)
    assert mt.reducescatter(value, process_set=pair).tolist() == [1.0] * 2
    table = torch.sparse_coo_tensor(torch.tensor([[here.rank]]), [2.0], (3,), check_invariants=True)
    assert mt.sparse_allreduce_async(table, None, mt.Average, pair)().to_dense().tolist() == [1.0, 0.0, 1.0]
    model = {"weight": value.clone()}
    mt.broadcast_parameters(model, 2, process_set=pair)
    assert model["weight"].tolist() == [2.0] * 4
    for root in (1, 3, -1):
        with pytest.raises(ArgumentError, match=rf"root_rank={root}: want one of the set's ranks, \[0, 2\]"):
            mt.broadcast_(value, root, process_set=pair)
    mt.barrier(process_set=pair)


def test_calls_of_one_name_in_different_sets() -> None:
    """The sets have no operation in common on which the ranks could compare the calls: the stall names both sets."""
    texts = run_ranks(call_in_different_sets, 3, stall_warn_s=3.0)
    for text in texts[:2]:
        assert "rank 0 is at test_torch_process_sets.py:" in text, text
        # The circle begins with the rank that has found it.
        assert "rank 1 is at test_torch_process_sets.py:" in text, text
        for set_of_one in ("ranks 0, 1", "ranks 0 to 2"):
            assert f"and waits for operation 'allreduce.loss', among {set_of_one}" in text, text
        assert ": a circle, in which each rank waits" in text, text
        assert "(rank 0: the set of ranks 0, 1; rank 1: the set of ranks 0 to 2)" in text, text
        assert "pass the same set on every rank" in text, text
    assert "'allreduce.loss'" in texts[2]  # nothing came from rank 0


def call_in_different_sets(here: Here) -> str:
    pair = mt.ProcessSet([0, 1])
    enter(process_sets=[pair])
    mt.barrier()
    with pytest.raises(StallError) as raised:
        mt.allreduce(torch.ones(1), name="loss", process_set=mt.global_process_set if here.rank else pair)
    time.sleep(1)  # the others may need a moment longer
    return str(raised.value)


def test_dynamic_sets() -> None:
    run_ranks(use_dynamic_sets, 3)


def use_dynamic_sets(here: Here) -> None:
    enter(process_sets="dynamic")
    first, second = mt.add_process_set([1, 0]), mt.add_process_set(mt.ProcessSet([2, 1]))
    assert (first.process_set_id, second.process_set_id) == (1, 2)
    for again in ([0, 1], [1, 0], [0, 1, 2]):
        with pytest.raises(ArgumentError, match="A process set with the same ranks"):
            mt.add_process_set(again)
    for strange in ([0, 3], [], [-1], [1, 1]):
        with pytest.raises(ArgumentError, match="want different ranks of the job, 0 to 2"):
            mt.add_process_set(strange)
    for kind in (1.5, [0.5], "ranks"):
        with pytest.raises(ArgumentError, match="list of process ranks"):
            mt.add_process_set(kind)
    # Operations may be in flight, and ranks may call in any order.
    handle = mt.allreduce_async(torch.ones(2), op=mt.Sum) if here.rank else None
    third = mt.add_process_set([0, 2])
    handle = mt.allreduce_async(torch.ones(2), op=mt.Sum) if handle is None else handle
    assert mt.synchronize(handle).tolist() == [3.0, 3.0]
    for group in (first, second, third):
        if group.included():
            assert mt.allreduce(torch.ones(1), op=mt.Sum, process_set=group).item() == 2.0
    assert mt.remove_process_set(first)
    assert (first.process_set_id, first.ranks) == (None, None)
    assert not mt.remove_process_set(first)
    assert not mt.remove_process_set(mt.global_process_set)
    with pytest.raises(ArgumentError, match="is not known"):
        mt.allreduce(torch.ones(1), process_set=first)
    with pytest.raises(ArgumentError, match="process_set=7: want a ProcessSet"):
        mt.allreduce(torch.ones(1), process_set=7)  # type: ignore[arg-type]
    assert mt.add_process_set([0]).process_set_id == 1  # the number is free again
    with pytest.raises(mt.HorovodInternalError, match=r"add_process_set\.4"):
        mt.add_process_set([1] if here.rank else [2])
    assert mt.add_process_set([2]).process_set_id == 4
    assert mt.allreduce(torch.ones(1), op=mt.Sum).item() == 3.0


def test_the_environment_makes_sets_dynamic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    for name in ("MULTIRING_RANK", "MULTIRING_SIZE"):
        monkeypatch.delenv(name, raising=False)
    mt.init()
    try:
        with pytest.raises(ArgumentError, match="same ranks"):
            mt.add_process_set([0])
    finally:
        mt.shutdown()
