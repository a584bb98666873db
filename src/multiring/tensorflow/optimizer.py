"""DistributedOptimizer, for the optimizers of tf.compat.v1 and Keras.

The signature is Horovod's.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from multiring._frontend.gradient_reduction import groups_of
from multiring._frontend.keras_optimizers import distributed
from multiring._frontend.process_sets import ProcessSet, global_process_set
from multiring._frontend.reduce_ops import Average
from multiring.errors import UnsupportedError
from multiring.tensorflow.compression import Compression
from multiring.tensorflow.reduction import TensorReduction

_Optimizer: Any = tf.compat.v1.train.Optimizer


def DistributedOptimizer(  # noqa: N802 -- Horovod's name
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int | str = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer that combines all ranks' gradients.

    The result applies the combined gradients with `optimizer`.

    Args:
        optimizer: an optimizer of tf.compat.v1 or Keras.
        name: a name for the operations; by default made from the optimizer's class.
        use_locking: as for the optimizers of tf.compat.v1.
        device_dense: see `DistributedGradientTape`.
        device_sparse: see `DistributedGradientTape`.
        compression: see `DistributedGradientTape`.
        sparse_as_dense: see `DistributedGradientTape`.
        backward_passes_per_step: for Keras' optimizers: the number of batches whose gradients are accumulated locally
            for one update.
        op: see `DistributedGradientTape`.
        gradient_predivide_factor: see `DistributedGradientTape`.
        average_aggregated_gradients: whether accumulated gradients are averaged rather than summed.
        num_groups: see `DistributedGradientTape`.
        groups: see `DistributedGradientTape`.
        process_set: see `DistributedGradientTape`.
        scale_local_gradients: see `DistributedGradientTape`.

    Raises:
        ArgumentError: `optimizer` is of neither kind; see `multiring._frontend.keras_optimizers.distributed`.
        UnsupportedError: backward_passes_per_step is not 1 for an optimizer of tf.compat.v1.
    """
    reduction = TensorReduction(
        name or f"Distributed{type(optimizer).__name__}",
        compression,
        op,
        gradient_predivide_factor,
        groups_of(num_groups, groups),
        process_set,
        scale_local_gradients,
        device_dense=device_dense,
        device_sparse=device_sparse,
        sparse_as_dense=sparse_as_dense,
    )
    if not isinstance(optimizer, _Optimizer):
        found = distributed(
            optimizer, reduction.reduce, passes=backward_passes_per_step, averages_passes=average_aggregated_gradients
        )
        found.register_local_var = reduction.keep_local
        return found
    if backward_passes_per_step != 1:
        raise UnsupportedError(
            f"backward_passes_per_step={backward_passes_per_step} with an optimizer of tf.compat.v1: want 1, or an "
            "optimizer of tf.keras.optimizers"
        )
    return _DistributedOptimizer(optimizer, reduction, use_locking=use_locking)


class _DistributedOptimizer(_Optimizer):  # type: ignore[misc] # TensorFlow has no types
    """An optimizer of tf.compat.v1 that combines the gradients of a wrapped optimizer."""

    def __init__(self, optimizer: Any, reduction: TensorReduction, *, use_locking: bool) -> None:
        super().__init__(name=reduction.name, use_locking=use_locking)
        self._optimizer = optimizer
        self._reduction = reduction

    def register_local_var(self, var: Any) -> None:
        """Exclude the gradient of `var` from the reduction."""
        self._reduction.keep_local(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Compute gradients, combine them over the ranks, and return (gradient, variable) pairs."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        gradients, variables = zip(*pairs, strict=True)
        return list(zip(self._reduction.reduce(gradients, variables), variables, strict=True))

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Apply gradients with the wrapped optimizer, without another reduction."""
        return self._optimizer.apply_gradients(grads_and_vars, global_step, name)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Return the slot of the wrapped optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Sequence[str]:
        """Return the slot names of the wrapped optimizer."""
        names: Sequence[str] = self._optimizer.get_slot_names(*args, **kwargs)
        return names

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Return the variables of the wrapped optimizer."""
        return self._optimizer.variables(*args, **kwargs)
