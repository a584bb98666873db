"""DistributedOptimizer, of Keras' optimizers on any backend. The signatures are Horovod's."""

from typing import Any

import keras

from multiring.frontend.gradient_reduction import groups_of, layers_of
from multiring.frontend.keras_optimizers import distributed
from multiring.frontend.process_sets import ProcessSet, global_process_set
from multiring.frontend.reduce_ops import Average
from multiring.keras.backends import Compression, reduction
from multiring.keras.values import raise_failed_steps


def DistributedOptimizer(  # noqa: N802 -- Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int | str = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return `optimizer`, with gradients that are combined over the ranks before they are clipped and applied.

    It is the same object, and in a saved model it is what it was.

    Args:
        optimizer: of keras.optimizers.
        name: for the operations; by default the optimizer's class.
        device_dense: not used: gradients are combined where they are.
        device_sparse: not used.
        compression: how float32 travels between hosts: one of Compression's.
        sparse_as_dense: make dense tensors of TensorFlow's IndexedSlices first.
        gradient_predivide_factor: of an average, by which gradients are divided before they are summed.
        op: Average, Sum or Adasum.
        backward_passes_per_step: how many batches' gradients are summed for one update.
        average_aggregated_gradients: whether those are averaged rather than summed.
        num_groups: DEPRECATED, use groups.
        groups: a number of collectives, or lists of variables whose gradients are one collective each.
        process_set: by default all ranks.
        scale_local_gradients: whether gradients of `register_local_var` are divided by the ranks.

    Raises:
        ArgumentError: see `multiring.frontend.keras_optimizers.distributed`.
        ValueError: gradient_predivide_factor with another op; groups of no sense.
    """
    del device_dense, device_sparse
    raise_failed_steps()
    options: dict[str, Any] = {"sparse_as_dense": sparse_as_dense} if keras.backend.backend() == "tensorflow" else {}
    how = reduction(
        name=name or f"Distributed{type(optimizer).__name__}",
        compression=compression,
        op=op,
        predivide_factor=gradient_predivide_factor,
        groups=groups_of(num_groups, groups),
        process_set=process_set,
        scale_local=scale_local_gradients,
        **options,
    )
    found = distributed(
        optimizer, how.reduce, passes=backward_passes_per_step, averages_passes=average_aggregated_gradients
    )
    found.register_local_var = how.keep_local
    return found


def PartialDistributedOptimizer(  # noqa: N802 -- Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int | str = Average,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a `DistributedOptimizer` that leaves the gradients of `local_layers`, which are built, this rank's own."""
    found = DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for layer in layers_of(local_layers):
        for variable in layer.trainable_weights:
            found.register_local_var(variable)
    return found


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Return the model in a file, with its optimizer distributed.

    Args:
        filepath: of model.save.
        custom_optimizers: classes that the file may have.
        custom_objects: whatever else it may have, by name.
        compression: see `DistributedOptimizer`.
        legacy_opts: only False: Keras 3 has no legacy optimizers.

    Raises:
        ValueError: legacy_opts=True.
    """
    if legacy_opts:
        raise ValueError("legacy_opts=True: Keras 3 has no legacy optimizers; want one of keras.optimizers")
    known = {each.__name__: each for each in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model
