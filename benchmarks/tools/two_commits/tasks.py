"""Define the tasks of main.py: saving, loading, reading and training.

The tasks use only interfaces that both commits have. Each task returns the timed call and a check. The check returns
the arrays that the call made, and their expected values, which are computed without multiring.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Pairs = list[tuple[Array, Array]]
Call = Callable[[int], object]
Sum = Callable[[Array], Array]
Check = Callable[[], tuple[Array, Array]]  # the result and the expected result

SAVED_SIDE = 4096  # 64 MiB of float32
SAMPLES, SAMPLE_FLOATS, BATCH = 2048, 1024, 32
STEPS, ROWS, WIDTH = 16, 32, 256


def joined(adapter: str) -> Any:
    """Join the job with an adapter's own `init`; return the adapter's module.

    The framework uses one thread.
    """
    if adapter == "torch":
        importlib.import_module("torch").set_num_threads(1)
    elif adapter in {"tensorflow", "keras"}:
        threading = importlib.import_module("tensorflow").config.threading
        threading.set_intra_op_parallelism_threads(1)
        threading.set_inter_op_parallelism_threads(1)
    made = importlib.import_module(f"multiring.{adapter}")
    made.init()
    return made


def adapter_call(adapter: str, mt: Any, pairs: Pairs) -> Call:
    """Return a function that sums with an adapter's eager, blocking collective.

    It copies the result to the buffer.
    """
    run = {"torch": _by_torch, "tensorflow": _by_tensorflow, "jax": _by_jax, "keras": _by_keras}.get(adapter)
    summed = mt.create_communicator().allreduce if run is None else run(mt)

    def call(index: int) -> None:
        taken, given = pairs[index]
        given[:] = summed(taken)

    return call


def _by_torch(mt: Any) -> Sum:
    torch = importlib.import_module("torch")
    return lambda array: mt.allreduce(torch.from_numpy(array), op=mt.Sum).numpy()


def _by_tensorflow(mt: Any) -> Sum:
    tensorflow = importlib.import_module("tensorflow")
    return lambda array: mt.allreduce(tensorflow.constant(array), op=mt.Sum).numpy()


def _by_jax(mt: Any) -> Sum:
    numpy = importlib.import_module("jax.numpy")
    allreduce = getattr(mt, "allreduce", None) or mt.all_reduce  # `all_reduce` in commits before 26 November 2026
    return lambda array: np.asarray(allreduce(numpy.array(array), mt.Sum))


def _by_keras(mt: Any) -> Sum:
    return lambda array: mt.allreduce(array, op=mt.Sum)


def saving(mt: Any, folder: Path) -> tuple[Call, Check]:
    """Save a model of 64 MiB repeatedly to the same path, as a training program does."""
    torch = importlib.import_module("torch")
    model, wanted = _large_model(torch)

    def check() -> tuple[Array, Array]:
        with torch.no_grad():
            model.weight.zero_()
        mt.load(str(folder / "saved"), model=model)
        return model.weight.detach().numpy(), wanted

    return lambda _: mt.save(str(folder / "saved"), model=model), check


def loading(mt: Any, folder: Path) -> tuple[Call, Check]:
    """Load a model of 64 MiB from a checkpoint."""
    torch = importlib.import_module("torch")
    model, wanted = _large_model(torch)
    mt.save(str(folder / "saved"), model=model)
    with torch.no_grad():
        model.weight.zero_()
    return lambda _: mt.load(str(folder / "saved"), model=model), lambda: (model.weight.detach().numpy(), wanted)


def _large_model(torch: Any) -> tuple[Any, Array]:
    wanted = np.random.default_rng(0).normal(size=(SAVED_SIDE, SAVED_SIDE)).astype(np.float32)
    model = torch.nn.Linear(SAVED_SIDE, SAVED_SIDE, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(wanted))
    return model, wanted


def feeding(group: Any, folder: Path, *, processes: bool) -> tuple[Call, Check]:
    """Read an epoch from a Loader with two workers: 8 MiB of samples in one file."""
    from multiring.data import Dataset, Loader, Workers  # noqa: PLC0415 -- the commit's, once the job has begun

    path = folder / f"samples-{group.rank}.npy"
    np.save(path, np.arange(SAMPLES * SAMPLE_FLOATS, dtype=np.float32).reshape(SAMPLES, SAMPLE_FLOATS))
    workers = Workers(2, processes=processes)
    loader = Loader(Dataset(str(path)), BATCH, rank=group.rank, ranks=group.size, workers=workers)
    seen: list[Array] = []

    def call(_: int) -> None:
        seen[:] = [next(iter(batch.values()))[:, 0].copy() for batch in loader]

    def check() -> tuple[Array, Array]:
        mine = (np.concatenate(seen) / SAMPLE_FLOATS).astype(np.int64)
        counts = np.bincount(mine, minlength=SAMPLES)
        group.all_reduce(counts)
        return counts, np.ones(SAMPLES, np.int64)  # all ranks together must read each sample once

    return call, check


def fitting(mk: Any, way: str) -> tuple[Call, Check]:
    """Train a small Keras model for an epoch, with `distribute` or as for Horovod."""
    keras = importlib.import_module("keras")
    random = np.random.default_rng(1)
    rows = STEPS * ROWS
    x, y = random.normal(size=(rows, WIDTH)).astype(np.float32), random.integers(0, 10, rows)
    layers = keras.layers
    model = keras.Sequential([keras.Input((WIDTH,)), *(layers.Dense(WIDTH) for _ in range(3)), layers.Dense(10)])
    optimizer = keras.optimizers.SGD(1e-3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    callbacks = []
    if way == "distribute":
        model = mk.distribute(model)
    else:
        x, y = x[mk.rank() :: mk.size()], y[mk.rank() :: mk.size()]
        optimizer = mk.DistributedOptimizer(optimizer)
        callbacks = [mk.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.compile(optimizer, loss)

    def call(_: int) -> None:
        model.fit(x, y, batch_size=ROWS, verbose=0, shuffle=False, callbacks=callbacks)

    return call, lambda: _alike(mk, np.concatenate([each.ravel() for each in model.get_weights()]))


def stepping(mt: Any) -> tuple[Call, Check]:
    """Take an SGD step of a small torch model with DistributedOptimizer."""
    torch = importlib.import_module("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = mt.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    mt.broadcast_parameters(model.state_dict(), root_rank=0)
    mt.broadcast_optimizer_state(optimizer, root_rank=0)
    generator = torch.Generator().manual_seed(mt.rank())
    x = torch.randn(ROWS, WIDTH, generator=generator)

    def call(_: int) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return call, lambda: _alike(mt, torch.cat([each.detach().ravel() for each in model.parameters()]).numpy())


def _alike(adapter: Any, mine: Array) -> tuple[Array, Array]:
    """Return this rank's numbers and rank 0's; they must be equal and finite."""
    first: Array = adapter.allgather_object(mine)[0] if adapter.size() > 1 else mine
    return mine, np.where(np.isfinite(first), first, np.float32(0))


# The tasks by manner. A task gets the adapter's module, the group of all ranks, and a folder shared by the ranks.
TASKS: dict[str, Callable[[Any, Any, Path], tuple[Call, Check]]] = {
    "save": lambda mt, _group, folder: saving(mt, folder),
    "load": lambda mt, _group, folder: loading(mt, folder),
    "loader threads": lambda _mt, group, folder: feeding(group, folder, processes=False),
    "loader processes": lambda _mt, group, folder: feeding(group, folder, processes=True),
    "fit distribute": lambda mt, _group, _folder: fitting(mt, "distribute"),
    "fit optimizer": lambda mt, _group, _folder: fitting(mt, "optimizer"),
    "step": lambda mt, _group, _folder: stepping(mt),
}
