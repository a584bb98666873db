"""DistributedOptimizer for Keras' optimizers on any backend, with Horovod's signatures."""

from typing import Any

import keras

from multiring._frontend.compression_names import Compression
from multiring._frontend.gradient_reduction import groups_of, layers_of
from multiring._frontend.keras_optimizers import distributed
from multiring._frontend.process_sets import ProcessSet, global_process_set
from multiring._frontend.reduce_ops import Average
from multiring.keras.backends import reduction
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
    """Return `optimizer`, changed to combine gradients over the ranks.

    It combines the gradients before it clips and applies them. The result is the same object. A saved model contains
    the original optimizer class.

    Args:
        optimizer: an optimizer of keras.optimizers.
        name: the name of the operations; by default it is made from the optimizer's class.
        device_dense: not used: gradients are combined on their own device.
        device_sparse: not used.
        compression: the type in which float32 travels between hosts: a member of `Compression`, or its name.
        sparse_as_dense: whether to convert TensorFlow's IndexedSlices to dense tensors first.
        gradient_predivide_factor: for an average: gradients are divided by it before they are summed.
        op: Average, Sum or Adasum.
        backward_passes_per_step: the number of batches whose gradients are summed for one update.
        average_aggregated_gradients: whether these gradients are averaged rather than summed.
        num_groups: DEPRECATED, use groups.
        groups: the number of collectives, or lists of variables. The gradients of each list share one collective.
        process_set: the ranks that take part; by default all ranks.
        scale_local_gradients: whether gradients of variables passed to `register_local_var` are divided by the number
            of ranks.

    Raises:
        ArgumentError: see `multiring._frontend.keras_optimizers.distributed`.
        ValueError: gradient_predivide_factor with an op other than Average, or invalid groups.
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
    """Return a `DistributedOptimizer` that does not combine gradients of `local_layers`.

    The layers must be built.
    """
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
        filepath: a file that model.save has written.
        custom_optimizers: custom optimizer classes that the file may contain.
        custom_objects: other custom objects that the file may contain, by name.
        compression: see `DistributedOptimizer`.
        legacy_opts: must be False, because Keras 3 has no legacy optimizers.

    Raises:
        ValueError: legacy_opts is True.
    """
    if legacy_opts:
        raise ValueError("legacy_opts=True: Keras 3 has no legacy optimizers; want one of keras.optimizers")
    known = {each.__name__: each for each in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model
