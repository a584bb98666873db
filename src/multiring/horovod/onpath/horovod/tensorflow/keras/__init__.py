"""multiring.keras, for programs that were written for Horovod: results are TensorFlow's tensors."""

from typing import Any

import tensorflow as tf

from horovod.tensorflow.keras import callbacks as callbacks
from horovod.tensorflow.keras import elastic as elastic
from multiring import keras, tensorflow
from multiring.keras import *  # noqa: F403 -- all of it but what follows


def allreduce(  # type: ignore[no-redef] # Horovod's parameters
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | str | None = None,
    compression: Any = keras.Compression.none,
    process_set: Any = keras.global_process_set,
) -> Any:
    """Return every rank's `value` combined, as a tensor."""
    chosen = op if op is not None or average is None else keras.Average if average else keras.Sum
    factors = prescale_factor, postscale_factor
    return tf.constant(keras.allreduce(_plain(value), name, None, *factors, chosen, compression, process_set))


def allgather(value: Any, name: str | None = None) -> Any:  # type: ignore[no-redef] # Horovod's result
    """Return every rank's rows of `value`, as a tensor."""
    return tensorflow.allgather(tf.constant(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:  # type: ignore[no-redef] # Horovod's result
    """Return rank `root_rank`'s `value`, as a tensor."""
    return tensorflow.broadcast(tf.constant(value), root_rank, name=name)


def reducescatter(  # type: ignore[no-redef] # Horovod's result
    value: Any, name: str | None = None, op: int | str = keras.Average
) -> Any:
    """Return this rank's rows of the ranks' values combined, as a tensor."""
    return tensorflow.reducescatter(tf.constant(value), name=name, op=op)


def _plain(value: Any) -> Any:
    """Return `value` as NumPy's array, of the type that TensorFlow gives numbers."""
    return tf.constant(value).numpy()
