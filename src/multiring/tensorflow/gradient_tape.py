"""DistributedGradientTape: a tape that combines the gradients of all ranks.

The signatures are Horovod's.
"""

from typing import Any

import tensorflow as tf

from multiring._frontend.gradient_reduction import groups_of, layers_of
from multiring._frontend.process_sets import ProcessSet, global_process_set
from multiring._frontend.reduce_ops import Average
from multiring.tensorflow.compression import Compression
from multiring.tensorflow.reduction import TensorReduction


class _Distributed:
    """The methods that a distributed tape has in addition to those of its tape."""

    reduction: TensorReduction

    def register_local_source(self, source: Any) -> None:
        """Exclude the gradient of `source` from the reduction.

        The gradient stays local. It is divided by the number of ranks, which matches the scale of averages.
        """
        self.reduction.keep_local(source)

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Return the combined gradients of all ranks in the structure of `sources`, like tf.GradientTape.gradient."""
        found = super().gradient(target, sources, output_gradients, unconnected_gradients)  # type: ignore[misc]
        flat = _flat(sources)
        self.reduction.has_generic_names = use_generic_names
        reduced = self.reduction.reduce(_flat(found), flat)
        return tf.nest.pack_sequence_as(sources, reduced, expand_composites=False)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """Return two lists of (source, gradient) pairs: the local gradients, and the reduced gradients."""
        gradients = _flat(self.gradient(target, sources, output_gradients, use_generic_names))
        pairs = list(zip(_flat(sources), gradients, strict=True))
        local = [pair for pair in pairs if self.reduction.is_local(pair[0])]
        return local, [pair for pair in pairs if not self.reduction.is_local(pair[0])]


def _flat(structure: Any) -> list[Any]:
    found: list[Any] = tf.nest.flatten(structure, expand_composites=False)
    return found


def DistributedGradientTape(  # noqa: N802 -- Horovod's name
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int | str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a tape whose `gradient` combines the gradients of all ranks.

    The tape has the recorded operations of `gradtape`.

    Gradients of one type are reduced by one collective.

    Args:
        gradtape: a tf.GradientTape that has recorded operations.
        device_dense: the argument of tf.device for dense gradients.
        device_sparse: the argument of tf.device for IndexedSlices.
        compression: a member of `Compression`, its name, or a `Compressor`.
        sparse_as_dense: whether to convert IndexedSlices to dense tensors first.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: for Average: gradients are divided by this factor before the sum, and the sum is
            divided by the number of ranks over this factor.
        num_groups: DEPRECATED, use groups.
        groups: the number of collectives, or lists of variables; the gradients of a list share one collective.
        process_set: by default, all ranks.
        scale_local_gradients: whether gradients of `register_local_source` are divided by the number of ranks.
    """
    kind = type(gradtape)
    found: Any = object.__new__(type(kind.__name__, (_Distributed, kind), {}))
    found.__dict__.update(gradtape.__dict__)
    found.reduction = TensorReduction(
        "DistributedGradientTape",
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
    return found


def PartialDistributedGradientTape(  # noqa: N802 -- Horovod's name
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int | str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a `DistributedGradientTape` that leaves some gradients local.

    The tape does not reduce the gradients of `local_layers`, which are Keras layers.
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for layer in layers_of(local_layers):
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape
