"""DistributedGradientTape: a tape whose gradients are those of all ranks. The signatures are Horovod's."""

from typing import Any

import tensorflow as tf

from multiring.frontend.gradient_reduction import groups_of, layers_of
from multiring.frontend.process_sets import ProcessSet, global_process_set
from multiring.frontend.reduce_ops import Average
from multiring.tensorflow.compression import Compression
from multiring.tensorflow.reduction import TensorReduction


class _Distributed:
    """What a tape becomes, beside what it was."""

    reduction: TensorReduction

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of `source` this rank's own; it is divided by the ranks, as the others' averages are."""
        self.reduction.keep_local(source)

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Return the gradients of all ranks combined, in the structure of `sources`; otherwise as tf.GradientTape."""
        found = super().gradient(target, sources, output_gradients, unconnected_gradients)  # type: ignore[misc]
        flat = _flat(sources)
        self.reduction.has_generic_names = use_generic_names
        reduced = self.reduction.reduce(_flat(found), flat)
        return tf.nest.pack_sequence_as(sources, reduced, expand_composites=False)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """Return pairs of source and gradient: those of this rank's own, and the others."""
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
    """Return `gradtape` as a tape whose `gradient` combines the gradients of all ranks, those of a type at once.

    Args:
        gradtape: a tf.GradientTape that has recorded.
        device_dense: as for tf.device.
        device_sparse: the same, for IndexedSlices.
        compression: in what form gradients travel.
        sparse_as_dense: make dense tensors of IndexedSlices first.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: of an average, by which the gradients are divided before they are summed; what is
            left of the division by the ranks comes afterwards.
        num_groups: DEPRECATED, use groups.
        groups: a number of collectives, or lists of variables whose gradients are one collective each.
        process_set: by default all ranks.
        scale_local_gradients: whether gradients of `register_local_source` are divided by the ranks.
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
    """Return a `DistributedGradientTape` that leaves the gradients of `local_layers`, Keras layers, this rank's own."""
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
