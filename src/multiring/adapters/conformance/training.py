"""Checks of gradients, models and elastic states."""

from typing import Any

import numpy as np

from multiring._frontend.elastic.running import run
from multiring._frontend.object_collectives import allgather_object
from multiring.adapters.conformance.adapter import Array, require, require_equal
from multiring.adapters.conformance.rank import Rank
from multiring.errors import CollectiveError

_SHAPES: dict[str, tuple[int, ...]] = {"matrix": (17, 5), "bias": (5,), "scale": (), "spare": (3,)}
_RATE = 0.25


def parameters_of(seed: int) -> dict[str, Array]:
    """Return random parameters, which depend on the seed only."""
    dice = np.random.default_rng(seed)
    return {name: np.asarray(dice.integers(-8, 9, shape), np.float32) for name, shape in _SHAPES.items()}


def slopes_of(rank: int, step: int) -> dict[str, Array]:
    """Return a rank's gradients in a step. The parameter "spare" has no gradient."""
    found = parameters_of(1000 * step + rank + 1)
    del found["spare"]
    return found


def _follow(wanted: dict[str, Array], ranks: int, step: int) -> None:
    """Update `wanted` by the step that the model must make."""
    every = [slopes_of(rank, step) for rank in range(ranks)]
    for name in every[0]:
        mean = np.sum([each[name] for each in every], axis=0, dtype=np.float64) / ranks
        wanted[name] = (wanted[name] - _RATE * mean).astype(np.float32)


def _require_model(found: Any, wanted: dict[str, Array], what: str) -> None:
    for name, value in wanted.items():
        require_equal(np.asarray(found[name]), value, f"{what}: {name}", rtol=1e-5)


def gradients(here: Rank) -> None:
    """A model trains with the average of all ranks' gradients, which the framework computes."""
    trainer, wanted = here.trainer(parameters_of(0), _RATE), parameters_of(0)
    for step in range(4):
        trainer.step(slopes_of(here.rank, step))
        _follow(wanted, here.size, step)
        _require_model(trainer.parameters(), wanted, f"step {step}")


def unused_parameter(here: Rank) -> None:
    """A parameter that no rank uses stays bit-identical while other parameters train."""
    trainer = here.trainer(parameters_of(0), _RATE)
    trainer.step(slopes_of(here.rank, 0))
    require_equal(np.asarray(trainer.parameters()["spare"]), parameters_of(0)["spare"], "the unused parameter")


def replicas(here: Rank) -> None:
    """Replicas stay bit-identical, even if the sum of gradients depends on their order."""
    dice = np.random.default_rng(here.rank)
    trainer = here.trainer({"weight": np.zeros(1009, np.float32)}, _RATE)
    for _ in range(3):
        trainer.step({"weight": dice.standard_normal(1009).astype(np.float32)})
    bits = allgather_object(np.asarray(trainer.parameters()["weight"]).tobytes(), name="replicas")
    require(len(set(bits)) == 1, "the ranks' parameters differ")


def two_models(here: Rank) -> None:
    """Two models that train in turns do not affect each other."""
    pair = [here.trainer(parameters_of(seed), _RATE) for seed in (1, 2)]
    wanted = [parameters_of(seed) for seed in (1, 2)]
    for step, which in enumerate((0, 1, 1, 0, 1)):
        pair[which].step(slopes_of(here.rank, step))
        _follow(wanted[which], here.size, step)
    for trainer, model in zip(pair, wanted, strict=True):
        _require_model(trainer.parameters(), model, "a model of two")


def gradient_through(here: Rank) -> None:
    """Gradients flow through a sum and an average, from every rank to every other."""
    if here.adapter.gradient is None:
        require(False, "the adapter has neither a function `gradient` nor a reason in `cannot`")
        return
    weights = [np.arange(6, dtype=np.float32) + 3 * rank for rank in range(here.size)]
    at = np.full(6, here.rank + 1, np.float32)
    for op, divisor in (("sum", 1), ("average", here.size)):
        found = here.adapter.gradient(at, weights[here.rank], op)
        wanted = np.asarray(np.sum(weights, axis=0) / divisor, np.float32)
        require_equal(np.asarray(found), wanted, f"gradient of {op}", rtol=1e-6)


def state_is_kept(here: Rank) -> None:
    """An elastic state has rank 0's model after `sync`, and the committed model after `restore`."""
    trainer = here.trainer(parameters_of(here.rank), _RATE)
    state = trainer.state(done=here.rank)
    state.sync()
    wanted = parameters_of(0)
    _require_model(trainer.parameters(), wanted, "after sync")
    require(state.done == 0, f"after sync: done is {state.done}, want rank 0's value, 0")
    trainer.step(slopes_of(here.rank, 0))
    _follow(wanted, here.size, 0)
    state.done = 1
    state.commit()
    trainer.step(slopes_of(here.rank, 1))
    state.done = 2
    state.restore()
    _require_model(trainer.parameters(), wanted, "after restore")
    require(state.done == 1, f"after restore: done is {state.done}, want the committed value, 1")


def training_goes_on(here: Rank) -> None:
    """After a failure the ranks join the job again, and resume from the last commit.

    They end with the same model as without the failure.
    """
    failed: list[int] = []
    trainer = here.trainer(parameters_of(here.rank), _RATE)
    state = trainer.state(done=0)

    @run
    def train(state: Any) -> None:
        while state.done < 4:
            trainer.step(slopes_of(here.rank, state.done))
            if state.done == 2 and not failed:  # in the middle of a step, which `restore` must roll back
                failed.append(state.done)
                raise CollectiveError("as if a rank had gone")
            state.done += 1
            if state.done % 2 == 0:
                state.commit()

    train(state)
    wanted = parameters_of(0)
    for step in range(4):
        _follow(wanted, here.size, step)
    require(failed == [2], "training did not fail as it should")
    _require_model(trainer.parameters(), wanted, "after resuming")
