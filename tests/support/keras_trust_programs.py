"""Jobs of test_keras_trust.py: programs with and without `distribute`."""

import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
from keras.src.utils import file_utils

import multiring.keras as mk
from multiring.errors import ArgumentError
from multiring.keras.shards import ArrayShards, BatchDivision

ROWS = 23  # 8 does not divide it, and the last batch is uneven on 2 ranks


def data(seed: int = 0) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    return random.normal(size=(ROWS, 4)).astype(np.float32), random.integers(0, 2, (ROWS, 3)).astype(np.float32)


def network(outputs: int = 3, activation: str = "sigmoid") -> Any:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(outputs, activation=activation)])
    random = np.random.default_rng(1)
    model.set_weights([random.normal(size=each.shape) * 0.5 for each in model.get_weights()])
    return model


def apart(one: Any, other: Any) -> float:
    leaves = zip(keras.tree.flatten(one), keras.tree.flatten(other), strict=True)
    gaps = [np.where(np.isnan(a) & np.isnan(b), 0.0, np.abs(np.subtract(a, b)) / (1 + np.abs(b))) for a, b in leaves]
    return max(float(np.max(each)) for each in gaps)


def dealing(_folder: str) -> Any:
    """Every row is dealt exactly once, whatever the sizes.

    All ranks make the same number of steps, and no other row counts.
    """
    random = np.random.default_rng(3)
    adapter: Any = keras.src.trainers.data_adapters.array_data_adapter.ArrayDataAdapter
    for _ in range(60):
        rows, batch, ranks = (int(random.integers(1, high)) for high in (40, 12, 6))
        whole, shuffle = bool(random.random() < 0.5), bool(random.random() < 0.5)
        x = np.arange(rows)
        plans = []
        for rank in range(ranks):
            shards = ArrayShards(adapter(x, batch_size=batch), BatchDivision(rank, ranks, whole), shuffle, 7)
            plans.append(list(shards.plan()))
            assert len(plans[-1]) == shards.num_batches
        assert len({len(each) for each in plans}) == 1
        counted = [each[0] for plan in plans for each in plan if each[1]]
        assert sorted(np.concatenate(counted).tolist()) == x.tolist()
        if not whole:
            assert all(sum(step[1] for step in steps) == steps[0][2] for steps in zip(*plans, strict=True))
    return True


LOSSES = sorted(
    name
    for name, each in vars(keras.losses).items()
    if isinstance(each, type) and issubclass(each, keras.losses.Loss) and name not in ("Loss", "CTC")
)


def takes(make: Callable[[], Any], *data: Any, **weights: Any) -> bool:
    """Return whether a loss or a metric accepts the data."""
    try:
        make()(*data, **weights)
    except Exception:  # noqa: BLE001 -- Keras raises many types
        return False
    return True


def losses(_folder: str) -> Any:
    """Return how far each Keras loss trains differently with and without `distribute`.

    Every loss is tried with several reductions, weighted and unweighted. Each loss has its own output of one model, so
    it cannot affect the training of another loss.
    """
    x, y = data()
    found: dict[str, float | None] = {}
    heads: dict[bool, dict[str, tuple[Callable[[], Any], Any, Any]]] = {True: {}, False: {}}  # True: with weights
    for place, name in enumerate(LOSSES):
        labels = y.argmax(1) if "Sparse" in name else y
        # The first reduction alternates between the default and a sum. The second divides by the samples' weights.
        for reduction in (("sum_over_batch_size", "sum")[place % 2], "mean_with_sample_weight"):
            made = functools.partial(getattr(keras.losses, name), reduction=reduction)
            found[f"{name} {reduction}"] = None
            if takes(made, labels, np.full((ROWS, 3), 1 / 3, np.float32)):
                weights = np.random.default_rng(place).integers(1, 5, ROWS)
                is_weighted = reduction != "sum" or place % 4 == 1
                heads[is_weighted][f"{name}_{reduction}"] = (made, labels, weights)
    for is_weighted, those in heads.items():
        alone, shared = (_trained(those, x, shares=shares, weighted=is_weighted) for shares in (False, True))
        found |= {name.replace("_", " ", 1): apart(shared[name], alone[name]) for name in those}
    return found


def _trained(heads: Any, x: Any, *, shares: bool, weighted: bool) -> dict[str, Any]:
    """Train one epoch; return each output's losses and weights by name."""
    random = np.random.default_rng(1)
    inputs = keras.Input((4,))
    layers = {name: keras.layers.Dense(3, activation="softmax", name=name) for name in heads}
    model = keras.Model(inputs, {name: layer(inputs) for name, layer in layers.items()})
    model.set_weights([random.normal(size=each.shape) * 0.5 for each in model.get_weights()])
    model = mk.distribute(model) if shares else model
    model.compile(keras.optimizers.SGD(0.02), {name: made() for name, (made, _, _) in heads.items()})
    y, weights = ({name: head[place] for name, head in heads.items()} for place in (1, 2))
    given = {"sample_weight": weights} if weighted else {}
    history = model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0, **given).history
    return {
        name: [history[f"{name}_loss"], *(each.tolist() for each in layer.get_weights())]
        for name, layer in layers.items()
    }


SPECIAL: dict[str, dict[str, Any]] = {
    "MeanIoU": {"num_classes": 2},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "IoU": {"num_classes": 2, "target_class_ids": [0]},
    "OneHotIoU": {"num_classes": 3, "target_class_ids": [0]},
    "OneHotMeanIoU": {"num_classes": 3},
    "BinaryIoU": {"target_class_ids": [0, 1]},
}


def metrics(_folder: str) -> Any:
    """Return how far each Keras metric differs with and without `distribute`.

    It compares metrics after an epoch of training and after an evaluation. It leaves out metrics that reject the data.
    """
    x, y = data()
    weights = np.linspace(0.1, 2.0, ROWS)
    kinds = {name: each for name, each in vars(keras.metrics).items() if isinstance(each, type)}
    without = {"Metric", "Mean", "Sum", "MeanMetricWrapper"}  # take numbers, not labels and predictions
    found: dict[str, float | None] = dict.fromkeys(sorted(set(kinds) - without))
    for is_sparse in (False, True):
        labels = y.argmax(1) if is_sparse else (y > 0) * 1.0
        guess = np.full((ROWS, 3), 0.3, np.float32)
        made = {
            name: functools.partial(kinds[name], **SPECIAL.get(name, {}), name=name.lower())
            for name in found
            if ("Sparse" in name) == is_sparse
        }
        made = {name: make for name, make in made.items() if takes(make, labels, guess, sample_weight=weights)}
        results = []
        for model in (network(), mk.distribute(network())):
            model.compile(
                keras.optimizers.SGD(0.0),
                "sparse_categorical_crossentropy" if is_sparse else "mse",
                weighted_metrics=[make() for make in made.values()],
            )
            evaluated = model.evaluate(x, labels, batch_size=8, sample_weight=weights, verbose=0, return_dict=True)
            history = model.fit(x, labels, sample_weight=weights, batch_size=8, verbose=0, shuffle=False).history
            results.append({name: [evaluated[name.lower()], *history[name.lower()]] for name in made})
        alone, shared = results
        found |= {name: apart(shared[name], alone[name]) for name in made}
    return found


class Logging(keras.Sequential):  # type: ignore[misc] # Keras has no types
    """A model with logs that are not metrics.

    It logs one metric under another name. It also logs numbers that equal the values of rank 0's metrics.
    """

    def train_step(self, data: Any) -> Any:
        self.seen.update_state(keras.ops.ones_like(data[1]))
        size_on_rank_0 = len(range(0, 9, mk.size()))
        return {"rows": self.seen.result(), "seen": size_on_rank_0 + 1.0, "depth": float(size_on_rank_0)}


def logged(_folder: str) -> Any:
    """Return a model's logs without and with `distribute`.

    A log is a metric's if the step returned the metric's result under the log's name. Equal numbers do not count.
    """
    x, y = data()
    found = []
    for shares in (False, True):
        model = Logging([keras.Input((4,)), keras.layers.Dense(1)])
        model.seen = keras.metrics.Sum("seen")
        model = mk.distribute(model) if shares else model
        model.compile("sgd", "mse")
        found.append(model.fit(x[:9], y[:9, :1], batch_size=9, verbose=0, shuffle=False).history)
    return found


class Own(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        del logs
        path = f"{self.folder}/own{epoch}.weights.h5"
        self.model.save_weights(path)
        self.model.load_weights(path)  # on every rank, right after the save
        if mk.rank() == 0:
            self.model.save(f"{self.folder}/guarded.keras")
        self.model.save(f"{self.folder}/of-rank-{mk.rank()}.keras")
        keras.saving.save_model(self.model, f"{self.folder}/by-function.keras")
        keras.saving.load_model(f"{self.folder}/by-function.keras")


class Handing(keras.Sequential):  # type: ignore[misc] # Keras has no types
    """A model whose methods pass their arguments on to Keras."""

    def evaluate(self, *arguments: Any, **options: Any) -> Any:
        return super().evaluate(*arguments, **options)

    def predict(self, *arguments: Any, **options: Any) -> Any:
        return super().predict(*arguments, **options)


def handed_on(_folder: str) -> Any:
    """Return whether a model's own `evaluate` and `predict` take positional arguments, as Keras' do."""
    x, y = data()
    model = mk.distribute(Handing(network().layers))
    model.compile("sgd", "mse")
    loss = model.evaluate(x, y, 8, 0)
    wanted = float(np.mean((keras.ops.convert_to_numpy(model(x)) - y) ** 2))
    return [bool(abs(loss - wanted) < 1e-5), model.predict(x, 8, 0).shape == y.shape]


class Text(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    """A callback that writes its own text file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        with self.path.open("a") as file:
            print(json.dumps([epoch, sorted(logs)]), file=file)


class AfterEvaluation(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    """A callback of `evaluate` and `predict` that saves the model, and reads the file on every rank."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def on_test_end(self, logs: Any = None) -> None:
        del logs
        self.model.save(self.path)
        keras.models.load_model(self.path)

    on_predict_end = on_test_end


@contextmanager
def meeting_before_folders() -> Iterator[None]:
    """While this lasts, ranks that find the same folder missing wait for each other before they create it."""
    plain = file_utils.exists

    def exists(path: Any) -> bool:
        found: bool = plain(path)
        if not found and str(path).endswith("new/folder"):
            mk.barrier()
        return found

    file_utils.exists = exists
    try:
        yield
    finally:
        file_utils.exists = plain


def written(folder: str) -> Any:
    """Train with callbacks that write files; then read each file on every rank.

    The callbacks are Keras' own, a user's, and a callback in OnFirstRank.
    """
    mk.barrier()
    opened: list[str] = []

    def hook(event: str, arguments: Any) -> None:
        if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax"):
            opened.append(str(arguments[0]))

    sys.addaudithook(hook)
    x, y = data()
    model = mk.distribute(network())
    model.compile(keras.optimizers.SGD(0.1, use_ema=True), "mse")
    checkpoint = keras.callbacks.ModelCheckpoint
    callbacks = [
        checkpoint(f"{folder}/new/folder/model.keras"),
        checkpoint(f"{folder}/epoch-{{epoch}}.weights.h5", save_weights_only=True),
        checkpoint(f"{folder}/batch-{{batch}}.weights.h5", save_weights_only=True, save_freq=2),
        checkpoint(f"{folder}/best.keras", monitor="loss", save_best_only=True),
        keras.callbacks.BackupAndRestore(f"{folder}/backup", delete_checkpoint=False),
        keras.callbacks.CSVLogger(f"{folder}/log.csv"),
        mk.callbacks.OnFirstRank(Text(Path(folder) / "text")),
        Own(folder),
    ]
    with meeting_before_folders():
        model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
    model.evaluate(x, y, 8, 0, callbacks=AfterEvaluation(f"{folder}/evaluated.keras"))
    model.predict(x, 8, 0, callbacks=[AfterEvaluation(f"{folder}/predicted.keras")])
    if mk.rank():
        here = {Path(path).name for path in opened if folder in path}
        assert here <= {"of-rank-1.keras"}, here  # rank 0 writes all other files
    names = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())
    for name in names:
        if name.endswith(".weights.h5"):
            network().load_weights(f"{folder}/{name}")
        elif name.endswith(".keras"):
            keras.models.load_model(f"{folder}/{name}")
    assert len((Path(folder) / "log.csv").read_text().splitlines()) == 4
    assert len((Path(folder) / "text").read_text().splitlines()) == 3
    return [name for name in names if not name.startswith("of-rank-")]


class Summary:
    """Stands in for tensorflow.summary: it records the numbers, in place of files for TensorBoard."""

    def __init__(self) -> None:
        self.written: list[tuple[str, int, float]] = []

    def create_file_writer(self, _folder: str) -> Any:
        return SimpleNamespace(as_default=lambda _step=None: nullcontext(), close=lambda: None)

    def record_if(self, _wanted: bool) -> Any:  # noqa: FBT001 -- the signature of tensorflow.summary
        return nullcontext()

    def scalar(self, name: str, value: Any, step: Any) -> None:
        self.written.append((name, int(keras.ops.convert_to_numpy(step)), float(value)))


def summaries(folder: str) -> Any:
    """Return what TensorBoard's callback writes of each batch, epoch and evaluation, without and with `distribute`."""
    x, y = data()
    found = []
    for model in (network(), mk.distribute(network())):
        model.compile("sgd", "mse", metrics=["mae"])
        board = keras.callbacks.TensorBoard(folder, update_freq=1, write_graph=False, profile_batch=0)
        board._summary_module = Summary()
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False, validation_data=(x, y), callbacks=[board])
        model.evaluate(x, y, batch_size=8, verbose=0, callbacks=[board])
        model.predict(x, batch_size=8, verbose=0, callbacks=[board])
        found.append(board._summary_module.written)
    return found


def restored(folder: str) -> Any:
    """A training that BackupAndRestore resumes continues on every rank.

    Only rank 0 reads the backup.
    """
    x, y = data()
    backup = f"{folder}/again"

    class Stops(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            del logs
            if epoch == 1 and mk.rank() == mk.size() - 1:
                self.model.stop_training = True  # on one rank; all ranks must stop

    for stops in ([Stops()], []):
        model = mk.distribute(network())
        model.compile("sgd", "mse")
        kept = keras.callbacks.BackupAndRestore(backup, delete_checkpoint=not stops)
        history = model.fit(x, y, batch_size=8, epochs=5, verbose=0, shuffle=False, callbacks=[kept, *stops])
        assert len(history.epoch) == (2 if stops else 3)
    return [each.tolist() for each in model.get_weights()]


def mistaken(_folder: str) -> Any:
    """Return the errors for data that differ between ranks, from each kind of source."""
    x, y = data(mk.rank())

    def batches() -> Iterator[Any]:
        while True:
            yield x, y

    told = []
    for given in ((x, y), (batches(),)):
        model = mk.distribute(network())
        model.compile("sgd", "mse")
        try:
            model.fit(*given, steps_per_epoch=2, verbose=0)
        except ArgumentError as error:
            told.append(str(error))
    return told


def found(folder: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the result of each program."""
    mk.init()
    return {name: globals()[name](folder) for name in names}
