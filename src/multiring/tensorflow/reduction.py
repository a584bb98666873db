"""Combine TensorFlow's gradients over the ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from multiring._frontend.gradient_reduction import GradientReduction, largest_of
from multiring._frontend.keras_steps import current_step
from multiring._frontend.reduce_ops import combination
from multiring._frontend.requests.first_steps import watched_variables
from multiring._frontend.variable_names import names_of_variables
from multiring.tensorflow.asking import ranks_now
from multiring.tensorflow.collectives import GradientVariables, reduced_gradients
from multiring.tensorflow.compression import Compression


@dataclass
class TensorReduction(GradientReduction):
    """Combines gradients that are tensors or IndexedSlices.

    `DistributedGradientTape` explains the fields.
    """

    compression: Any = Compression.none
    device_dense: str = ""
    device_sparse: str = ""
    sparse_as_dense: bool = False
    has_generic_names: bool = False  # name operations after the reduction, instead of by their position in a graph

    def combine(self, gradients: list[Any], name: str, variables: Sequence[Any], *, sees: bool) -> Sequence[Any]:
        """Return the gradients combined over the ranks; see `GradientReduction.combine`."""
        if self.sparse_as_dense:
            gradients = [tf.convert_to_tensor(each) for each in gradients]
        # Find the variables by the positions of their gradients. A tape can also watch a tensor that is not a variable.
        held = {place: _variable(each) for place, each in enumerate(variables)}
        known = {place: each for place, each in held.items() if each is not None}
        # Separate requests gather slices, so the first sum also compares the variables of slices.
        slices = [place for place, each in enumerate(gradients) if isinstance(each, tf.IndexedSlices)]
        first = next((place for place in range(len(gradients)) if place not in slices), None)
        largest = largest_of({place: each for place, each in known.items() if place not in slices})

        def number_of(places: Sequence[int]) -> int:
            watched = [*places, *slices] if first in places else places
            own = [known[place] for place in watched if place in known]
            looks = sees and largest in places and current_step() is None
            return watched_variables(own, _values, what=self.name, remedy=_REMEDY, sees=looks) if own else 0

        with tf.name_scope(f"{self.name}_Allreduce"):
            return reduced_gradients(
                gradients,
                combination(self.op, None, 1.0 / self.predivide_factor, self.predivide_factor),
                devices=(self.device_dense, self.device_sparse),
                compression=self.compression,
                process_set=self.process_set,
                ignore_name_scope=self.has_generic_names,
                name=name if self.has_generic_names else None,
                variables=GradientVariables(names_of_variables(variables), number_of),
            )

    def ranks_now(self) -> Any:
        """Return the number of ranks.

        A graph reads the number when it runs, perhaps in another job.
        """
        return ranks_now(self.process_set)

    def divided(self, gradient: Any, ranks: Any) -> Any:
        """Return `gradient` divided by the number of ranks."""
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values / tf.cast(ranks, gradient.values.dtype)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(ranks, gradient.dtype)


_REMEDY = "broadcast_variables or BroadcastGlobalVariablesCallback(0) do"


def _variable(found: Any) -> Any:
    """Return `found` if it is a TensorFlow variable, or the TensorFlow variable of a Keras variable, or else None."""
    held = getattr(found, "value", None)
    held = found if held is None or callable(held) else held
    return held if isinstance(held, tf.Variable) else None


def _values(variables: Sequence[Any]) -> Sequence[Any] | None:
    return None if not tf.executing_eagerly() else [each.numpy() for each in variables]
