"""Jobs of test_keras_saving.py: callbacks that save on some ranks and call collectives in the same hook."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
from benchmarks.evidence.keras.callbacks import HOOKS, SavesAndMeets
from benchmarks.evidence.keras.programs import Api
from tests.support.keras_trust_programs import data, network

import multiring.keras as mk

FIT_HOOKS = ("on_epoch_begin", "on_train_end", "on_epoch_end", "on_train_begin", "on_train_batch_end")
assert set(FIT_HOOKS) == set(HOOKS)
# The ranks that save, and whether the same callback calls a collective afterwards; the next callback always does.
CASES = (("none", True), ("first", True), ("first", False), ("last", True), ("each", False), ("all", True))


class Meets(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    """A callback that averages a number in the hooks of `fit`, `evaluate` and `predict`."""

    def on_epoch_end(self, _epoch: int = 0, logs: Any = None) -> None:
        del logs
        assert np.asarray(mk.allreduce(np.ones(2))).tolist() == [1.0, 1.0]

    on_train_end = on_test_end = on_predict_end = on_epoch_end


def saver(who: str, folder: str, name: str, hooks: tuple[str, ...], *, after: bool = True) -> Any:
    """Return a callback that saves on the ranks `who` in `hooks`, and calls collectives before and maybe after."""
    api = Api(mk.distribute, mk.allgather_object, mk.rank(), mk.size())
    found = SavesAndMeets(api, who, Path(folder) / name, np.random.default_rng(0))
    for each in HOOKS:
        found.__dict__.pop(each, None)
    for each in hooks:
        setattr(found, each, found.act)
    found.kind, found.before, found.after = "save_weights", True, after
    return found


def compiled(*, is_eager: bool = False) -> Any:
    model = mk.distribute(network())
    model.compile("sgd", "mse", run_eagerly=is_eager)
    return model


def saving_on(folder: str) -> Any:
    """Train, evaluate and predict with each kind of saver; return the weights, and the files' weights by name."""
    x, y = data()
    trained = []
    for number, (who, after) in enumerate(CASES):
        model = compiled(is_eager=number % 2 == 0)
        own = saver(who, folder, f"{who}-{after}", (*FIT_HOOKS[number % 2 :: 2], "on_predict_end"), after=after)
        model.fit(x, y, batch_size=8, epochs=1, verbose=0, shuffle=False, callbacks=[own, Meets()])
        if who == "first":
            model.evaluate(x, y, 8, 0, callbacks=[saver(who, folder, "test", ("on_test_end",)), Meets()])
        model.predict(x, 8, 0, callbacks=[own, Meets()])
        trained.append([each.tolist() for each in model.get_weights()])
    mk.barrier()
    for path in Path(folder).glob("*.weights.h5"):
        network().load_weights(path)
    return trained, sorted(path.name for path in Path(folder).glob("*") if path.is_file())


def two_models(folder: str) -> Any:
    """A callback of one model trains another model, and both save on rank 0 only."""
    x, y = data()
    inner = compiled()

    class Trains(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            del epoch, logs
            inner.fit(x, y, verbose=0, callbacks=[saver("first", folder, "inner", ("on_epoch_end",)), Meets()])
            self.model.save_weights(f"{folder}/outer.weights.h5")
            self.model.load_weights(f"{folder}/outer.weights.h5")

    compiled().fit(x, y, epochs=2, verbose=0, callbacks=[saver("first", folder, "o", ("on_epoch_end",)), Trains()])
    return [np.asarray(each).tolist() for each in inner.get_weights()]


def failing(folder: str) -> Any:
    """Return each rank's error if rank 0 cannot save; afterwards the model trains again."""
    x, y = data()
    model = compiled()
    told = []

    class Fails(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self, who: str) -> None:
            super().__init__()
            self.who = who

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            del epoch, logs
            if self.who == "all" or mk.rank() == 0:
                try:
                    self.model.save(f"{folder}/missing/model.keras")
                except FileNotFoundError:
                    if self.who != "caught":
                        raise

    for who in ("first", "all", "caught"):
        try:
            model.fit(x, y, verbose=0, callbacks=[Fails(who), *([Meets()] if who == "caught" else [])])
        except Exception as error:  # noqa: BLE001 -- it is compared
            told.append(f"{type(error).__name__}: {str(error).partition(':')[0]}")
        model.save_weights(f"{folder}/after-{who}-{mk.rank()}.weights.h5")  # no callback runs: each rank writes at once
    return told


def restarted(folder: str) -> Any:
    """A failed operation between a save and the end of its hook: `elastic.run` starts again, and files are whole."""
    x, y = data()
    model = compiled()
    model.fit(x, y, verbose=0)  # the optimizer has its variables
    state = mk.elastic.KerasState(model, batch=0, epoch=0)
    broken: list[int] = []

    class Breaks(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            del logs
            if epoch == 1 and len(broken) < 2:
                broken.append(epoch)
                raise mk.CollectiveError("as if a rank were lost")

    @mk.elastic.run
    def train(state: Any) -> None:
        own = [saver("first", folder, "f", ("on_epoch_end",)), saver("all", folder, "a", ("on_epoch_end",))]
        if len(broken) == 1:
            own.reverse()
        kept = [mk.elastic.UpdateEpochStateCallback(state), mk.elastic.CommitStateCallback(state)]
        model.fit(x, y, epochs=3, verbose=0, callbacks=[*own, Breaks(), Meets(), *kept])

    train(state)
    network().load_weights(f"{folder}/f-2.weights.h5")
    return len(broken), [each.tolist() for each in model.get_weights()]


def found(folder: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the result of each program, in a folder of its own."""
    mk.init()
    results = {}
    for name in names:
        place = Path(folder) / name
        place.mkdir(exist_ok=True)
        results[name] = globals()[name](str(place))
    return results
