"""Gradients of all ranks combined: what tapes and optimizers have in common."""

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from multiring.errors import ArgumentError
from multiring.frontend.process_sets import ProcessSet, global_process_set, members_of
from multiring.frontend.reduce_ops import Average, chosen_op
from multiring.tensorflow.collectives import grouped_allreduce
from multiring.tensorflow.compression import Compression


@dataclass
class GradientReduction:
    """How gradients are combined. See `DistributedGradientTape` for what the fields mean."""

    name: str
    device_dense: str = ""
    device_sparse: str = ""
    compression: Any = Compression.none
    sparse_as_dense: bool = False
    op: int | str = Average
    predivide_factor: float = 1.0
    groups: Any = None
    process_set: ProcessSet = global_process_set
    scale_local: bool = True
    local: set[Any] = field(default_factory=set)  # references of variables whose gradients stay this rank's

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ValueError: what Horovod refuses, in its words.
        """
        self.op = chosen_op(self.op)
        if self.predivide_factor != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        if self.groups is not None and not isinstance(self.groups, list) and not self.groups > 0:
            raise ValueError("groups should be a non-negative integer or a list of list of tf.Variable.")

    def keep_local(self, variable: Any) -> None:
        """Have the gradient of `variable` be this rank's own."""
        self.local.add(reference_of(variable))

    def is_local(self, variable: Any) -> bool:
        """Return whether the gradient of `variable` is this rank's own."""
        return bool(self.local) and reference_of(variable) in self.local

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], *, use_generic_names: bool = False
    ) -> list[Any]:
        """Return the gradients as an optimizer is to have them; None stays None."""
        gradients = list(gradients)
        if len(gradients) != len(variables):
            raise ArgumentError(f"{len(gradients)} gradients of {len(variables)} variables: want as many")
        if self.sparse_as_dense:
            gradients = [
                tf.convert_to_tensor(each) if isinstance(each, tf.IndexedSlices) else each for each in gradients
            ]
        shared = [
            place
            for place, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
            if gradient is not None and not self.is_local(variable)
        ]
        with tf.name_scope(f"{self.name}_Allreduce"):
            for number, places in enumerate(self._grouped(shared, variables)):
                found = grouped_allreduce(
                    [gradients[place] for place in places],
                    device_dense=self.device_dense,
                    device_sparse=self.device_sparse,
                    compression=self.compression,
                    op=self.op,
                    prescale_factor=1.0 / self.predivide_factor,
                    postscale_factor=self.predivide_factor,
                    process_set=self.process_set,
                    ignore_name_scope=use_generic_names,
                    name=f"gradients_{number}" if use_generic_names else None,
                )
                for place, gradient in zip(places, found, strict=True):
                    gradients[place] = gradient
            if self.local and self.scale_local:
                self._scale_local(gradients, variables)
        return gradients

    def _scale_local(self, gradients: list[Any], variables: Sequence[Any]) -> None:
        # The loss is an average over all ranks' samples, and of a rank's own variable only its own samples know.
        ranks = members_of(self.process_set).size
        for place, variable in enumerate(variables):
            gradient = gradients[place]
            if gradient is None or not self.is_local(variable):
                continue
            if isinstance(gradient, tf.IndexedSlices):
                gradients[place] = tf.IndexedSlices(gradient.values / ranks, gradient.indices, gradient.dense_shape)
            else:
                gradients[place] = gradient / ranks

    def _grouped(self, places: list[int], variables: Sequence[Any]) -> list[list[int]]:
        if not places:
            return []
        if self.groups is None:
            return [places]
        if not isinstance(self.groups, list):
            count = min(int(self.groups), len(places))
            bounds = [len(places) * part // count for part in range(count + 1)]
            return [places[start:end] for start, end in itertools.pairwise(bounds)]
        by_reference = {reference_of(variables[place]): place for place in places}
        found = []
        for group in self.groups:
            those = [by_reference.pop(reference_of(each)) for each in group if reference_of(each) in by_reference]
            found += [those] if those else []
        return found + [[place] for place in by_reference.values()]


def reference_of(variable: Any) -> Any:
    """Return what tells variables apart; Keras' variables are those of TensorFlow that they hold."""
    value = getattr(variable, "value", None) if type(variable).__module__.startswith("keras") else None
    held = variable if value is None or callable(value) else value
    return held.ref() if hasattr(held, "ref") else id(held)


def groups_of(num_groups: int, groups: Any) -> Any:
    """Return `groups`, or what was once called num_groups."""
    if num_groups:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
            DeprecationWarning,
            stacklevel=3,
        )
    return num_groups or None if groups is None else groups
