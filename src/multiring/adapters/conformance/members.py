"""Checks of process sets, of the order of named calls, and of ranks whose calls differ."""

import threading

import numpy as np

from multiring._frontend import lifecycle
from multiring._frontend.process_sets import ProcessSet, add_process_set, remove_process_set
from multiring.adapters.conformance.adapter import require, require_equal
from multiring.adapters.conformance.rank import Rank
from multiring.adapters.conformance.training import parameters_of, slopes_of
from multiring.errors import ArgumentError, CollectiveError, MismatchError, StateError


def named_order(here: Rank) -> None:
    """Calls of two threads are matched by their names, in any order of the calls."""
    found: dict[str, object] = {}

    def call(name: str) -> None:
        try:
            found[name] = here.reduced(np.full(4, len(name) + here.rank, np.float32), name=name)
        except BaseException as error:  # noqa: BLE001 -- raised below
            found[name] = error

    names = ["first", "the second"][:: 1 if here.rank else -1]
    threads = [threading.Thread(target=call, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in names:
        result = found[name]
        if isinstance(result, BaseException):
            raise result
        total = len(name) * here.size + sum(range(here.size))
        require_equal(np.asarray(result), np.full(4, total, np.float32), f"sum by the name {name!r}")


def _disagree(here: Rank, array: np.ndarray, op: str, what: str) -> None:
    made = here.adapter.make(array)
    before = array.copy()
    error = here.raises(
        MismatchError, lambda: here.adapter.back(here.adapter.all_reduce(made, op, name=f"differing {what}")), what
    )
    require(isinstance(error, CollectiveError), f"{what}: {type(error).__name__} is not a CollectiveError")
    require("rank" in str(error), f"{what}: the error does not name a rank: {error}")
    require_equal(here.adapter.back(made), before, f"the array after {what}")
    here.goes_on()


def shapes_differ(here: Rank) -> None:
    """If shapes differ, every rank raises MismatchError.

    The array stays unchanged, and the ranks can continue.
    """
    _disagree(here, np.arange(3 + (here.rank == 1), dtype=np.float32), "sum", "shapes that differ")


def types_differ(here: Rank) -> None:
    """If types differ, every rank raises MismatchError.

    The array stays unchanged, and the ranks can continue.
    """
    _disagree(here, np.arange(4, dtype=np.float32 if here.rank else np.int32), "sum", "types that differ")


def operations_differ(here: Rank) -> None:
    """If operations differ, every rank raises MismatchError.

    The array stays unchanged, and the ranks can continue.
    """
    _disagree(here, np.arange(4, dtype=np.float32), "max" if here.rank == 2 else "sum", "operations that differ")


def models_differ(here: Rank) -> None:
    """If models differ in a shape, every rank raises MismatchError.

    The error comes from `trainer` or from the first step.
    """

    def train() -> None:
        shape = 5 + (here.rank == 1)
        trainer = here.trainer({"weight": np.zeros(shape, np.float32)}, 1.0)
        trainer.step({"weight": np.ones(shape, np.float32)})
        trainer.parameters()

    here.raises(MismatchError, train, "models that differ")
    here.goes_on()


def wrong_operation(here: Rank) -> None:
    """An unknown operation raises an ArgumentError with the operation's name, on each rank by itself."""
    error = here.raises(ArgumentError, lambda: here.reduced(np.zeros(3, np.float32), "median"), "an unknown operation")
    require("median" in str(error), f"the error does not name the operation 'median': {error}")
    here.goes_on()


def process_set(here: Rank) -> None:
    """A process set sums and trains for itself, and a rank outside it gets an ArgumentError."""
    chosen = add_process_set(ProcessSet([0, 2]))
    if here.rank in {0, 2}:
        found = here.reduced(np.full(3, here.rank, np.float32), process_set=chosen)
        require_equal(found, np.full(3, 2, np.float32), "sum in a process set")
        trainer = here.trainer(parameters_of(0), 1.0, chosen)
        trainer.step(slopes_of(here.rank, 0))
        mean = (slopes_of(0, 0)["bias"] + slopes_of(2, 0)["bias"]) / 2
        bias = np.asarray(trainer.parameters()["bias"])
        require_equal(bias, (parameters_of(0)["bias"] - mean).astype(np.float32), "a model of a process set", rtol=1e-6)
    else:
        outside = "a rank outside the set"
        here.raises(ArgumentError, lambda: here.reduced(np.ones(3, np.float32), process_set=chosen), outside)
    here.goes_on()
    remove_process_set(chosen)


def init_again(here: Rank) -> None:
    """After `shutdown` a call raises StateError, and after another `init` everything works again."""
    here.goes_on()
    lifecycle.shutdown()
    here.raises(StateError, lambda: here.reduced(np.ones(2, np.float32)), "a call after shutdown")
    here.adapter.init(process_sets="dynamic")
    require(lifecycle.rank() == here.rank, f"rank {lifecycle.rank()} after init again; want {here.rank}")
    here.goes_on()
    trainer = here.trainer({"weight": np.zeros(2, np.float32)}, 1.0)
    trainer.step({"weight": np.full(2, here.rank, np.float32)})
    wanted = np.full(2, -sum(range(here.size)) / here.size, np.float32)
    require_equal(np.asarray(trainer.parameters()["weight"]), wanted, "a model after init again", rtol=1e-6)
