"""Run random cases of the adapters, apart from Keras' `fit`.

benchmarks/evidence/keras/main.py adds these families. The expected result comes from NumPy, from the same function
without a transformation, or from the names in Horovod 0.28.1. All ranks draw the same case, so each rank can compute
the contributions of the others.
"""

import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.evidence.jobs.job import ROOT
from benchmarks.evidence.support.cases import Family, Fault, Random
from benchmarks.evidence.support.former import jax_allreduce

WHOLE = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
TYPES = (*WHOLE, "float16", "float32", "float64", "complex64", "complex128")
# The time limit for the error if ranks wait for different names. On a quiet machine it takes half a second.
IN_TIME_S = 15.0


def brought(random: Random, dtype: str, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return a random contribution of a rank.

    Integers span the whole range of their type. Other numbers are small integers, which every type adds exactly.
    """
    if dtype in WHOLE:
        limits = np.iinfo(dtype)
        small = random.integers(0 if dtype.startswith("u") else -40, 40, shape).astype(dtype)
        large = random.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)
        return np.asarray(np.where(random.random(shape) < 0.5, small, large).astype(dtype))
    found = random.integers(-20, 20, shape) + (1j * random.integers(-20, 20, shape) if dtype.startswith("c") else 0)
    return np.asarray(found.astype(dtype))


def combined(every: Sequence[np.ndarray[Any, Any]], op: str) -> np.ndarray[Any, Any]:
    """Return the wrapping sum, or the average rounded toward zero for integers."""
    dtype = every[0].dtype
    if dtype.kind not in "iu":
        total = np.sum([each.astype(np.complex128 if dtype.kind == "c" else np.float64) for each in every], 0)
        return np.asarray((total / len(every) if op == "Average" else total).astype(dtype))
    if op == "Sum":
        return np.asarray(np.sum(every, 0, dtype=dtype))
    sums = np.asarray(np.stack([each.astype(object) for each in every]).sum(0))
    whole = [abs(each) // len(every) * (-1 if each < 0 else 1) for each in sums.reshape(-1)]
    return np.asarray(np.array(whole, dtype).reshape(every[0].shape))


def unlike(found: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> bool:
    """Return whether a result differs from the expected result."""
    if found.shape != want.shape or found.dtype != want.dtype:
        return True
    exact = want.dtype.kind in "iu"
    return not (np.array_equal(found, want) if exact else np.allclose(found, want, rtol=1e-2, atol=1e-2))


# ---- values of TensorFlow and Chainer's arrays ----


@cache
def tensorflow() -> tuple[Any, Any]:
    """Join the job; return TensorFlow and its adapter."""
    tf: Any = importlib.import_module("tensorflow")
    adapter: Any = importlib.import_module("multiring.tensorflow")
    adapter.init()
    return tf, adapter


def tensorflow_values(random: Random, _folder: Path) -> Iterator[Fault]:
    """Run a random collective on a random tensor, eagerly or in a graph."""
    tf, mt = tensorflow()
    call = str(random.choice(["allreduce", "reducescatter", "allgather", "grouped_allreduce"]))
    dtype, op = str(random.choice(TYPES)), str(random.choice(["Sum", "Average"]))
    shape = tuple(int(each) for each in random.integers(0, 5, random.integers(1, 4)))
    if random.random() < 0.3:
        shape = (int(random.integers(1, 4)), 0) if random.random() < 0.5 else (0, *shape[1:])
    every = [brought(random, dtype, shape) for _ in range(mt.size())]
    own = tf.constant(every[mt.rank()], dtype=dtype)

    def run() -> Any:
        if call == "allgather":
            return mt.allgather(own)
        if call == "grouped_allreduce":
            return mt.grouped_allreduce([own, own], op=getattr(mt, op))[1]
        return getattr(mt, call)(own, op=getattr(mt, op))

    want = np.concatenate(every) if call == "allgather" else combined(every, op)
    if call == "reducescatter":
        rows = [shape[0] // mt.size() + (rank < shape[0] % mt.size()) for rank in range(mt.size())]
        want = np.split(want, np.cumsum(rows)[:-1])[mt.rank()]
    what = f"{call} {op} of {dtype} {shape}"
    kind = f"{'complex' if dtype.startswith('c') else dtype}{' without elements' if 0 in shape else ''}"
    try:
        found = (tf.function(run) if random.random() < 0.3 else run)().numpy()
    except (tf.errors.OpError, ValueError, TypeError) as error:
        yield Fault(f"tensorflow: {kind} refused", f"{what}: {error}")
        return
    if unlike(found, want):
        yield Fault(f"tensorflow: {kind} wrong", f"{what}: {found.tolist()}, want {want.tolist()}")


def array_values(random: Random, _folder: Path) -> Iterator[Fault]:
    """Run the collectives for NumPy arrays, in any byte order and with any strides.

    The adapters of Chainer, Caffe and Keras use these collectives.
    """
    arrays, lifecycle = joined_arrays()
    dtype, op = str(random.choice(TYPES)), str(random.choice(["Sum", "Average"]))
    shape = tuple(int(each) for each in random.integers(0, 5, random.integers(0, 4)))
    every = [brought(random, dtype, shape) for _ in range(lifecycle.size())]
    own = every[lifecycle.rank()]
    if random.random() < 0.3:
        own = own.astype(own.dtype.newbyteorder())
    if random.random() < 0.3:
        own = np.array(own, order="F")
    found, want = arrays.allreduce(own, op.lower()), combined(every, op)
    if unlike(found.astype(found.dtype.newbyteorder("=")), want):
        yield Fault(f"arrays: {dtype} wrong", f"{op} of {own.dtype} {shape}: {found.tolist()}, want {want.tolist()}")


@cache
def joined_arrays() -> tuple[Any, Any]:
    """Join the job; return the array collectives and the module with rank and size."""
    lifecycle: Any = importlib.import_module("multiring._frontend.lifecycle")
    lifecycle.init()
    return importlib.import_module("multiring._frontend.array_collectives"), lifecycle


# ---- JAX ----


@cache
def jax() -> tuple[Any, Any]:
    """Join the job; return JAX and its adapter."""
    library: Any = importlib.import_module("jax")
    adapter: Any = importlib.import_module("multiring.jax")
    adapter.init()
    return library, adapter


def jax_transformations(random: Random, _folder: Path) -> Iterator[Fault]:
    """Compare a function with collectives before and after a chain of transformations."""
    library, mj = jax()
    jnp, lax = library.numpy, library.lax
    op = str(random.choice(["average", "sum"]))
    scale = float(random.uniform(0.2, 1.0))

    def step(w: Any) -> Any:
        return jnp.tanh(jax_allreduce()(jnp.sin(w * (mj.rank() + 1.0)), op) * w * scale)

    around: dict[str, Callable[[Any], Any]] = {
        "checkpoint": library.checkpoint,
        "jit": library.jit,
        "scan": lambda of: lambda w: lax.scan(lambda c, _: (of(c), None), w, None, length=1)[0],
        "loop": lambda of: lambda w: lax.fori_loop(0, 1, lambda _, c: of(c), w),
        "branch": lambda of: lambda w: lax.cond(w.sum() > -1e9, of, lambda w: w, w),
        "vmap": lambda of: lambda w: library.vmap(of)(w[None])[0],
    }
    chain = [str(each) for each in random.choice(list(around), random.integers(1, 4))]
    function = step
    for name in chain:
        function = around[name](function)
    way = str(random.choice(["value", "grad", "jit grad"]))
    at = jnp.asarray(random.normal(size=int(random.integers(1, 5))).astype(np.float32))

    def seen(of: Any, *, compiled: bool) -> Any:
        if way != "value":
            of = library.grad(lambda w, of=of: (of(w) ** 2).sum())
        return (library.jit(of) if compiled else of)(at)

    culprit = "checkpoint" if "checkpoint" in chain else "others"
    try:
        found = seen(function, compiled=way == "jit grad")
    except (NotImplementedError, TypeError, ValueError) as error:
        yield Fault(f"jax: {culprit} refused by {type(error).__name__}", f"{chain}, {way}: {error}")
        return
    want = seen(step, compiled=False)
    if not np.allclose(found, want, atol=1e-4):
        yield Fault(f"jax: {culprit} wrong", f"{chain}, {way}: {found}, want {want}")


def jax_threads(random: Random, _folder: Path) -> Iterator[Fault]:
    """Run named calls in threads that start in a different order on each rank."""
    library, mj = jax()
    threads, calls = int(random.integers(2, 9)), int(random.integers(1, 4))
    orders = [random.permutation(threads) for _ in range(mj.size())]
    found: dict[tuple[int, int], float] = {}
    mark = int(random.integers(1 << 30))

    def run(number: int) -> None:
        for call in range(calls):
            own = library.numpy.float32(mj.rank() + 2 * number + call)
            found[number, call] = float(jax_allreduce()(own, "sum", name=f"{mark} {number} {call}"))

    started = [threading.Thread(target=run, args=(int(number),), daemon=True) for number in orders[mj.rank()]]
    for each in started:
        each.start()
    for each in started:
        each.join()
    ranks = range(mj.size())
    want = {
        (number, call): float(sum(rank + 2 * number + call for rank in ranks))
        for number in range(threads)
        for call in range(calls)
    }
    if found != want:
        yield Fault("jax: threads wrong", f"{found}, want {want}")


# ---- ranks that wait for each other in native code ----


def apart(random: Random, adapter: Any, call: Callable[[str], object]) -> Iterator[Fault]:
    """Make the ranks wait for different names.

    Each rank must get an error in time, and the error must list all the names.
    """
    names = [str(each) for each in random.choice(["left", "right", "third"], adapter.size())]
    if len(set(names)) == 1:
        names[0] = "alone"
    mark, began_s = int(random.integers(1 << 30)), time.monotonic()
    time.sleep(float(random.uniform(0, 0.3)) * adapter.rank())
    own = f"{names[adapter.rank()]} {mark}"
    try:
        call(own)
    except Exception as error:  # noqa: BLE001 -- each framework has its own
        text, kind = str(error), type(adapter.error_of(error)).__name__
    else:
        yield Fault("standoff: no error", f"rank {adapter.rank()} waited for {own!r} with {names}")
        return
    seconds = time.monotonic() - began_s
    if not kind.startswith("Stall") or seconds > IN_TIME_S:
        yield Fault("standoff: late or another error", f"{kind} after {seconds:.1f} s: {text}")
    told = [f"{name} {mark}" for name in set(names) if f"{name} {mark}'" in text]
    if len(told) != len(set(names)):
        yield Fault("standoff: the verdict is not whole", f"{names}: {text}")


def tensorflow_standoffs(random: Random, _folder: Path) -> Iterator[Fault]:
    """Make ranks wait for different names in TensorFlow, eagerly or in a graph."""
    tf, mt = tensorflow()
    mt.allreduce(tf.constant(1.0), name=f"together {random.integers(1 << 30)}")
    in_graph = random.random() < 0.5

    def call(name: str) -> object:
        run: Any = lambda: mt.allreduce(tf.constant(1.0), name=name)  # noqa: E731 -- avoids another named function
        return (tf.function(run) if in_graph else run)()

    yield from apart(random, mt, call)


def jax_standoffs(random: Random, _folder: Path) -> Iterator[Fault]:
    """Make ranks wait for different names in JAX, eagerly or compiled."""
    library, mj = jax()
    jax_allreduce()(library.numpy.ones(2), name=f"together {random.integers(1 << 30)}").block_until_ready()
    compiled = random.random() < 0.5

    def call(name: str) -> object:
        run: Any = lambda x: jax_allreduce()(x, name=name)  # noqa: E731 -- avoids another named function
        return library.block_until_ready((library.jit(run) if compiled else run)(library.numpy.ones(2)))

    yield from apart(random, mj, call)


# ---- programs for Horovod ----

# These are names that Horovod 0.28.1's TensorFlow modules offer.
HOROVOD = {
    "horovod.tensorflow": (
        *("allreduce", "allgather", "broadcast", "alltoall", "join", "Compression", "DistributedGradientTape"),
        *("broadcast_variables", "_executing_eagerly", "_make_subgraph", "vars_to_refs", "refs_to_vars", "size_op"),
    ),
    "horovod.tensorflow.mpi_ops": ("_basics", "init", "rank", "ProcessSet", "handle_average_backwards_compatibility"),
    "horovod.tensorflow.util": ("_executing_eagerly", "_cache", "_make_subgraph", "vars_to_refs", "refs_to_vars"),
    "horovod.tensorflow.functions": ("broadcast_object", "allgather_object", "broadcast_variables"),
    "horovod.common.basics": ("HorovodBasics",),
    "horovod.common.util": ("num_rank_is_power_2", "split_list", "gpu_available", "check_extension"),
}


@cache
def horovod() -> tuple[Any, Any]:
    """Join the job like a Horovod program; return TensorFlow and Horovod's Keras module."""
    found: Any = importlib.import_module("multiring")
    sys.path.insert(0, str(Path(found.__file__).parent / "horovod" / "onpath"))
    hvd: Any = importlib.import_module("horovod.tensorflow.keras")
    hvd.init()
    return importlib.import_module("tensorflow"), hvd


def horovod_names(random: Random, _folder: Path) -> Iterator[Fault]:
    """Check that some names exist which Horovod's own programs use."""
    horovod()
    module = str(random.choice(list(HOROVOD)))
    names = [str(each) for each in random.choice(HOROVOD[module], min(4, len(HOROVOD[module])), replace=False)]
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        yield Fault(f"horovod: no module {module}", str(error))
        return
    for name in names:
        if not hasattr(found, name):
            yield Fault(f"horovod: {module} lacks {name}", f"{module}.{name}")


def horovod_keras(random: Random, _folder: Path) -> Iterator[Fault]:
    """Check that horovod.tensorflow.keras returns tensors with the right values."""
    tf, hvd = horovod()
    dtype = str(random.choice(["int32", "int64", "float32", "float64"]))
    shape = tuple(int(each) for each in random.integers(1, 4, random.integers(1, 3)))
    every = [brought(random, dtype, shape) for _ in range(hvd.size())]
    own: Any = every[hvd.rank()]
    given = own if random.random() < 0.5 else tf.constant(own)
    name = str(random.choice(["allreduce", "allgather", "broadcast"]))
    if name == "allreduce":
        found, want = hvd.allreduce(given), combined(every, "Average")
    elif name == "allgather":
        found, want = hvd.allgather(given), np.concatenate(every)
    else:
        found, want = hvd.broadcast(given, hvd.size() - 1), every[-1]
    if not tf.is_tensor(found):
        yield Fault("horovod keras: no tensor", f"{name}: {type(found)}")
    if unlike(np.asarray(found), want):
        yield Fault("horovod keras: wrong", f"{name} of {dtype} {shape}: {found}, want {want}")


# ---- Caffe, on the stand-in ----

NET = """
layer {{ name: "in" type: "{kind}" top: "data" top: "label" {param} {{ source: "{source}" batch_size: {batch} }} }}
layer {{ name: "last" type: "InnerProduct" bottom: "data" top: "scores"
  inner_product_param {{ num_output: 3 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "scores" bottom: "label" top: "loss" }}
"""


@cache
def caffe() -> tuple[Any, Any]:
    """Join the job; return the stand-in for Caffe and the adapter."""
    sys.path.insert(0, str(ROOT / "tests" / "support" / "caffe_standin"))
    found: Any = importlib.import_module("caffe")
    adapter: Any = importlib.import_module("multiring.caffe")
    adapter.init()
    return found, adapter


def caffe_solvers(random: Random, folder: Path) -> Iterator[Fault]:
    """Run steps, `solve` and snapshots in random order.

    Each rank has its own records. Only rank 0 may write.
    """
    library, mc = caffe()
    count, batch, last = (int(each) for each in random.integers((8, 1, 2), (20, 4, 6)))
    kind = str(random.choice(["Data", "HDF5Data"]))
    param = "data_param" if kind == "Data" else "hdf5_data_param"
    own = folder / f"rank{mc.rank()}"
    own.mkdir()
    np.savez(own / "records.npz", data=random.normal(size=(count, 4)).astype(np.float32), label=np.arange(count) % 3)
    text = NET.format(kind=kind, param=param, source=own / "records.npz", batch=batch)
    (own / "net.prototxt").write_text(text, encoding="utf-8")
    lines = [
        f'net: "{own / "net.prototxt"}"',
        "base_lr: 0.1",
        f"max_iter: {last}",
        f'snapshot_prefix: "{own / "kept"}"',
    ]
    (own / "solver.prototxt").write_text("\n".join([*lines, 'lr_policy: "fixed"']) + "\n", encoding="utf-8")
    solver = mc.distribute(library.get_solver(str(own / "solver.prototxt")))
    for act in random.choice(["step", "solve", "snapshot"], 3):
        try:
            if act == "step":
                solver.step(1)
            elif act == "snapshot":
                solver.snapshot()
            else:
                solver.solve()
        except AssertionError as error:
            yield Fault(f"caffe: {act} aborts", f"rank {mc.rank()}: {error}")
            if act == "solve":  # makes this rank's remaining steps, so the other ranks can continue
                solver.step(max(0, last - solver.iter))
    weights = mc.allgather(solver.net.params["last"][0].data[None])
    if (weights != weights[:1]).any():
        yield Fault("caffe: ranks differ", f"after {solver.iter} steps")
    if mc.rank() and list(own.glob("kept_*")):
        yield Fault("caffe: a rank but the first writes", str(sorted(own.glob("kept_*"))))


CPU = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
# with this setting, a report that takes 10 s by default takes half a second
IMPATIENT = {**CPU, "MULTIRING_STALL_WARN_S": "3"}
FRAMEWORKS: list[Family] = [
    Family(name="tensorflow_values", run=tensorflow_values, ranks=3, variables=CPU),
    Family(name="array_values", run=array_values, ranks=3),
    Family(name="jax_transformations", run=jax_transformations, ranks=2, variables=CPU),
    Family(name="jax_threads", run=jax_threads, ranks=2, variables=CPU, deadline_s=45.0),
    Family(name="tensorflow_standoffs", run=tensorflow_standoffs, ranks=2, variables=IMPATIENT, deadline_s=45.0),
    Family(name="jax_standoffs", run=jax_standoffs, ranks=3, variables=IMPATIENT, deadline_s=45.0),
    Family(name="horovod_names", run=horovod_names, ranks=1, variables=CPU),
    Family(name="horovod_keras", run=horovod_keras, ranks=2, variables={**CPU, "KERAS_BACKEND": "tensorflow"}),
    Family(name="caffe_solvers", run=caffe_solvers, ranks=2),
]
# For each program of the topic, the signs that only its fault can cause.
SHOWS_FRAMEWORKS: dict[str, Sequence[str]] = {
    "fw_01_hvd_keras_numpy.py": ["horovod keras: no tensor"],
    "fw_02_zero_complex.py": ["tensorflow: complex without elements refused"],
    "fw_03_jax_threads.py": ["jax_threads: hang"],
    "fw_04_tf_standoff.py": ["tensorflow_standoffs: hang", "standoff: late or another error"],
    "fw_11_caffe_real.py": ["caffe: solve aborts", "caffe: snapshot aborts"],
    "fw_12_jax_remat.py": ["jax: checkpoint refused by NotImplementedError"],
    "fw_14_hvd_private.py": [
        "horovod: no module horovod.tensorflow.util",
        "horovod: horovod.tensorflow lacks _executing_eagerly",
        "horovod: horovod.tensorflow.mpi_ops lacks _basics",
    ],
}
