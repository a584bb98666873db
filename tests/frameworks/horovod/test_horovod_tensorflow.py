"""Programs for Horovod on TensorFlow and Keras, like its examples, run unchanged."""

import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.support.ranks import Process
from tests.support.scripts import Start, run_script

from multiring._launch.horovod import horovod_environment, horovod_without_effect, positions_on

pytestmark = [
    pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]


def ran(folder: Path, ranks: int, program: str) -> list[str]:
    """Run a program, indented text, on ranks with the launcher's variables.

    Every rank must exit with 0 and print "well". Return the ranks' outputs.
    """
    script = folder / "program.py"
    script.write_text(textwrap.dedent(program))
    environments = tuple(horovod_environment({}, place) for place in positions_on([("localhost", ranks)]))
    process = Process(nursery="tf", beforehand=("multiring.tensorflow", "multiring.keras"))
    ended = run_script(script, ranks, process=process, start=Start(environments=environments))
    assert all(code == 0 and "well" in told.splitlines() for code, told in ended), ended
    return [told for _, told in ended]


TAPE = """
    import numpy as np
    import tensorflow as tf
    import horovod.tensorflow as hvd

    hvd.init()
    for gpu in tf.config.experimental.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    centres = np.random.default_rng(0).normal(size=(10, 28, 28, 1)).astype(np.float32)
    labels = np.random.default_rng(hvd.rank()).integers(0, 10, 512)
    images = centres[labels] + np.random.default_rng(9 + hvd.rank()).normal(size=(512, 28, 28, 1)).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().shuffle(512).batch(32)
    model = tf.keras.Sequential([
        tf.keras.layers.Conv2D(8, [3, 3], activation="relu"), tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
        tf.keras.layers.Dropout(0.25), tf.keras.layers.Flatten(), tf.keras.layers.Dense(10, activation="softmax"),
    ])
    loss = tf.losses.SparseCategoricalCrossentropy()
    opt = tf.optimizers.Adam(0.001 * hvd.size())
    state = hvd.elastic.TensorFlowKerasState(model, opt, batch=0)

    @tf.function
    def training_step(images, labels, first_batch):
        with tf.GradientTape() as tape:
            loss_value = loss(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16)
        grads = tape.gradient(loss_value, model.trainable_variables)
        opt.apply_gradients(zip(grads, model.trainable_variables))
        if first_batch:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(opt.variables, root_rank=0)
        return loss_value

    losses = [float(training_step(i, l, number == 0)) for number, (i, l) in enumerate(dataset.take(40))]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) / 2, losses
    every = hvd.allgather_object([weight.tolist() for weight in model.get_weights()])
    assert all(each == every[0] for each in every)

    sums = [hvd.allreduce(tf.ones(3), op=hvd.Sum, name=f"uneven{n}").numpy().tolist() for n in range(2 + hvd.rank())]
    assert sums[:2] == [[2.0] * 3] * 2 and sums[2:] == [[1.0] * 3] * hvd.rank(), sums
    assert hvd.join() == hvd.size() - 1
    state.register_reset_callbacks([lambda: None])

    @hvd.elastic.run
    def train(state):
        for state.batch in range(state.batch, 4):
            training_step(images[:32], labels[:32], False)
            if state.batch % 2 == 0:
                state.commit()

    train(state)
    assert state.batch == 3
    print("well")
"""

KERAS = """
    import numpy as np
    import tensorflow as tf
    import horovod.tensorflow.keras as hvd
    import horovod.keras
    from horovod.tensorflow.keras import callbacks, elastic
    from horovod.keras.callbacks import MetricAverageCallback

    hvd.init()
    centres = np.random.default_rng(0).normal(size=(10, 64)).astype(np.float32)
    labels = np.random.default_rng(hvd.rank()).integers(0, 10, 512)
    images = centres[labels] + np.random.default_rng(9 + hvd.rank()).normal(size=(512, 64)).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().shuffle(512).batch(32)
    model = tf.keras.Sequential([tf.keras.layers.Dense(32, activation="relu"), tf.keras.layers.Dropout(0.1),
                                 tf.keras.layers.Dense(10, activation="softmax")])
    scaled_lr = 0.003 * hvd.size()
    opt = tf.optimizers.Adam(scaled_lr)
    opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)
    model.compile(loss=tf.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])
    history = model.fit(dataset, steps_per_epoch=32 // hvd.size(), epochs=6, verbose=2 if hvd.rank() == 0 else 0,
                        callbacks=[callbacks.BroadcastGlobalVariablesCallback(0), MetricAverageCallback(),
                                   callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3,
                                                                        verbose=1)]).history
    assert history["loss"][-1] < history["loss"][0] / 2 and history["accuracy"][-1] > 0.8, history
    assert hvd.allgather_object(history["loss"]) == [history["loss"]] * hvd.size()

    # An optimizer made from a configuration combines gradients, too.
    plain = hvd.DistributedOptimizer(tf.optimizers.SGD(0.5))
    copied = plain.__class__.from_config(plain.get_config())
    assert copied.get_config() == plain.get_config()
    value = tf.Variable([0.0])
    copied.apply_gradients([(tf.constant([hvd.rank() + 1.0]), value)])
    assert value.numpy().tolist() == [-0.5 * (hvd.size() + 1) / 2]
    for name in ("allreduce", "allgather", "broadcast"):
        assert callable(getattr(horovod.keras, name)) and callable(getattr(hvd, name))
    assert hvd.broadcast(float(hvd.rank() + 3), 0) == 3.0 and hvd.size() == horovod.keras.size()

    state = elastic.KerasState(model, batch=0, epoch=0)

    @elastic.run
    def train(state):
        model.fit(dataset, steps_per_epoch=2, epochs=2 - state.epoch, verbose=0,
                  callbacks=[elastic.UpdateBatchStateCallback(state), elastic.UpdateEpochStateCallback(state),
                             elastic.CommitStateCallback(state)])

    train(state)
    assert state.epoch == 2, state.epoch
    print("well")
"""

SESSIONS = """
    import numpy as np
    import tensorflow.compat.v1 as tf
    import horovod.tensorflow as hvd

    tf.disable_eager_execution()
    hvd.init()
    size, rank = hvd.size(), hvd.rank()
    random = np.random.default_rng(rank)
    image = tf.placeholder(tf.float32, [None, 8], name="image")
    label = tf.placeholder(tf.float32, [None, 1], name="label")
    weights = tf.get_variable("weights", [8, 1], initializer=tf.random_normal_initializer(seed=rank))
    loss = tf.reduce_mean(tf.square(image @ weights - label))
    opt = hvd.DistributedOptimizer(tf.train.MomentumOptimizer(0.05, 0.5), op=hvd.Average,
                                   gradient_predivide_factor=2.0)
    global_step = tf.train.get_or_create_global_step()
    train_op = opt.minimize(loss, global_step=global_step)
    assert opt.get_slot_names() == ["momentum"] and opt.get_slot(weights, "momentum") is not None
    mean = hvd.allreduce(loss)
    gathered = hvd.allgather(tf.reshape(hvd.rank_op(), [1]))
    sparse = hvd.allreduce(tf.IndexedSlices(tf.ones([1, 2]), tf.constant([rank]), tf.constant([4, 2])), op=hvd.Sum)
    gradient = tf.gradients(hvd.allreduce(weights * (rank + 1.0), op=hvd.Sum), weights)[0]
    asking = [gathered, hvd.size_op(), hvd.local_rank_op(), tf.convert_to_tensor(sparse), gradient]
    initial, everybodys = tf.global_variables_initializer(), hvd.broadcast_global_variables(size - 1)
    rows = hvd.allgather(tf.reshape(weights, [1, 8]))
    hooks = [hvd.BroadcastGlobalVariablesHook(0), tf.train.StopAtStepHook(last_step=30),
             tf.train.LoggingTensorHook({"loss": loss}, every_n_iter=10)]
    losses = []
    with tf.train.MonitoredTrainingSession(hooks=hooks) as session:
        zeros = {image: np.zeros((1, 8)), label: np.zeros((1, 1))}  # hooks look at the loss in every run
        asked = session.run(asking, zeros)
        assert asked[0].tolist() == list(range(size)) and asked[1:3] == [size, rank]
        assert asked[3].sum() == 2 * size and np.allclose(asked[4], (rank + 1.0) * size)
        while not session.should_stop():
            data = random.normal(size=(16, 8))
            found = session.run([train_op, mean], {image: data, label: data.sum(1, keepdims=True)})
            losses.append(float(found[1]))
    assert len(losses) == 30 and losses[-1] < losses[0] / 2, losses
    with tf.Session() as session:
        session.run(initial)
        session.run(everybodys)
        value, every = session.run([weights, rows])
        assert (every == value.reshape(1, 8)).all()
        assert hvd.broadcast_object_fn(0, session)({"of": rank}) == {"of": 0}
    try:
        hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(0.1), backward_passes_per_step=2)
    except Exception as error:
        assert "tf.keras.optimizers" in str(error), error
    else:
        raise AssertionError("several passes of tf.compat.v1")
    print("well")
"""

DROPPED = """
    import importlib
    import logging
    import numpy as np
    import tensorflow as tf
    import horovod.tensorflow as hvd
    import horovod.tensorflow.keras as hk

    def told(function, *arguments, **keywords):
        try:
            function(*arguments, **keywords)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        raise AssertionError(f"{function}{arguments} raised no error")

    for name in ("mxnet", "tensorflow.data", "tensorflow.data.compute_service"):
        words = told(importlib.import_module, f"horovod.{name}")
        assert words.startswith("ImportError: horovod.") and "multiring has no" in words, words
    hvd.init()
    assert "legacy_opts=True" in told(hk.load_model, "x.keras", legacy_opts=True)
    assert "no global variables" in told(hk.broadcast_global_variables, 0)
    # An optimizer of Keras 2, from tf_keras or optimizers.legacy, has other methods.
    legacy = type("SGD", (), {"__module__": "tf_keras.optimizers.legacy", "get_gradients": lambda self: []})()
    for make in (hvd.DistributedOptimizer, hk.DistributedOptimizer):
        words = told(make, legacy)
        assert "tf_keras.optimizers.legacy.SGD" in words and "of Keras 3" in words, words
    assert not hasattr(tf, "estimator")  # TensorFlow removed tf.estimator
    heard = []
    logging.getLogger("multiring").addHandler(type("Heard", (logging.Handler,), {
        "emit": lambda self, record: heard.append(record.getMessage())})())
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="ones")])  # the same on all ranks
    model.compile(hk.DistributedOptimizer(tf.optimizers.SGD(0.1, momentum=0.9)), "mse")
    for corrects in (False, True):
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=[
            hk.callbacks.LearningRateScheduleCallback(0.1, 0.5, momentum_correction=corrects)])
        assert any("momentum_correction" in words for words in heard) == (corrects and hvd.rank() == 0), heard
    print("well")
"""


@pytest.mark.parametrize("program", [TAPE, KERAS, SESSIONS, DROPPED], ids=["tape", "keras", "sessions", "dropped"])
def test_programs_for_horovod_run(program: str, tmp_path: Path) -> None:
    ran(tmp_path, 2, program)


def test_xla_operations_are_said_to_be_dropped() -> None:
    told = horovod_without_effect({"HOROVOD_ENABLE_XLA_OPS": "1"})
    assert "jit_compile" in told["HOROVOD_ENABLE_XLA_OPS"]
