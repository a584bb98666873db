"""Draw random callbacks that write files, for programs.py."""

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from benchmarks.evidence.keras.programs import Api, Random, Result

CALLBACKS = ("keras", "h5", "weights", "best", "epochs", "batches", "csv", "backup", "ema", "own", "reads", "log")
# Callbacks that call collectives, and save on some ranks before or after these.
COLLECTIVE = ("meets", "first-saves", "last-saves", "each-saves", "all-save", "on-one-rank")
OTHERS = ("early", "plateau", "rate", "nan", "lambda", "board", "second-model")
HOOKS = ("on_epoch_begin", "on_epoch_end", "on_train_begin", "on_train_end", "on_train_batch_end")


class SavesAndMeets(keras.callbacks.Callback):  # type: ignore[misc]
    """A user-defined callback that saves the model on some ranks, and calls collectives.

    Args:
        api: the collectives.
        who: the ranks that save: "first", "last", "each" (to a path of its own), "all", or "none".
        path: where to save; the callback adds a number and a suffix.
        random: draws the hook, and whether collectives come before and after the save.
    """

    def __init__(self, api: Api, who: str, path: Path, random: Random) -> None:
        super().__init__()
        self.api, self.who, self.path = api, who, path
        self.before, self.after = bool(random.integers(2)), who == "none" or bool(random.integers(4))
        self.kind = str(random.choice(["save", "save_weights", "function"]))
        self.met: list[list[float]] = []
        self.count = 0
        setattr(self, str(random.choice(HOOKS, p=[0.15, 0.4, 0.1, 0.15, 0.2])), self.act)

    def act(self, _number: Any = None, logs: Any = None) -> None:
        """Do what the callback does in its hook."""
        del logs
        self.count += 1
        if self.before:
            self.meet()
        saves = {"first": self.api.rank == 0, "last": self.api.rank == self.api.size - 1, "none": False}
        if saves.get(self.who, True):
            self.save(f"-of-{self.api.rank}" if self.who == "each" else "")
        if self.after:
            self.meet()

    def meet(self) -> None:
        """Call a collective whose result does not depend on the number of ranks."""
        weight = float(np.asarray(self.model.get_weights()[0]).sum())
        self.met.append([self.count, float(np.mean(self.api.gather(weight)))])

    def save(self, mark: str) -> None:
        """Save the model."""
        path = f"{self.path}-{self.count}{mark}"
        if self.kind == "save_weights":
            self.model.save_weights(f"{path}.weights.h5")
        elif self.kind == "save":
            self.model.save(f"{path}.keras")
        else:
            keras.saving.save_model(self.model, f"{path}.keras")


class Saves(keras.callbacks.Callback):  # type: ignore[misc]
    """A user-defined callback that saves the model.

    With `reads`, it also loads the file at once on every rank.
    """

    def __init__(self, folder: Path, *, reads: bool) -> None:
        super().__init__()
        self.folder, self.reads = folder, reads
        self.differences: list[float] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save the model or its weights, and possibly load them again."""
        del logs
        path = self.folder / f"own-{epoch}.{'weights.h5' if self.reads else 'keras'}"
        if not self.reads:
            self.model.save(path)
            return
        self.model.save_weights(path)
        before = self.model.get_weights()
        self.model.load_weights(path)
        pairs = zip(before, self.model.get_weights(), strict=True)
        self.differences.append(max(float(np.abs(one - other).max()) for one, other in pairs))


def drawn_callbacks(random: Random, backend: str) -> list[str]:
    """Return the names of the callbacks of a case: some that write, some that meet, and some others."""
    others = [each for each in OTHERS if each != "board" or backend == "tensorflow"]  # it needs TensorFlow
    counts = (int(random.integers(0, 3)), int(random.integers(0, 3)), int(random.integers(0, 2)))
    groups = zip((CALLBACKS, COLLECTIVE, others), counts, strict=True)
    found = [str(each) for names, count in groups for each in random.choice(names, size=count, replace=False)]
    return sorted(found) or ["keras"]


def callbacks(random: Random, api: Api, features: Sequence[str], folder: Path) -> Result:
    """Train with random callbacks; return the weights and the written files' contents."""
    keras.utils.set_random_seed(int(random.integers(1 << 30)))
    width, rows, batch = int(random.integers(2, 6)), int(random.integers(20, 60)), int(random.integers(6, 15))
    units, epochs = int(random.choice([4, 64, 256])), int(random.integers(2, 6))
    x = random.normal(size=(rows, width)).astype(np.float32)
    y = np.sin(x.sum(axis=1, keepdims=True)).astype(np.float32)
    model = _model(random, api, features, width, units)
    listed = _listed(features, folder, random, api)
    options: dict[str, Any] = {"batch_size": batch, "shuffle": False, "verbose": 0}
    met = [each for each in listed if isinstance(each, SavesAndMeets)]
    if "second-model" in features:
        other = _model(random, api, (), width, units)
        second = SavesAndMeets(api, str(random.choice(["first", "all", "last"])), folder / "second", random)
        other.fit(x, y, **options, epochs=1, callbacks=[second])
        met.append(second)
    model.fit(x, y, **options, epochs=epochs, callbacks=listed)
    own = [each for each in listed if isinstance(each, Saves)]
    found: Result = {
        "weights": [np.asarray(each, np.float64).tolist() for each in model.get_weights()],
        "read back": [each for one in own for each in one.differences],
        "met": [each.met for each in met],
    }
    api.gather(None)  # every rank has written its files
    if api.rank:
        return found
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    # A rank's own files have no counterpart in one process, and TensorBoard's files are named after time and host.
    names = [each for each in names if not ("-of-" in each and "-of-0." not in each) and "events.out" not in each]
    return found | {"names": names, "contents": {name: _content(folder / name, model) for name in names}}


def _model(random: Random, api: Api, features: Sequence[str], width: int, units: int) -> Any:
    inputs = keras.Input((width,))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(units, activation="tanh")(inputs)))
    model.set_weights([(random.normal(size=each.shape) * 0.2).astype(each.dtype) for each in model.get_weights()])
    model = api.distribute(model)
    rate, is_eager = float(random.uniform(0.01, 0.05)), bool(random.random() < 0.2)
    optimizer = keras.optimizers.SGD(rate, use_ema="ema" in features, ema_momentum=0.7)
    model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=is_eager)
    return model


def _listed(features: Sequence[str], folder: Path, random: Random, api: Api) -> list[Any]:
    made = _writers(folder) | _savers(folder, random, api) | _others(folder, random)
    found = [made[each]() for each in made if each in features]
    return [found[place] for place in random.permutation(len(found))] if "ema" not in features else found


def _writers(folder: Path) -> dict[str, Callable[[], Any]]:
    checkpoint = keras.callbacks.ModelCheckpoint
    return {
        "ema": lambda: keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
        "keras": lambda: checkpoint(folder / "model.keras"),
        "h5": lambda: checkpoint(str(folder / "model.h5")),
        "weights": lambda: checkpoint(folder / "model.weights.h5", save_weights_only=True),
        "best": lambda: checkpoint(folder / "best.keras", monitor="loss", save_best_only=True),
        "epochs": lambda: checkpoint(str(folder / "sub" / "model-{epoch}.keras")),
        "batches": lambda: checkpoint(str(folder / "at-{batch}.weights.h5"), save_weights_only=True, save_freq=2),
        "csv": lambda: keras.callbacks.CSVLogger(str(folder / "log.csv")),
        "backup": lambda: keras.callbacks.BackupAndRestore(str(folder / "backup"), delete_checkpoint=False),
        "own": lambda: Saves(folder, reads=False),
        "reads": lambda: Saves(folder, reads=True),
        "log": lambda: keras.callbacks.CSVLogger(str(folder / "appended.csv"), separator=";", append=True),
    }


def _savers(folder: Path, random: Random, api: Api) -> dict[str, Callable[[], Any]]:
    def one_rank() -> Any:
        path = str(folder / "one-rank-{epoch}.keras")
        return keras.callbacks.ModelCheckpoint(path) if api.rank == 0 else keras.callbacks.Callback()

    return {
        "meets": lambda: SavesAndMeets(api, "none", folder / "meets", random),
        "first-saves": lambda: SavesAndMeets(api, "first", folder / "first", random),
        "last-saves": lambda: SavesAndMeets(api, "last", folder / "last", random),
        "each-saves": lambda: SavesAndMeets(api, "each", folder / "each", random),
        "all-save": lambda: SavesAndMeets(api, "all", folder / "all", random),
        "on-one-rank": one_rank,
    }


def _others(folder: Path, random: Random) -> dict[str, Callable[[], Any]]:
    kinds = keras.callbacks
    return {
        "early": lambda: kinds.EarlyStopping(
            monitor=str(random.choice(["loss", "mae"])),
            patience=int(random.integers(0, 2)),
            min_delta=float(random.choice([0.0, 0.3])),
            restore_best_weights=bool(random.integers(2)),
        ),
        "plateau": lambda: kinds.ReduceLROnPlateau(
            monitor="loss", factor=float(random.uniform(0.1, 0.9)), patience=1, min_delta=float(random.choice([0, 0.3]))
        ),
        "rate": lambda: kinds.LearningRateScheduler(lambda epoch, rate: rate / (1 + epoch)),
        "nan": kinds.TerminateOnNaN,
        "lambda": lambda: kinds.LambdaCallback(on_train_batch_end=lambda _batch, logs: logs["loss"]),
        "board": lambda: kinds.TensorBoard(
            str(folder / "board"), update_freq=_drawn_frequency(random), write_graph=False, profile_batch=0
        ),
    }


def _drawn_frequency(random: Random) -> Any:
    return "epoch" if random.integers(2) else int(random.integers(1, 4))


def _content(path: Path, model: Any) -> Any:
    """Return the numbers in a written file, or the error if the file is unreadable."""
    if path.suffix == ".csv":
        with path.open() as file:
            return [
                [_number(each) for each in row]
                for row in csv.reader(file, delimiter=";" if "app" in path.name else ",")
            ]
    if path.suffix == ".json":
        return json.loads(path.read_text())
    try:
        if path.name.endswith(".weights.h5"):
            plain = keras.models.clone_model(model)
            plain.load_weights(path)
        else:
            plain = keras.models.load_model(path, compile=False)
    except Exception as error:  # noqa: BLE001 -- what makes a file unreadable is not known
        return f"unreadable: {type(error).__name__}: {str(error)[:200]}"
    return [np.asarray(each, np.float64).tolist() for each in plain.get_weights()]


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text
