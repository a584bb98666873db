"""Faults that end a job while Keras' `fit` or a tf.function runs.

The faults are an error on one rank, a killed rank, and Ctrl-C. Each function returns the seconds until this rank
detected the fault. The rank at fault raises its own error.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

import multiring.keras as mk
from multiring.adapters.conformance.adapter import kind_of
from multiring.errors import PeerLostError

FAULT_AT = 3  # the batch or step of the fault
_OWN = "an error of one rank's own"


class _AtBatch(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    """Calls `act` after batch FAULT_AT; `ended` is the time of the last batch's end."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self._act = act
        self._batches = 0
        self.ended = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        del batch, logs
        self._batches += 1
        if self._batches == FAULT_AT:
            self._act()
        self.ended = time.monotonic()


def _fit(callback: _AtBatch) -> None:
    mk.init()
    layers = keras.layers
    model = keras.Sequential([keras.Input((8,)), layers.Dense(16, activation="relu"), layers.Dense(1)])
    model.compile(mk.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    images = np.random.default_rng(mk.rank()).normal(size=(64, 8)).astype(np.float32)
    callbacks = [mk.callbacks.BroadcastGlobalVariablesCallback(0), callback]
    model.fit(images, images[:, :1], batch_size=8, epochs=1 << 20, verbose=0, callbacks=callbacks)


def _told(error: Exception, since: float, *, is_at_fault: bool) -> float:
    """Return the seconds since `since` if `error` reports a lost peer.

    Raises:
        Exception: `error` itself, if this rank is at fault or `error` is of another kind.
    """
    taken = time.monotonic() - since
    if is_at_fault:
        raise error
    if not isinstance(kind_of(error), PeerLostError):
        raise error
    return taken


def with_an_exception(here: Any, over: str) -> float:
    """Run `fit`; rank 1 raises an error in a callback."""
    del over

    def act() -> None:
        if here.rank == 1:
            raise ArithmeticError(_OWN)

    callback = _AtBatch(act)
    try:
        _fit(callback)
    except Exception as error:  # noqa: BLE001 -- its type depends on the backend
        return _told(error, callback.ended, is_at_fault=here.rank == 1)
    raise AssertionError("fit ended")


def with_a_lost_rank(here: Any, over: str) -> float:
    """Run `fit`; a rank is killed once all ranks are training."""
    del over
    callback = _AtBatch(lambda: here.reach("at work"))
    try:
        _fit(callback)
    except Exception as error:  # noqa: BLE001 -- its type depends on the backend
        return _told(error, callback.ended, is_at_fault=False)
    raise AssertionError("fit ended")


def interrupted(here: Any, over: str) -> float:
    """Run `fit`; rank 1 stalls, and Ctrl-C interrupts rank 0, which waits for it."""
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    def act() -> None:
        if here.rank == 0:
            threading.Timer(1.0, send).start()
            return
        while not Path(over).exists():
            time.sleep(0.05)
        raise ArithmeticError(_OWN)

    try:
        _fit(_AtBatch(act))
    except KeyboardInterrupt:
        return time.monotonic() - sent[0]
    finally:
        if here.rank == 0:
            Path(over).touch()
    raise AssertionError("fit ended")


def in_a_function(here: Any, over: str) -> float:
    """Run a tf.function in which rank 1 raises an error between collectives."""
    del over
    import tensorflow as tf  # noqa: PLC0415 -- Keras may use another backend

    import multiring.tensorflow as mt  # noqa: PLC0415 -- as above

    mt.init()
    held = tf.Variable(tf.zeros(1000))

    def check(number: Any) -> Any:
        if here.rank == 1 and number == FAULT_AT:
            raise ArithmeticError(_OWN)
        return number

    @tf.function  # type: ignore[untyped-decorator]
    def step(number: Any) -> Any:
        held.assign_add(mt.allreduce(held + 1.0, name="first"))
        found = tf.numpy_function(check, [number], tf.int64)
        held.assign_add(mt.allreduce(held * 0.5, name="second"))
        return found

    began = time.monotonic()
    try:
        for number in range(1 << 20):
            began = time.monotonic()
            step(tf.constant(number, tf.int64))
    except Exception as error:  # noqa: BLE001 -- TensorFlow wraps the original error
        return _told(error, began, is_at_fault=here.rank == 1)
    raise AssertionError("the steps ended")


KINDS = {each.__name__: each for each in (with_an_exception, with_a_lost_rank, interrupted, in_a_function)}
