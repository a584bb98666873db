"""Jobs of test_first_steps.py: ranks with equal or different models and samples."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import multiring
import multiring.keras as mk

BACKEND = keras.backend.backend()
Train = Callable[..., Any]  # takes the seeds of the model and the samples, the steps, and options


def found_in(train: Train, model: int, samples: int, steps: int = 3, **more: Any) -> list[str]:
    """Train; return multiring's error, or its warnings about the first step."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            train(model, samples, steps, **more)
        except Exception as error:  # noqa: BLE001 -- its type depends on the framework
            return [f"{type(mk.error_of(error) or error).__name__}: {mk.error_of(error) or error}"]
    return [str(each.message) for each in seen if "at the first step all" in str(each.message)]


def of_keras(model: int, samples: int, steps: int, **more: Any) -> None:
    """Train with a Keras optimizer, like a program for Horovod."""
    random = np.random.default_rng(model)
    network = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    network.set_weights([random.normal(size=each.shape) for each in network.get_weights()])
    optimizer = mk.DistributedOptimizer(keras.optimizers.SGD(0.01))
    callbacks = [mk.callbacks.BroadcastGlobalVariablesCallback(0)] if more.get("broadcasts") else []
    if more.get("local"):
        own = network.layers[1].trainable_variables
        for each in own:
            optimizer.register_local_var(each)
        for each, shared in zip(network.layers[0].trainable_variables, more["local"], strict=True):
            each.assign(shared)
    network.compile(optimizer, "mse")
    x, y = np.random.default_rng(samples).normal(size=(2, 4 * steps, 3)).astype(np.float32)
    network.fit(x, y[:, :1], batch_size=4, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)


def of_tensorflow(model: int, samples: int, steps: int, **more: Any) -> None:
    """Train with gradient tapes, eagerly or compiled."""
    tf, mt = importlib.import_module("tensorflow"), importlib.import_module("multiring.tensorflow")
    random = np.random.default_rng(model)
    shared = np.random.default_rng(0) if more.get("differs_in_rows") else random
    variables = [tf.Variable(shared.normal(size=shape).astype(np.float32)) for shape in ((3, 4), (4,))]
    # The largest variable has another type, and the loss gathers its rows.
    variables.append(tf.Variable(random.normal(size=(30, 2))))

    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ variables[0] + variables[1]))
            loss += tf.cast(tf.reduce_mean(tf.gather(variables[2], [0, 2])), tf.float32)
        gradients = mt.DistributedGradientTape(tape).gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))

    run = tf.function(step) if more.get("compiles") else step
    for number in range(steps):
        run(tf.constant(np.random.default_rng([samples, number]).normal(size=(4, 3)).astype(np.float32)))
        if more.get("broadcasts") and number == 0:
            mt.broadcast_variables(variables, 0)


def of_jax(model: int, samples: int, steps: int, **more: Any) -> None:
    """Train with a gradient transformation: eager, compiled or in a scan."""
    jax, mj = importlib.import_module("jax"), importlib.import_module("multiring.jax")
    jnp = jax.numpy
    random = np.random.default_rng(model)
    parameters = {"w": jnp.asarray(random.normal(size=(3, 4)).astype(np.float32))}
    if not more.get("single"):
        parameters["b"] = jnp.asarray(random.normal(size=4)).astype(jnp.bfloat16)
    descent = mj.distribute(type("Descent", (), {"init": lambda _: (), "update": lambda g, s, _: (g, s)}))

    def step(parameters: Any, x: Any) -> Any:
        gradients = jax.grad(lambda p: jnp.mean((x @ p["w"] + p.get("b", 0.0)) ** 2))(parameters)
        updates, _ = descent.update(gradients, (), parameters)
        return jax.tree.map(lambda p, u: p - 0.1 * u, parameters, updates), 0.0

    x = [np.random.default_rng([samples, number]).normal(size=(4, 3)).astype(np.float32) for number in range(steps)]
    if more.get("scans"):
        jax.block_until_ready(jax.jit(lambda p: jax.lax.scan(step, p, jnp.stack(x)))(parameters))
        return
    run = jax.jit(step) if more.get("compiles") else step
    for number in range(steps):
        parameters, _ = run(parameters, x[number])
        jax.block_until_ready(parameters)
        if more.get("broadcasts") and number == 0:
            parameters = mj.broadcast(parameters)


TRAININGS: dict[str, tuple[Train, dict[str, Any]]] = {"keras": (of_keras, {})}
if BACKEND == "tensorflow":
    TRAININGS |= {"tape": (of_tensorflow, {}), "compiled tape": (of_tensorflow, {"compiles": True})}
    TRAININGS |= {"rows of a tape": (of_tensorflow, {"differs_in_rows": True})}
if BACKEND == "jax":
    TRAININGS |= {
        "compiled jax": (of_jax, {"compiles": True}),
        "jax": (of_jax, {"single": True}),
        "scan": (of_jax, {"scans": True, "single": True}),
    }


def found(rank: int) -> dict[str, list[str]]:
    """Return the errors or warnings of each training, by its name and kind of start."""
    mk.init()
    told: dict[str, list[str]] = {}
    few = list(TRAININGS.items())[:2]
    for name, (train, more) in TRAININGS.items():
        told[f"{name}: other models"] = found_in(train, rank, rank, **more)
        if "scans" not in more:
            told[f"{name}: broadcast"] = found_in(train, rank, rank, broadcasts=True, **more)
    shared = np.random.default_rng(3)
    values = [shared.normal(size=(3, 4)), shared.normal(size=4)]
    told["keras: local variables"] = found_in(of_keras, rank, rank, local=values)
    for name, (train, more) in few:
        told[f"{name}: same samples"] = found_in(train, 7, 7, **more)
    mk.shutdown()
    multiring.init(check_first_steps=False)
    for name, (train, more) in few:
        told[f"{name}: off"] = found_in(train, rank, 7, **more)
    mk.shutdown()
    return told


def join_early(rank: int) -> bool:
    """Train on ranks with different batch counts; ranks without batches join."""
    mk.init()
    for steps in (0, 1, 2):
        found_in(of_keras, 7, rank, steps if rank == 1 else 3) if steps or rank != 1 else None
        mk.join()
    mk.shutdown()
    return True
