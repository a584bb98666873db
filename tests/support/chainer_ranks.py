"""Jobs that ranks run in tests of multiring.chainer.

The jobs run in Chainer's own environment, which has no pytest.
"""

import importlib
import inspect
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import chainer
import numpy as np
from tests.support.nursery import Here

import multiring.chainer as mc
from multiring.errors import ArgumentError, MismatchError, UnsupportedError

chainer.disable_experimental_feature_warning = True
INTERFACE = Path(__file__).with_name("chainermn_interface.json")


def told(kind: type[Exception], call: Callable[[], object], words: str) -> None:
    """Check that `call` raises `kind` with a message that contains `words`."""
    found = ""
    try:
        call()
    except kind as error:
        found = str(error)
    assert words in found, (found, kind.__name__, words)


def everything(_here: Here) -> dict[str, int]:
    """Run all checks of this module in one job of three ranks.

    Returns:
        The count of ChainerMN's public names ("names"), and the count that multiring.chainer has ("served").
    """
    communicator = mc.create_communicator("naive")
    assert communicator.size == 3
    names()
    arrays(communicator)
    messages(communicator)
    objects(communicator)
    splits(communicator)
    models(communicator)
    distributing(communicator)
    double_buffering(communicator)
    with_chainermns_own(communicator)
    batch_normalization(communicator)
    mistakes(communicator)
    communicator.finalize()
    told(RuntimeError, lambda: communicator.rank, "was finalized")
    return inventory()


def inventory() -> dict[str, int]:
    """Compare multiring.chainer with ChainerMN's interface: names and parameters."""
    wanted = json.loads(INTERFACE.read_text(encoding="utf-8"))
    methods = wanted.pop("CommunicatorBase")
    counts = {"names": 0, "served": 0}
    for module, names in wanted.items():
        ours = importlib.import_module(module.replace("chainermn", "multiring.chainer"))
        for name, parameters in names.items():
            counts["names"] += 1
            found = getattr(ours, name)
            counts["served"] += 1
            if parameters != "module" and name not in {"DataSizeError", "CommunicatorBase"}:
                _same_parameters(f"{module}.{name}", found, parameters)
    for name, parameters in methods.items():
        counts["names"] += 1
        found = getattr(mc.Communicator, name)
        counts["served"] += 1
        if parameters == "property":
            assert isinstance(found, property), name
        else:
            _same_parameters(name, found, parameters)
    return counts


def _same_parameters(what: str, function: Any, wanted: list[str]) -> None:
    found = [name for name in inspect.signature(function).parameters if name != "self"]
    assert found[: len(wanted)] == [name.lstrip("*") for name in wanted], (what, found, wanted)


def names() -> None:
    for name in ("flat", "naive", "non_cuda_aware"):
        assert mc.create_communicator(name).size == 3
    for name in ("pure_nccl", "hierarchical", "two_dimensional", "single_node"):
        told(UnsupportedError, partial(mc.create_communicator, name), "write create_communicator('flat')")
    told(UnsupportedError, lambda: mc.create_communicator("dummy"), "would diverge")
    told(ArgumentError, lambda: mc.create_communicator("fast"), "Unrecognized communicator: 'fast'")
    told(UnsupportedError, lambda: mc.create_communicator(mpi_comm=3), "process_set=")
    told(ArgumentError, lambda: mc.create_communicator(speed=3), "['speed']")
    told(ArgumentError, lambda: mc.create_communicator(allreduce_grad_dtype="int8"), "allreduce_grad_dtype='int8'")
    told(UnsupportedError, lambda: mc.nccl.NcclCommunicator, "nccl.NcclCommunicator")


def arrays(comm: Any) -> None:
    own, ranks = comm.rank, range(comm.size)
    for dtype in ("float16", "float32", "float64", "int32", "int64"):
        mine = np.full((2, 3), own + 1, dtype)
        assert comm.allreduce(mine).tolist() == [[6] * 3] * 2
        assert comm.allreduce(mine).dtype == mine.dtype
        found = comm.bcast(mine if own == 1 else None, root=1)
        assert found.dtype == mine.dtype
        assert (found == 2).all()
        parts = comm.allgather(np.full((own, 2), own, dtype))
        assert [part.tolist() for part in parts] == [[[rank] * 2] * rank for rank in ranks]
        gathered = comm.gather(np.full(own + 1, own, dtype), root=2)
        if own == 2:
            assert [part.tolist() for part in gathered] == [[rank] * (rank + 1) for rank in ranks]
        else:
            assert gathered is None
        sent = tuple(np.full(rank + own, 10 * own + rank, dtype) for rank in ranks)
        received = comm.alltoall(sent)
        assert [part.tolist() for part in received] == [[10 * rank + own] * (rank + own) for rank in ranks]
        pieces = tuple(np.full(rank + 1, rank, dtype) for rank in ranks) if own == 0 else None
        assert comm.scatter(pieces).tolist() == [own] * (own + 1)
        rows = np.arange(6, dtype=dtype).reshape(3, 2) if own == 1 else None
        assert comm.scatter(rows, root=1).tolist() == [2 * own, 2 * own + 1]


def messages(comm: Any) -> None:
    own = comm.rank
    if own == 0:
        comm.send(np.arange(4.0), 1, 7)
        comm.send((np.ones((2, 2)), np.zeros(0, np.int32)), 1, 8)
        comm.send_obj({"a": 1}, 1, tag=9)
    elif own == 1:
        assert comm.recv_obj(0, tag=9) == {"a": 1}  # received before earlier messages with other tags
        first, second = comm.recv(0, 8)
        assert first.tolist() == [[1, 1], [1, 1]]
        assert second.dtype == np.int32
        assert comm.recv(0, 7).tolist() == [0, 1, 2, 3]


def objects(comm: Any) -> None:
    assert comm.bcast_obj("of one" if comm.rank == 1 else None, root=1) == "of one"
    assert comm.gather_obj(comm.rank) == ([0, 1, 2] if comm.rank == 0 else None)
    assert comm.allreduce_obj([comm.rank]) == [0, 1, 2]
    assert comm.batched_copy is comm.get_config("batched_copy") is True
    assert not mc.create_communicator(batched_copy=False).batched_copy
    comm.set_config("batched_copy", False)
    assert comm.get_config("batched_copy") is False
    told(ArgumentError, lambda: comm.set_config("speed"), "Unknown config: speed")
    assert (comm.intra_rank, comm.intra_size, comm.inter_rank, comm.inter_size) == (comm.rank, 3, 0, 1)


def splits(comm: Any) -> None:
    part = comm.split(comm.rank % 2, -comm.rank)  # the parts are ranks (2, 0) and rank 1
    assert part.size == (1 if comm.rank == 1 else 2)
    assert part.rank == {0: 1, 1: 0, 2: 0}[comm.rank]
    assert part.allreduce_obj([comm.rank]) == ([1] if comm.rank == 1 else [2, 0])
    assert part.allreduce(np.ones(2)).tolist() == [part.size] * 2
    assert part.bcast(np.full(2, comm.rank), root=0).tolist() == [1 if comm.rank == 1 else 2] * 2


def _model(value: float) -> Any:
    return chainer.Chain(
        first=chainer.links.Linear(3, 2, initialW=value, initial_bias=0), spare=chainer.links.Linear(None, 2)
    )


def models(comm: Any) -> None:
    model = _model(comm.rank + 1)
    comm.bcast_data(model)
    assert (model.first.W.array == 1).all()
    model.first.W.grad = np.full((2, 3), comm.rank, np.float32)
    model.first.b.grad = None
    comm.multi_node_mean_grad(model, zero_fill=False)
    assert (model.first.W.grad == 1).all()
    found: Any = model.first.b.grad
    assert found is None
    comm.multi_node_mean_grad(model, zero_fill=True)
    found = model.first.b.grad
    assert found.tolist() == [0, 0]
    model.spare(np.zeros((1, 4), np.float32))  # the call gives the layer its shape, which changes the model
    model.first.W.grad = np.full((2, 3), comm.rank, np.float32)
    comm.multi_node_mean_grad(model, zero_fill=True)
    assert (model.first.W.grad == 1).all()
    short = mc.create_communicator("flat", allreduce_grad_dtype=np.float16)
    model.first.W.grad = np.full((2, 3), comm.rank, np.float32)
    short.multi_node_mean_grad(model, zero_fill=True)
    assert (model.first.W.grad == 1).all()
    other = chainer.links.Linear(3, 2 + (comm.rank == 1))
    told(MismatchError, lambda: comm.bcast_data(other), "the ranks differ")
    with chainer.using_config("debug", True):
        model.first.W.grad[...] = np.nan if comm.rank == 2 else 0
        told(ValueError, lambda: comm.multi_node_mean_grad(model), "not finite")


def distributing(comm: Any) -> None:
    for compression, buffered in (("none", False), (mc.Compression.fp16, True)):
        model = chainer.links.Linear(1, 1, initialW=float(comm.rank), nobias=True)
        optimizer = mc.distribute(chainer.optimizers.SGD(1.0), compression=compression, double_buffering=buffered)
        optimizer.setup(model)
        for _ in range(2 + buffered):
            optimizer.update(lambda model=model: chainer.functions.sum(model.W * np.float32(comm.rank)))
        assert model.W.array.tolist() == [[-1.0]]
    told(UnsupportedError, lambda: mc.distribute(chainer.optimizers.SGD(1.0), compression="int8"), "want none or fp16")
    told(ArgumentError, lambda: mc.distribute(chainer.optimizers.SGD(1.0), compression="int4"), "want one of none")
    assert mc.allreduce(np.ones(2) * comm.rank).tolist() == [1.0, 1.0]
    assert mc.gather([comm.rank]) == [0, 1, 2]


def double_buffering(comm: Any) -> None:
    model = chainer.links.Linear(1, 1, initialW=float(comm.rank), nobias=True)
    optimizer = mc.create_multi_node_optimizer(chainer.optimizers.SGD(1.0), comm, double_buffering=True)
    optimizer.setup(model)

    def loss(slope: float) -> Any:
        return chainer.functions.sum(model.W * np.float32(slope))

    seen = []
    for step in range(5):
        optimizer.update(loss, float(step + comm.rank))
        seen.append(float(model.W.array[0, 0]))
    # The first update broadcasts the model. The second only starts a reduction. Each later update applies the reduction
    # that the previous update started.
    means = [step + 1 for step in range(5)]
    assert seen == [0, 0, -means[1], -means[1] - means[2], -means[1] - means[2] - means[3]], seen
    assert optimizer.lr == 1.0
    optimizer.lr = 0.5
    assert optimizer.actual_optimizer.lr == 0.5


def with_chainermns_own(comm: Any) -> None:
    """ChainerMN's helpers for any communicator work with multiring's."""
    data = mc.scatter_dataset(list(range(10)) if comm.rank == 0 else None, comm, shuffle=True, seed=1)
    lengths = comm.allreduce_obj([len(data)])
    assert lengths == [4, 4, 4]
    assert set(comm.allreduce_obj(list(data))) == set(range(10))
    begin, end = mc.scatter_index(9, comm)
    assert (begin, end) == (3 * comm.rank, 3 * comm.rank + 3)
    rows = [np.full(2, row, np.float32) for row in range(6)]
    iterator = chainer.iterators.SerialIterator(rows, 2, shuffle=True)
    same = mc.iterators.create_multi_node_iterator(iterator, comm)
    batches = comm.gather_obj(np.array(same.next()).tolist())
    assert comm.rank or batches == [batches[0]] * 3
    synchronized = mc.iterators.create_synchronized_iterator(
        chainer.iterators.SerialIterator(list(range(6)), 2, shuffle=True), comm
    )
    batches = comm.gather_obj(synchronized.next())
    assert comm.rank or batches == [batches[0]] * 3

    class Evaluator(chainer.training.extensions.Evaluator):  # type: ignore[misc] # Chainer has no types
        def evaluate(self) -> Any:
            return {"main/loss": float(comm.rank)}

    evaluator = Evaluator(chainer.iterators.SerialIterator([1], 1, repeat=False), chainer.links.Linear(1, 1))
    assert mc.create_multi_node_evaluator(evaluator, comm).evaluate() == {"main/loss": 1.0}

    # The communication functions propagate gradients.
    own = chainer.Variable(np.full(2, comm.rank + 1.0, np.float32))
    found = mc.functions.allgather(comm, own)
    chainer.functions.sum(sum(each * (rank + 1) for rank, each in enumerate(found))).backward()
    assert own.grad.tolist() == [3.0 * (comm.rank + 1)] * 2
    own.cleargrad()
    chainer.functions.sum(mc.functions.allreduce(comm, own) * (comm.rank + 1)).backward()
    assert own.grad.tolist() == [6.0, 6.0]
    told(ArgumentError, lambda: mc.functions.allreduce(comm, own, "max"), "want 'sum' or 'average'")
    if comm.rank == 0:
        own.cleargrad()
        mc.functions.send(own, comm, 1).backward()
        assert own.grad.tolist() == [4.0, 4.0]
    elif comm.rank == 1:
        received = mc.functions.recv(comm, 0)
        chainer.functions.sum(received * 4).backward()
    model = chainer.Chain(norm=chainer.links.BatchNormalization(2))
    model.norm.avg_mean[...] = comm.rank
    mc.extensions.AllreducePersistent(model, comm)()
    assert model.norm.avg_mean.tolist() == [1.0, 1.0]


def batch_normalization(comm: Any) -> None:
    """Results and gradients equal those of one process with the whole batch."""
    whole = np.random.RandomState(3).standard_normal((6, 4)).astype(np.float32)
    slopes = np.random.RandomState(4).standard_normal((6, 4)).astype(np.float32)
    alone = chainer.links.BatchNormalization(4)
    everyone = chainer.Variable(whole)
    wanted = alone(everyone)
    chainer.functions.sum(wanted * slopes).backward()
    mine = slice(2 * comm.rank, 2 * comm.rank + 2)
    for link in (
        mc.links.MultiNodeBatchNormalization(4, comm),
        mc.links.create_mnbn_model(chainer.links.BatchNormalization(4), comm),
    ):
        own = chainer.Variable(whole[mine])
        found = link(own)
        chainer.functions.sum(found * slopes[mine]).backward()
        np.testing.assert_allclose(found.array, wanted.array[mine], atol=1e-5)
        np.testing.assert_allclose(link.avg_mean, alone.avg_mean, atol=1e-6)
        np.testing.assert_allclose(own.grad, everyone.grad[mine], atol=1e-4)
    told(
        UnsupportedError,
        lambda: mc.links.MultiNodeBatchNormalization(4, comm, communication_backend="nccl"),
        "want 'auto' or 'mpi'",
    )


def mistakes(comm: Any) -> None:
    told(ArgumentError, lambda: comm.allreduce((np.ones(2), np.ones(2))), "want a NumPy array")
    told(ArgumentError, lambda: comm.alltoall((np.ones(2),)), "want 3, one for each rank")
    told(ArgumentError, lambda: comm.scatter((np.ones(2),) * 2 if comm.rank == 0 else None), "want 3, one for each")
    told(MismatchError, lambda: comm.allgather(np.ones(2, "f4" if comm.rank else "f8")), "different types")
    told(
        ArgumentError,
        lambda: mc.create_multi_node_optimizer(chainer.optimizers.SGD(), object(), double_buffering=True),
        "want a communicator from multiring.chainer.create_communicator",
    )
    assert comm.allreduce(np.ones(1)).tolist() == [3]
