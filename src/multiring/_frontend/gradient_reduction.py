"""Combine all ranks' gradients for tapes and Keras' optimizers, which pass lists of gradients and variables."""

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from multiring._arguments import require_flag, require_number, whole
from multiring._frontend.process_sets import ProcessSet, global_process_set, members_of
from multiring._frontend.reduce_ops import Average, chosen_op
from multiring.errors import ArgumentError


@dataclass
class GradientReduction:
    """How gradients are combined.

    An adapter's subclass implements `combine`, which batches gradients of one type.
    """

    name: str
    compression: Any = None
    op: int | str = Average
    predivide_factor: float = 1.0  # for averages: a factor by which gradients are divided before they are summed
    groups: Any = None  # the number of collectives, or lists of variables that share a collective
    process_set: ProcessSet = global_process_set
    scale_local: bool = True  # whether local gradients are divided by the number of ranks
    local: dict[Any, Any] = field(default_factory=dict)  # variables whose gradients are not reduced, by reference

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            ValueError: Horovod rejects the arguments as well; the message is Horovod's.
            ArgumentError: `op` is unknown.
        """
        self.op = chosen_op(self.op)
        if self.predivide_factor != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        self.predivide_factor = require_number("gradient_predivide_factor", self.predivide_factor, above=True)
        self.scale_local = require_flag("scale_local_gradients", self.scale_local)
        is_list = isinstance(self.groups, list) and all(isinstance(each, list | tuple) for each in self.groups)
        if self.groups is not None and not is_list and (whole(self.groups) or 0) < 1:
            raise ValueError("groups should be a non-negative integer or a list of list of tf.Variable.")

    def combine(self, gradients: list[Any], name: str, variables: Sequence[Any], *, sees: bool) -> Sequence[Any]:
        """Return the gradients combined over the ranks.

        Args:
            gradients: the gradients of `variables`.
            name: the collective's name, the same on all ranks and in each step.
            variables: the ranks compare these variables before the second step.
            sees: whether the ranks compare these gradients in the first step.
        """
        raise NotImplementedError

    def divided(self, gradient: Any, ranks: Any) -> Any:
        """Return `gradient` divided by the number of ranks."""
        return gradient / ranks

    def ranks_now(self) -> Any:
        """Return the number of ranks when a step runs."""
        return members_of(self.process_set).size

    def keep_local(self, variable: Any) -> None:
        """Exclude the gradient of `variable` from the reduction."""
        self.local[reference_of(variable)] = variable  # keep it alive, so that no other object gets its identity

    def is_local(self, variable: Any) -> bool:
        """Return whether the gradient of `variable` is excluded from the reduction."""
        return bool(self.local) and reference_of(variable) in self.local

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients for the optimizer: reduced, or local and scaled.

        A gradient of None stays None.
        """
        found = list(gradients)
        if len(found) != len(variables):
            raise ArgumentError(f"{len(found)} gradients of {len(variables)} variables: want one gradient per variable")
        shared = [
            place
            for place, variable in enumerate(variables)
            if found[place] is not None and not self.is_local(variable)
        ]
        # The first-step check compares only the part that has the largest variable, which is enough.
        largest = largest_of({place: variables[place] for place in shared})
        for number, places in enumerate(self._grouped(shared, variables)):
            of = [variables[place] for place in places]
            combined = self.combine(
                [found[place] for place in places], f"{self.name}.{number}", of, sees=largest in places
            )
            for place, gradient in zip(places, combined, strict=True):
                found[place] = gradient
        if self.local and self.scale_local:
            # The loss averages over all ranks' samples, but only this rank's samples contribute to a local variable.
            ranks = self.ranks_now()
            for place, variable in enumerate(variables):
                if found[place] is not None and self.is_local(variable):
                    found[place] = self.divided(found[place], ranks)
        return found

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


def _elements(variable: Any) -> int:
    """Return the number of elements of a variable; 0 if its shape is not known."""
    shape = getattr(variable, "shape", ())
    return 0 if getattr(shape, "rank", 0) is None else math.prod(each or 0 for each in shape)


def largest_of(variables: Mapping[int, Any]) -> int | None:
    """Return the key of the largest variable; None if there are no variables."""
    return max(variables, key=lambda place: _elements(variables[place]), default=None)


def reference_of(variable: Any) -> Any:
    """Return a hashable key that identifies a variable.

    A Keras variable on TensorFlow and the TensorFlow variable inside it have the same key.
    """
    held: Any = getattr(variable, "value", None)
    if hasattr(held, "ref"):
        return held.ref()
    return variable.ref() if hasattr(variable, "ref") else id(variable)


def groups_of(num_groups: int, groups: Any) -> Any:
    """Return `groups`, or else the deprecated `num_groups`."""
    if num_groups:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
            DeprecationWarning,
            stacklevel=3,
        )
    return num_groups or None if groups is None else groups


def layers_of(local_layers: Any) -> list[Any]:
    """Return Keras layers as a list.

    Raises:
        ArgumentError: an element is not a Keras layer.
    """
    if local_layers is None:
        return []
    found = list(local_layers) if isinstance(local_layers, list | tuple) else [local_layers]
    for layer in found:
        if not hasattr(layer, "trainable_weights"):
            raise ArgumentError(f"local_layers has a {type(layer).__name__}; want Keras layers")
    return found
