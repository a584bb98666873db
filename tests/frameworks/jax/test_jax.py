"""JAX: eager and compiled collectives, gradients, errors, and equal loss curves."""

import importlib
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.support.faults import kill
from tests.support.later import framework
from tests.support.ranks import Here, Process, report_of, run_ranks

import multiring
from multiring.errors import ArgumentError

jax = framework("jax")
mj = framework("multiring.jax")
jnp = framework("jax.numpy")
PATIENT_S = 240.0  # compilation is slow on few cores
COMPILED = ("float32", "bfloat16", "int32", "bool")
TYPES = ("float32", "float64", "bfloat16", "float16", "int8", "int32", "uint8", "int64", "bool", "complex64")


def enter(_here: Here) -> None:
    jax.config.update("jax_enable_x64", True)
    mj.init()


def filled(shape: tuple[int, ...], value: int, dtype: str) -> Any:
    """Return an array made by NumPy.

    JAX would compile a program for each shape and type.
    """
    return jnp.asarray(np.full(shape, value).astype(jnp.dtype(dtype)))


def values(here: Here, dtypes: tuple[str, ...]) -> None:
    enter(here)
    ranks, own = here.size, here.rank
    for dtype in dtypes:
        for wrapped in (lambda function: function, *([jax.jit] if dtype in COMPILED else [])):
            shapes = [(3, 4), (), (0, 2), (1000,)] if dtype in COMPILED else [(3, 4)]  # every rank compiles each shape
            mine = [filled(shape, own + 1, dtype) for shape in shapes]
            if dtype != "bool":
                summed = wrapped(lambda tree: mj.allreduce(tree, mj.Sum))(mine)
                assert all(str(each.dtype) == dtype for each in summed)
                assert all((np.asarray(each) == sum(range(1, ranks + 1))).all() for each in summed)
                average = wrapped(mj.allreduce)({"a": mine[0]})["a"]
                wanted = np.asarray((ranks + 1) / 2).astype(average.dtype)
                assert (np.asarray(average) == wanted).all(), (dtype, average)
            sent = wrapped(lambda tree: mj.broadcast(tree, 1))(
                [filled(shape, own * (own + 1), dtype) for shape in shapes]
            )
            assert all((np.asarray(each) == np.full((), 2).astype(each.dtype)).all() for each in sent)
            rows = wrapped(mj.allgather)(filled((2, 3), own, dtype))
            assert np.asarray(rows[:, 0]).tolist() == np.repeat(np.arange(ranks), 2).astype(rows.dtype).tolist()
            swapped = wrapped(mj.alltoall)(jnp.asarray((np.arange(2 * ranks) + 10 * own).astype(jnp.dtype(dtype))))
            found = np.concatenate([(np.arange(2) + 2 * own + 10 * rank) for rank in range(ranks)])
            assert np.asarray(swapped).tolist() == found.astype(swapped.dtype).tolist()
    whole = jnp.arange(2.0 * ranks)
    assert mj.reducescatter(whole, mj.Sum).tolist() == [ranks * 2.0 * own, ranks * (2.0 * own + 1)]
    assert mj.reducescatter(whole).tolist() == [2.0 * own, 2.0 * own + 1]
    assert mj.allreduce(jnp.array([own, -own]), "max").tolist() == [ranks - 1, 0]
    batched = jax.vmap(lambda each: mj.allreduce(each, "sum"))(jnp.ones((5, 2)) * own)
    assert (batched == sum(range(ranks))).all()
    assert batched.shape == (5, 2)


@pytest.mark.parametrize(("engine", "dtypes"), [("shm", TYPES), ("tcp", ("float32", "bool"))])
def test_results_are_numpys(engine: str, dtypes: tuple[str, ...]) -> None:
    run_ranks(values, 3, dtypes, engine=engine, deadline_s=PATIENT_S)


def differentiate(here: Here) -> None:
    enter(here)
    ranks, own = here.size, here.rank
    weights = jnp.arange(4.0) + own  # different on each rank

    def gradient_of(function: Any, argument: Any) -> list[float]:
        found: list[float] = jax.jit(jax.grad(lambda each: (function(each) * weights).sum()))(argument).tolist()
        return found

    total = [ranks * k + sum(range(ranks)) for k in range(4)]
    assert gradient_of(lambda each: mj.allreduce(each, "sum"), jnp.ones(4)) == total
    assert gradient_of(mj.allreduce, jnp.ones(4)) == [each / ranks for each in total]
    assert gradient_of(lambda each: mj.broadcast(each, 0), jnp.ones(4)) == (
        [each / ranks for each in total] if own == 0 else [0] * 4
    )
    assert gradient_of(mj.allgather, jnp.ones(4 // ranks)) == total[4 // ranks * own :][: 4 // ranks]
    assert gradient_of(mj.reducescatter, jnp.ones(4 * ranks)) == [
        (k + rank) / ranks for rank in range(ranks) for k in range(4)
    ]
    # A gradient of a gradient: the second derivative of y^3 is 12 at y = 2, and the sum over the ranks multiplies it by
    # their number.
    second = jax.grad(jax.grad(lambda y: mj.allreduce(y**3, "sum")))(2.0)
    assert second == pytest.approx(12.0 * ranks)

    save_and_gather(own)


@dataclass
class Whole:
    """A pytree with a function as a static field, as flax's TrainState has."""

    array: Any
    function: Any


def save_and_gather(own: int) -> None:
    """Save a pytree with an optimizer's state; load it; gather rows; join."""
    optax = importlib.import_module("optax")
    jax.tree_util.register_dataclass(Whole, data_fields=["array"], meta_fields=["function"])
    here = {"w": jnp.arange(6.0).reshape(2, 3).astype(jnp.bfloat16), "b": [jnp.float32(3), jnp.zeros((0, 2), jnp.int8)]}
    state = optax.adam(1e-3).init(here)
    with tempfile.TemporaryDirectory() as made:
        folder = mj.broadcast_object(f"{made}/last")
        # optax.sgd's state has no leaves. A static field, such as a function, may differ between processes.
        plain, whole = optax.sgd(0.1).init(here), Whole(jnp.ones(2), lambda: None)
        mj.save(folder, parameters=here, state=state, plain=plain, whole=whole, step=7, note={"best": None}, own=own)
        blank = jax.tree.map(jnp.zeros_like, (here, state))
        other = Whole(jnp.zeros(2), lambda: None)
        found = mj.load(folder, parameters=blank[0], state=blank[1], plain=plain, whole=other, step=0)
        assert found["plain"] == plain
        assert (found["whole"].array.tolist(), found["whole"].function) == ([1.0, 1.0], other.function)
        for wrong in ({"w": here["w"]}, {**here, "w": here["w"].astype(jnp.float32)}):
            with pytest.raises(ArgumentError, match="and the checkpoint has"):
                mj.load(folder, parameters=wrong)
        mj.barrier()
    assert (found["step"], found["note"], found["own"]) == (7, {"best": None}, own)
    assert jax.tree.structure(found["state"]) == jax.tree.structure(state)
    loaded_leaves, saved_leaves = jax.tree.leaves([found["parameters"], found["state"]]), jax.tree.leaves([here, state])
    for loaded, saved in zip(loaded_leaves, saved_leaves, strict=True):
        assert loaded.dtype == saved.dtype
        assert np.asarray(loaded).tobytes() == np.asarray(saved).tobytes()
    rows = mj.gather({"x": jnp.ones((own, 2), jnp.bfloat16), "y": [own]})
    assert (rows["x"].shape, rows["x"].dtype, rows["y"]) == ((1, 2), jnp.bfloat16, [0, 1])
    if own == 0:
        assert jax.jit(lambda x: mj.allreduce(x, "sum"))(jnp.ones(2)).tolist() == [1.0, 1.0]  # rank 1 has joined
    assert mj.join() in {0, 1}
    with pytest.raises(TypeError, match="'wire', which is called 'compression' now"):
        mj.allreduce(jnp.ones(1), wire="bf16")
    assert mj.allreduce(jnp.ones(1), "sum", compression="bf16").tolist() == [2.0]


def test_gradients_flow() -> None:
    run_ranks(differentiate, 2, deadline_s=PATIENT_S)


def curve(here: Here, steps: int) -> list[float]:
    """Return the losses of a network on the same 12 samples in every step.

    Each rank has its part of the samples.
    """
    optax: Any = importlib.import_module("optax")

    enter(here)
    dice = np.random.default_rng(5)
    inputs, targets = dice.standard_normal((12, 3)), dice.standard_normal((12, 1))
    start = {"a": dice.standard_normal((3, 8)), "b": np.zeros(8), "c": dice.standard_normal((8, 1))}
    parameters = mj.broadcast(start if here.rank == 0 else jax.tree.map(np.zeros_like, start))
    mine = slice(here.rank * 12 // here.size, (here.rank + 1) * 12 // here.size)
    optimizer = mj.distribute(optax.adam(0.05))
    state = optimizer.init(parameters)

    def loss_of(parameters: Any, x: Any, y: Any) -> Any:
        return ((jnp.tanh(x @ parameters["a"] + parameters["b"]) @ parameters["c"] - y) ** 2).mean()

    def step(parameters: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(parameters, x, y)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, mj.allreduce(loss)

    losses = []
    stepped = jax.jit(step)
    for _ in range(steps):
        parameters, state, loss = stepped(parameters, state, inputs[mine], targets[mine])
        losses.append(float(loss))
    return losses


def test_one_loss_curve_on_any_number_of_ranks() -> None:
    pytest.importorskip("optax")
    process = Process(nursery="jax", beforehand=("optax",))
    (alone,) = run_ranks(curve, 1, 50, process=process)
    assert alone[-1] < alone[0] / 2
    for ranks in (2, 4):  # test_digits_alike.py trains on three
        for losses in run_ranks(curve, ranks, 50, process=process, deadline_s=PATIENT_S):
            assert losses == pytest.approx(alone, rel=1e-10)


def disagree(here: Here) -> None:
    enter(here)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"FAILED_PRECONDITION.*Mismatched ALLREDUCE tensor shapes"
    ) as told:
        jax.block_until_ready(jax.jit(mj.allreduce)(jnp.ones(3 + here.rank)))
    assert isinstance(mj.error_of(told.value), mj.HorovodInternalError)
    assert mj.allreduce(jnp.ones(2), "sum").tolist() == [here.size] * 2  # the next operation works
    with pytest.raises(ValueError, match="want a first dimension"):
        mj.reducescatter(jnp.ones(here.size + 1))
    with pytest.raises(ValueError, match="want Average, Sum"):
        mj.allreduce(jnp.ones(2), "adasum")


def test_ranks_that_disagree_are_told() -> None:
    run_ranks(disagree, 2)


def train_until_it_fails(here: Here) -> float:
    enter(here)
    reduce = jax.jit(mj.allreduce)
    began = time.monotonic()
    try:
        # JAX reports a failed input of a program as INTERNAL, so no program starts before its input is ready.
        value = jax.block_until_ready(reduce(jnp.ones(1000)))
        here.reach("at work")
        while True:
            value = jax.block_until_ready(reduce(value))
            began = time.monotonic()
    except jax.errors.JaxRuntimeError as error:
        told = str(error)
    assert "ABORTED" in told
    assert "rank 1" in told
    return time.monotonic() - began


def test_a_dead_rank_is_named() -> None:
    report = report_of(train_until_it_fails, 3, faults=[kill(1).at("at work").after(0.3)])
    for outcome in report.outcomes:
        if outcome.rank != 1:
            assert outcome.error is None, outcome.error
            assert outcome.value < 60


def use_a_set(here: Here) -> None:
    import os  # noqa: PLC0415 -- only in this rank

    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    enter(here)
    chosen = mj.add_process_set(mj.ProcessSet([0, 2]))
    if here.rank != 1:
        assert jax.jit(lambda x: mj.allreduce(x, "sum", process_set=chosen))(jnp.ones(2) * here.rank).tolist() == [
            2,
            2,
        ]
    else:
        with pytest.raises(ValueError, match="rank 1 is not in"):
            mj.allreduce(jnp.ones(2), process_set=chosen)


def test_process_sets() -> None:
    run_ranks(use_a_set, 3)


class Plain(NamedTuple):
    """An optimizer whose updates are the gradients."""

    init: Any
    update: Any


def use_groups(here: Here) -> None:
    """Use several groups on one rank: in one program, in derivatives, in optimizers."""
    mj.init()
    own = here.rank
    world = multiring.world()
    pairs = [world.subgroup([0, 1]), world.subgroup([1, 2]), world.subgroup([2, 0])]
    mine = [(pair, sum((k, (k + 1) % 3))) for k, pair in enumerate(pairs) if pair is not None]
    assert len(mine) == 2

    def program(x: Any) -> Any:
        return mj.allreduce(x, "sum"), [mj.allreduce(x, "sum", process_set=pair) for pair, _ in mine]

    whole, parts = jax.jit(program)(jnp.ones(2) * own)
    assert whole.tolist() == [3.0, 3.0]
    assert [part.tolist() for part in parts] == [[float(wanted)] * 2 for _, wanted in mine]
    for pair, wanted in mine:
        assert mj.broadcast(jnp.float32(own), pair.ranks[1], process_set=pair) == pair.ranks[1]
        gradient = jax.jit(jax.grad(lambda x, pair=pair: (own + 1) * mj.allreduce(x, process_set=pair)))(1.0)
        assert float(gradient) == (wanted + 2) / 2
        plain = mj.distribute(Plain(lambda _: (), lambda gradients, state, _: (gradients, state)), process_set=pair)
        assert float(plain.update(jnp.float32(own), ())[0]) == wanted / 2
    assert mj.allreduce(jnp.ones(1), "sum", process_set=world).tolist() == [3.0]


def test_a_rank_in_several_groups() -> None:
    run_ranks(use_groups, 3)


def test_structures_are_those_of_the_header(tmp_path: Path) -> None:
    fields = {
        "CallFrame": ("XLA_FFI_CallFrame", ("args", "rets", "attrs", "stage", "api", "ctx")),
        "Buffers": ("XLA_FFI_Args", ("size", "args")),
        "Attributes": ("XLA_FFI_Attrs", ("size", "names", "attrs")),
        "ByteSpan": ("XLA_FFI_ByteSpan", ("ptr", "len")),
        "Buffer": ("XLA_FFI_Buffer", ("dtype", "data", "rank", "dims")),
        "Metadata": ("XLA_FFI_Metadata", ("api_version", "traits")),
        "MetadataExtension": ("XLA_FFI_Metadata_Extension", ("extension_base", "metadata")),
        "ErrorCreateArgs": ("XLA_FFI_Error_Create_Args", ("message", "errc")),
        "FfiApi": ("XLA_FFI_Api", ("api_version", "XLA_FFI_Error_GetMessage", "XLA_FFI_Stream_Get")),
        "ErrorTextArgs": ("XLA_FFI_Error_GetMessage_Args", ("message", "error")),
        "StreamGetArgs": ("XLA_FFI_Stream_Get_Args", ("ctx", "stream")),
    }
    pairs = [
        (f"offsetof(multiring::jax::{ours}, {name})", f"offsetof({theirs}, {name})")
        for ours, (theirs, names) in fields.items()
        for name in names
    ]
    pairs += [
        ("offsetof(multiring::jax::Buffers, args)", "offsetof(XLA_FFI_Rets, rets)"),
        ("multiring::jax::kExecute", "XLA_FFI_ExecutionStage_EXECUTE"),
        ("multiring::jax::kMetadataExtension", "XLA_FFI_Extension_Metadata"),
        ("0", "XLA_FFI_API_MAJOR"),
    ]
    lines = "\n".join(f'static_assert({ours} == {theirs}, "{theirs}");' for ours, theirs in pairs)
    program = tmp_path / "layout.cc"
    program.write_text(f'#include <cstddef>\n#include "xla/ffi/api/c_api.h"\n#include "jax/ffi.h"\n{lines}\n')
    ours = Path(__file__).parents[3] / "native"
    command = [str(shutil.which("c++")), "-std=c++20", "-fsyntax-only", f"-I{jax.ffi.include_dir()}", f"-I{ours}"]
    subprocess.run([*command, str(program)], check=True, timeout=240)
    assert lines.count("static_assert") == len(pairs)
