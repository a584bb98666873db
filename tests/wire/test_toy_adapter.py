"""The support that an adapter gets from lower layers, tested with the smallest adapter (toy.py)."""

import ast
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support import toy
from tests.support.ranks import Here, run_ranks

from multiring._frontend import lifecycle
from multiring._frontend.elastic.running import run
from multiring._frontend.errors import HorovodInternalError
from multiring._frontend.joining import join
from multiring._frontend.process_sets import ProcessSet, add_process_set
from multiring._gradients.options import PowerSGD
from multiring.errors import ArgumentError, MismatchError, StateError

SHAPES = {"first": (40, 30), "bias": (30,), "scale": (), "none": (0, 3), "last": (30, 10), "unused": (7,)}


class Bf16:
    wire = "bf16"

    @staticmethod
    def compress(array: Any) -> tuple[Any, Any]:
        raise AssertionError(array)

    @staticmethod
    def decompress(array: Any, ctx: Any) -> Any:
        raise AssertionError(array, ctx)


def model_of(seed: int) -> dict[str, NDArray[np.float32]]:
    dice = np.random.default_rng(seed)
    return {name: toy.frozen(np.asarray(dice.standard_normal(shape), np.float32)) for name, shape in SHAPES.items()}


def gradients_of(rank: int, step: int) -> dict[str, NDArray[np.float32]]:
    found = model_of(1000 * step + rank)
    del found["unused"]
    if rank == 1:
        del found["bias"]  # a missing gradient counts as zero
    return found


def averages(ranks: int, step: int) -> dict[str, NDArray[np.float64]]:
    whole = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for rank in range(ranks):
        for name, gradient in gradients_of(rank, step).items():
            whole[name] += gradient / ranks
    return whole


def enter(here: Here) -> None:
    assert not lifecycle.is_initialized()
    lifecycle.init()
    assert lifecycle.rank() == here.rank


def train(here: Here, way: str, bucket_bytes: int) -> None:
    enter(here)
    model = model_of(0)
    expected = {name: value.astype(np.float64) for name, value in model.items()}
    optimizer = toy.Optimizer(model, 0.1, bucket_bytes=bucket_bytes)
    for step in range(1, 6):
        gradients = gradients_of(here.rank, step)
        if way == "all at once":
            model = dict(optimizer.step(model, gradients))
        else:
            with optimizer.tape(model) as tape:
                for name in reversed(gradients):
                    tape.watch(name, gradients[name])
        for name, average in averages(here.size, step).items():
            expected[name] -= 0.1 * average
            np.testing.assert_allclose(model[name], expected[name], rtol=1e-5, atol=1e-5)
    assert optimizer.reducer.sent_bytes >= sum(value.nbytes for value in model.values())
    assert optimizer.state_dict() == {}


@pytest.mark.parametrize("bucket_bytes", [1, 2000, 1 << 20])
@pytest.mark.parametrize("way", ["all at once", "one by one"])
def test_models_train(way: str, bucket_bytes: int) -> None:
    run_ranks(train, 3, way, bucket_bytes)


def train_in_a_set(here: Here) -> None:
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    enter(here)
    chosen = add_process_set(ProcessSet([0, 2]))
    whole = toy.allreduce(np.array([here.rank, -3]))
    assert whole.dtype == np.int64
    assert whole.tolist() == [1, -3]
    assert not whole.flags.writeable
    if here.rank == 1:
        with pytest.raises(ArgumentError, match="rank 1 is not in"):
            toy.allreduce(np.ones(3), process_set=chosen)
    else:
        optimizer = toy.Optimizer({"weight": np.zeros(4)}, 1.0, chosen)
        assert (
            optimizer.step({"weight": np.zeros(4)}, {"weight": np.full(4, float(here.rank))})["weight"].tolist()
            == [-1] * 4
        )
    # Ranks that disagree get an error.
    with pytest.raises(HorovodInternalError, match="Mismatched ALLREDUCE tensor shapes"):
        toy.allreduce(np.ones(3 + here.rank), name="some")
    with pytest.raises(MismatchError, match="the ranks differ in item 2 of 2"):
        toy.Optimizer({"weight": np.zeros(4 + here.rank)}, 1.0)


def test_a_process_set_trains_for_itself() -> None:
    run_ranks(train_in_a_set, 3)


def train_lossily(here: Here, options: dict[str, Any]) -> None:
    """Train with lossy gradients: the error of one step must be added in the next."""
    enter(here)
    model = {"matrix": np.zeros((60, 50), np.float32), "bias": np.zeros(50, np.float32)}
    own = {
        name: np.random.default_rng([here.rank, len(name)]).standard_normal(value.shape).astype(np.float32)
        for name, value in model.items()
    }
    everyones = [
        {name: np.random.default_rng([rank, len(name)]).standard_normal(value.shape) for name, value in model.items()}
        for rank in range(here.size)
    ]
    optimizer = toy.Optimizer(model, 1.0, **options)
    plain_bytes = toy.Optimizer(model, 1.0).reducer.sent_bytes
    assert optimizer.reducer.sent_bytes < plain_bytes
    steps = 60
    for step in range(steps):
        model = dict(optimizer.step(model, own))
        if step == steps // 2:  # the residuals survive a checkpoint
            state = optimizer.state_dict()
            assert set(state["residuals"]) >= {0}
            optimizer = toy.Optimizer(model, 1.0, **options)
            optimizer.load_state_dict(state)
    # The residuals hold all that the model has not received yet. Sums also lose the wire's last rounding.
    residuals = optimizer.state_dict()["residuals"]
    for index, (name, value) in enumerate(model.items()):
        owed = toy.allreduce(residuals.get(index, np.zeros_like(value)))
        mean = sum(each[name] for each in everyones) / here.size
        np.testing.assert_allclose((owed - value) / steps, mean, atol=0.004)
    digests = np.frombuffer(b"".join(value.tobytes() for value in model.values()), np.uint8)
    assert (toy.allreduce(digests, op="max") == digests).all()  # all ranks have the same bits


@pytest.mark.parametrize(
    "options",
    [{"compression": Bf16, "error_feedback": True}, {"compression": PowerSGD(4)}],
    ids=["bf16", "PowerSGD"],
)
def test_what_is_lost_comes_with_the_next_gradient(options: dict[str, Any]) -> None:
    run_ranks(train_lossily, 2, options, engine="tcp")


def join_early(here: Here) -> None:
    enter(here)
    optimizer = toy.Optimizer({"weight": np.zeros(3)}, 1.0)
    model: toy.Model = {"weight": np.zeros(3)}
    for _ in range(1 + here.rank):
        model = optimizer.step(model, {"weight": np.ones(3)})
    # Without negotiation, ranks find the last rank to join from their waiting times, accurate to about 1 ms.
    time.sleep(0.5 * here.rank)  # a busy machine may hold a rank for a while
    assert join() == 2
    assert toy.allreduce(model["weight"], op="min").tolist() == [-(1 + 2 / 3 + 1 / 3)] * 3


def test_ranks_that_have_no_more_samples_stand_by() -> None:
    run_ranks(join_early, 3)


def go_on(here: Here) -> list[Any]:
    enter(here)
    state = toy.ModelState(model={"weight": np.full(2, here.rank + 5.0)}, step=0)
    failed: list[int] = []

    @run
    def train(state: Any) -> list[float]:
        optimizer = toy.Optimizer(state.model, 1.0)
        while state.step < 4:
            state.model = optimizer.step(state.model, {"weight": np.ones(2)})
            state.step += 1
            if state.step == 3 and not failed:
                failed.append(state.step)
                raise HorovodInternalError("as if a rank had gone")
            if state.step % 2 == 0:
                state.commit()
        return state.model["weight"].tolist()  # type: ignore[no-any-return] # NumPy's

    return [train(state), failed]


def test_training_goes_on_from_the_last_commit() -> None:
    assert run_ranks(go_on, 2) == [[[1.0, 1.0], [3]]] * 2


def misuse(here: Here) -> None:
    enter(here)
    optimizer = toy.Optimizer({"weight": np.zeros(3)}, 1.0)
    with pytest.raises(ArgumentError, match=r"gradient weight is float32 of shape \(3,\); want float64"):
        optimizer.watch("weight", np.zeros(3, np.float32))
    optimizer.watch("weight", np.zeros(3))
    with pytest.raises(StateError, match="gradient weight came twice"):
        optimizer.watch("weight", np.zeros(3))
    optimizer.reducer.finish()
    with pytest.raises(ArgumentError, match="takes float32 gradients only"):
        toy.Optimizer({"weight": np.zeros((30, 30))}, 1.0, compression=PowerSGD(1))


def test_misuse_is_told() -> None:
    run_ranks(misuse, 2)


def test_an_adapter_is_small_and_its_own() -> None:
    text = Path(toy.__file__).read_text(encoding="utf-8")
    assert len(text.splitlines()) < 150
    names = {each.module or "" for each in ast.walk(ast.parse(text)) if isinstance(each, ast.ImportFrom)}
    assert not [name for name in names if name.startswith(("torch", "multiring.torch", "multiring._native"))]
