"""distribute and gather: the adapter's short interface."""

from typing import Any

import tensorflow as tf

from multiring._frontend.evaluation import gathered
from multiring._frontend.process_sets import ProcessSet, global_process_set
from multiring._frontend.reduce_ops import Average
from multiring.tensorflow.collectives import allgather
from multiring.tensorflow.compression import Compression
from multiring.tensorflow.gradient_tape import DistributedGradientTape
from multiring.tensorflow.optimizer import DistributedOptimizer


def distribute(
    optimizer: Any,
    *,
    op: int | str = Average,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer, or a tape, that combines all ranks' gradients.

    Every rank makes the same update to its own copy of the variables, so call `broadcast_variables` after the first
    step. For Keras' `fit`, use `multiring.keras.distribute`.

    Args:
        optimizer: an optimizer of Keras or tf.compat.v1; or a tf.GradientTape that has recorded operations.
        op: Average, Sum or Adasum.
        compression: a member of `Compression`, its name, or a `Compressor`.
        process_set: by default, all ranks.

    Returns:
        A `DistributedOptimizer`, or a `DistributedGradientTape`.

    Raises:
        ArgumentError: `optimizer` is neither an optimizer nor a tape.
    """
    if isinstance(optimizer, tf.GradientTape):
        return DistributedGradientTape(optimizer, compression=compression, op=op, process_set=process_set)
    return DistributedOptimizer(optimizer, compression=compression, op=op, process_set=process_set)


def gather(outputs: Any, process_set: ProcessSet = global_process_set) -> Any:
    """Return the outputs of all ranks in rank order, in eager execution.

    The rows of tensors and the elements of lists are concatenated. The values of dicts and tuples are gathered one by
    one; values of dicts are matched by key. Every rank calls this function. A rank without samples passes tensors
    without rows. The result has no gradient.

    Raises:
        ArgumentError: an output is not a tensor, list, dict or tuple.
        CollectiveError: on every rank: outputs differ in keys or kinds, or a rank is gone.
        tf.errors.OpError: on every rank: tensors differ in more than the number of their rows.
    """

    def rows(tensor: Any) -> Any:
        return allgather(tf.stop_gradient(tensor), process_set=process_set)

    return gathered(outputs, tf.is_tensor, rows, process_set)
