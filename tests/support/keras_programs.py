"""Jobs that ranks of test_keras.py run, with KERAS_BACKEND set."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

import multiring.keras as mk
from multiring.errors import MultiringError
from multiring.keras.replicas import same_data
from multiring.keras.shards import ArrayShards, BatchDivision, unwrapped
from multiring.keras.values import settled

ROWS = 50
NO_RATE: Any = None


def data() -> tuple[Any, Any]:
    random = np.random.default_rng(3)
    images = random.normal(size=(ROWS, 6))
    return images, np.sin(images.sum(axis=1, keepdims=True))


def network() -> Any:
    keras.utils.set_random_seed(mk.rank())  # ranks' weights differ until a broadcast
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
    if mk.rank() == 0:
        random = np.random.default_rng(4)
        model.set_weights([random.normal(size=weight.shape) * 0.5 for weight in model.get_weights()])
    return model


class Batches(keras.utils.PyDataset):  # type: ignore[misc] # Keras has no types
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        images, labels = data()
        return images[index * 8 : index * 8 + 8], labels[index * 8 : index * 8 + 8]


def distributed(_folder: str) -> Any:
    """Train on arrays with `distribute`: batches of 8, the last of 2.

    Only 1, 2 and 4 ranks divide a batch evenly.
    """
    images, labels = data()
    model = mk.distribute(network())
    model.compile(keras.optimizers.Adam(0.02, clipnorm=1.0), "mse", metrics=["mae"])
    history = model.fit(
        images, labels, batch_size=8, epochs=7, shuffle=False, verbose=0, validation_data=(images[:7], labels[:7])
    )
    losses = [model.evaluate(images, labels, verbose=0, batch_size=16)]
    model.fit(Batches(), epochs=2, verbose=0)
    losses += [model.evaluate(images, labels, verbose=0)]
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf  # noqa: PLC0415

        model.fit(tf.data.Dataset.from_tensor_slices((images, labels)).batch(8), epochs=2, verbose=0)
        losses += [model.evaluate(images, labels, verbose=0)]
    model.fit(images, labels, batch_size=8, epochs=1, verbose=0, validation_split=0.2)
    predicted = model.predict(images[:5], verbose=0)
    assert np.allclose(predicted, keras.ops.convert_to_numpy(model(images[:5])))
    weights = mk.allgather_object([weight.tolist() for weight in model.get_weights()])
    assert all(each == weights[0] for each in weights)
    return [*(value for pair in losses for value in pair), *history.history["val_loss"]]


def by_callbacks(folder: str) -> Any:
    images, labels = data()
    own = slice(mk.rank(), 48, mk.size())
    model = network()
    optimizer = mk.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse")
    rates: list[float] = []

    def record(batch: int, logs: Any) -> None:
        del batch, logs
        settled(model)
        rates.append(float(keras.ops.convert_to_numpy(optimizer.learning_rate)))

    history = model.fit(
        images[own],
        labels[own],
        batch_size=8 // mk.size(),
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=[
            mk.callbacks.BroadcastGlobalVariablesCallback(0),
            mk.callbacks.MetricAverageCallback(),
            mk.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2, verbose=1),
            mk.callbacks.LearningRateScheduleCallback(0.1, 0.5, start_epoch=2),
            mk.callbacks.BestModelCheckpoint("loss", filepath=f"{folder}/best.keras"),
            keras.callbacks.LambdaCallback(on_train_batch_end=record),
        ],
    )
    averaged = mk.allgather_object(history.history["loss"])
    assert all(each == averaged[0] for each in averaged)
    assert np.isclose(rates[-1], 0.05)
    assert np.isclose(rates[11], 0.1)
    assert np.isclose(rates[0], 0.1 / mk.size() * (1 / 6 * (mk.size() - 1) / 2 + 1))
    mk.barrier()  # rank 0 has written the file now
    loaded = mk.load_model(f"{folder}/best.keras")
    assert np.allclose(loaded.predict(images, verbose=0), model.predict(images, verbose=0))
    loaded.fit(images[own], labels[own], verbose=0)
    assert mk.allreduce(np.arange(3.0), op=mk.Sum).tolist() == (np.arange(3.0) * mk.size()).tolist()
    assert mk.allreduce(mk.rank(), op=mk.Max) == mk.size() - 1
    big = 2**58 + 1  # needs more digits than float64 has
    assert mk.allreduce(np.array(big), op=mk.Sum, prescale_factor=2.0) == 2 * big * mk.size()
    assert mk.allreduce(np.array([big, -1]), postscale_factor=3.0).tolist() == [3 * big, -3]
    rows = np.array([2**62 + 1, -1 - 2 * (not mk.rank())] * mk.size())
    assert mk.reducescatter(rows).tolist() == [2**62 + 1, -1 - (2 // mk.size())]  # truncated; the sum overflows int64
    assert mk.allgather(np.full((mk.rank() + 1, 2), 1.0)).shape == (sum(range(1, mk.size() + 1)), 2)
    assert mk.broadcast(np.array([mk.rank()]), mk.size() - 1).tolist() == [mk.size() - 1]
    return history.history["loss"]


def accumulating(_folder: str) -> Any:
    images, labels = data()
    model = network()
    mk.broadcast_variables(model.variables)
    optimizer = mk.DistributedOptimizer(
        keras.optimizers.SGD(0.01), backward_passes_per_step=3, average_aggregated_gradients=True
    )
    model.compile(optimizer, "mse")
    own = slice(mk.rank(), 48, mk.size())
    model.fit(images[own], labels[own], batch_size=8 // mk.size(), epochs=2, shuffle=False, verbose=0)
    return [model.evaluate(images[:48], labels[:48], verbose=0)]


def normalizing(folder: str) -> Any:
    """Train in batches of 10: statistics must cover the samples of all ranks."""
    images, labels = data()
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8), mk.SyncBatchNormalization(momentum=0.5), keras.layers.Dense(1)]
    )
    random = np.random.default_rng(4)
    model.set_weights([abs(random.normal(size=weight.shape)) * 0.5 for weight in model.get_weights()])
    mk.distribute(model).compile(keras.optimizers.SGD(0.05), "mse")
    history = model.fit(images, labels, batch_size=10, epochs=4, shuffle=False, verbose=0)
    path = f"{folder}/normalizing-{mk.rank()}.keras"
    if mk.size() > 1:  # a job of one rank has no folder
        model.save(path)
        assert type(keras.models.load_model(path).layers[1]) is keras.layers.BatchNormalization
    moving = [float(each) for each in keras.ops.convert_to_numpy(model.layers[1].moving_variance)]
    return [*history.history["loss"], model.evaluate(images, labels, verbose=0), *moving]


def mistaken(_folder: str) -> Any:
    found: dict[str, str] = {}

    def told(name: str, function: Callable[[], Any]) -> None:
        try:
            function()
        except (MultiringError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    optimizer = mk.DistributedOptimizer(keras.optimizers.SGD())
    told("twice", lambda: mk.DistributedOptimizer(optimizer))
    told("none", lambda: mk.DistributedOptimizer(3))
    told("legacy", lambda: mk.load_model("x.keras", legacy_opts=True))
    told("synchronized", lambda: mk.SyncBatchNormalization(synchronized=True))
    told("globals", lambda: mk.broadcast_global_variables(0))
    told("model", lambda: mk.distribute(3))
    model = mk.distribute(network())
    told("again", lambda: mk.distribute(model))
    if keras.backend.backend() == "tensorflow":
        told("jit", lambda: model.compile("sgd", "mse", jit_compile=True))
    images, labels = data()
    model.compile("sgd", "mse", jit_compile=False)
    told("rows", lambda: model.fit(images, labels[:3], verbose=0))
    told("maximum", lambda: mk.reducescatter(np.ones(4), op=mk.Max))
    told("rate", lambda: mk.callbacks.LearningRateScheduleCallback(NO_RATE, 0.5))
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf  # noqa: PLC0415

        apart = tf.data.Dataset.from_tensor_slices((images + mk.rank(), labels)).batch(8)
        told("data", lambda: model.fit(apart, verbose=0))
        ragged = tf.ragged.constant([[1.0, 2.0], [3.0] + [0.0] * mk.rank()])
        told("ragged", lambda: same_data([ragged]))
        told("sparse", lambda: same_data([tf.sparse.from_dense([[0.0, 1.0 + mk.rank()]])]))
    return found


def dealt(_folder: str) -> Any:
    """Check that each pass of a TensorFlow data set has the rows of its plan.

    Return the largest number of functions that one data set traces.
    """
    from tensorflow.python.data.ops import structured_function  # noqa: PLC0415 -- TensorFlow's backend only

    random = np.random.default_rng(5)
    traced = []
    plain = structured_function.StructuredFunctionWrapper.__init__

    def counted(self: Any, *arguments: Any, **keywords: Any) -> None:
        traced.append(arguments)
        plain(self, *arguments, **keywords)

    most: dict[bool, int] = {False: 0, True: 0}
    structured_function.StructuredFunctionWrapper.__init__ = counted
    for turn in range(8):
        rows, batch, ranks = (int(random.integers(1, high)) for high in (40, 12, 6))
        place, shuffle = BatchDivision(int(random.integers(ranks)), ranks, turn % 4 > 1), turn % 2 == 1
        x = random.normal(size=(rows, 3))
        arrays = [ArrayDataAdapter(x, {"y": np.arange(rows)}, batch_size=batch) for _ in range(2)]
        shards, plans = (ArrayShards(each, place, shuffle, turn) for each in arrays)
        traced.clear()
        dataset = shards.get_tf_dataset()
        most[shuffle] = max(most[shuffle], len(traced))
        for _ in range(3):
            for batch_of_rank, (indices, count, total) in zip(dataset, plans.plan(), strict=True):
                part, (taken, labels) = unwrapped(batch_of_rank)
                assert [int(each) for each in part] == [count, total]
                assert np.array_equal(taken, x[indices])
                assert np.array_equal(labels["y"], indices)
    return most


def found(folder: str, names: Sequence[str]) -> dict[str, Any]:
    """Return each program's result, gathered from all ranks."""
    keras.config.set_floatx("float64")  # in the rank, because other tests fork ranks from the same nursery
    mk.init()
    listed = (distributed, by_callbacks, accumulating, normalizing, mistaken, dealt)
    programs = {each.__name__: each for each in listed}
    return {name: programs[name](folder) for name in names}
