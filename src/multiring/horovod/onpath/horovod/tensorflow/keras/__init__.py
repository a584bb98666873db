"""multiring.keras under Horovod's name, with TensorFlow tensors as results."""

from typing import Any

import tensorflow as tf

from horovod.tensorflow.keras import callbacks, elastic
from multiring import keras, tensorflow
from multiring._frontend.build_questions import *  # noqa: F403 -- what the adapter's public names leave out
from multiring.keras import *  # noqa: F403 -- all names, except those defined below


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
    """Return the combination of all ranks' `value` as a tensor."""
    chosen = op if op is not None or average is None else keras.Average if average else keras.Sum
    factors = prescale_factor, postscale_factor
    return tf.constant(keras.allreduce(_plain(value), name, None, *factors, chosen, compression, process_set))


def allgather(value: Any, name: str | None = None) -> Any:  # type: ignore[no-redef] # Horovod's result
    """Return the rows of all ranks' `value` as a tensor."""
    return tensorflow.allgather(tf.constant(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:  # type: ignore[no-redef] # Horovod's result
    """Return the `value` of rank `root_rank` as a tensor."""
    return tensorflow.broadcast(tf.constant(value), root_rank, name=name)


def reducescatter(  # type: ignore[no-redef] # Horovod's result
    value: Any, name: str | None = None, op: int | str = keras.Average
) -> Any:
    """Return this rank's rows of the combination of all ranks' `value` as a tensor."""
    return tensorflow.reducescatter(tf.constant(value), name=name, op=op)


def _plain(value: Any) -> Any:
    """Return `value` as a NumPy array. TensorFlow chooses the array's type."""
    return tf.constant(value).numpy()
