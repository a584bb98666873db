"""Draw random callbacks that write files, for programs.py."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from benchmarks.evidence.keras.programs import Api, Random, Result

CALLBACKS = ("keras", "h5", "weights", "best", "epochs", "batches", "csv", "backup", "ema", "own", "reads", "log")


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


def callbacks(random: Random, api: Api, features: Sequence[str], folder: Path) -> Result:
    """Train with random callbacks; return the weights and the written files' contents."""
    keras.utils.set_random_seed(int(random.integers(1 << 30)))
    width, rows, batch = int(random.integers(2, 6)), int(random.integers(20, 60)), int(random.integers(6, 15))
    units = int(random.choice([4, 64, 256]))
    inputs = keras.Input((width,))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(units, activation="tanh")(inputs)))
    model.set_weights([(random.normal(size=each.shape) * 0.2).astype(each.dtype) for each in model.get_weights()])
    model = api.distribute(model)
    rate = float(random.uniform(0.01, 0.05))
    model.compile(keras.optimizers.SGD(rate, use_ema="ema" in features, ema_momentum=0.7), "mse", metrics=["mae"])
    x = random.normal(size=(rows, width)).astype(np.float32)
    y = np.sin(x.sum(axis=1, keepdims=True)).astype(np.float32)
    epochs = int(random.integers(2, 6))
    listed = _listed(features, folder, random)
    model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0, callbacks=listed)
    own = [each for each in listed if isinstance(each, Saves)]
    found: Result = {
        "weights": [np.asarray(each, np.float64).tolist() for each in model.get_weights()],
        "read back": [each for one in own for each in one.differences],
    }
    if api.rank:
        return found
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return found | {"names": names, "contents": {name: _content(folder / name, model) for name in names}}


def _listed(features: Sequence[str], folder: Path, random: Random) -> list[Any]:
    checkpoint = keras.callbacks.ModelCheckpoint
    made: dict[str, Any] = {
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
    found = [made[each]() for each in made if each in features]
    return [found[place] for place in random.permutation(len(found))] if "ema" not in features else found


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
