"""Gradients of all ranks combined, as tapes and Keras' optimizers have them: lists beside the variables they are of."""

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from multiring.errors import ArgumentError
from multiring.frontend.process_sets import ProcessSet, global_process_set, members_of
from multiring.frontend.reduce_ops import Average, chosen_op


@dataclass
class GradientReduction:
    """How gradients are combined; an adapter's subclass combines a list of them, all those of one type at once."""

    name: str
    compression: Any = None
    op: int | str = Average
    predivide_factor: float = 1.0  # of an average: by which gradients are divided before they are summed
    groups: Any = None  # a number of collectives, or lists of variables whose gradients are one each
    process_set: ProcessSet = global_process_set
    scale_local: bool = True  # whether gradients that stay a rank's own are divided by the ranks
    local: dict[Any, Any] = field(default_factory=dict)  # variables whose gradients do, by their references

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ValueError: what Horovod refuses, in its words.
            ArgumentError: there is no such operation.
        """
        self.op = chosen_op(self.op)
        if self.predivide_factor != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        if self.groups is not None and not isinstance(self.groups, list) and not self.groups > 0:
            raise ValueError("groups should be a non-negative integer or a list of list of tf.Variable.")

    def combine(self, gradients: list[Any], name: str, variables: Sequence[Any], *, sees: bool) -> Sequence[Any]:
        """Return these gradients combined over the ranks.

        Args:
            gradients: of `variables`, which the ranks compare before the second step.
            name: the same on all ranks, and in each step.
            variables: see `gradients`.
            sees: whether the ranks compare their gradients, at the first step.
        """
        raise NotImplementedError

    def divided(self, gradient: Any, ranks: Any) -> Any:
        """Return `gradient` divided by a number."""
        return gradient / ranks

    def ranks_now(self) -> Any:
        """Return how many ranks there are, when a step runs."""
        return members_of(self.process_set).size

    def keep_local(self, variable: Any) -> None:
        """Have the gradient of `variable` be this rank's own."""
        self.local[reference_of(variable)] = variable  # as long as it lives, nothing else has its identity

    def is_local(self, variable: Any) -> bool:
        """Return whether the gradient of `variable` is this rank's own."""
        return bool(self.local) and reference_of(variable) in self.local

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients as an optimizer is to have them; None stays None."""
        found = list(gradients)
        if len(found) != len(variables):
            raise ArgumentError(f"{len(found)} gradients of {len(variables)} variables: want as many")
        shared = [
            place
            for place, variable in enumerate(variables)
            if found[place] is not None and not self.is_local(variable)
        ]
        # The gradients of one part are as good as those of all.
        largest = largest_of({place: variables[place] for place in shared})
        for number, places in enumerate(self._grouped(shared, variables)):
            of = [variables[place] for place in places]
            combined = self.combine(
                [found[place] for place in places], f"{self.name}.{number}", of, sees=largest in places
            )
            for place, gradient in zip(places, combined, strict=True):
                found[place] = gradient
        if self.local and self.scale_local:
            # The loss is an average over all ranks' samples, and of a rank's own variable only its own samples know.
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
    """Return how many elements a variable has, as far as its shape is known."""
    shape = getattr(variable, "shape", ())
    return 0 if getattr(shape, "rank", 0) is None else math.prod(each or 0 for each in shape)


def largest_of(variables: Mapping[int, Any]) -> int | None:
    """Return the place of the largest variable."""
    return max(variables, key=lambda place: _elements(variables[place]), default=None)


def reference_of(variable: Any) -> Any:
    """Return what tells variables apart. One of Keras on TensorFlow is the one of TensorFlow that it holds."""
    held: Any = getattr(variable, "value", None)
    if hasattr(held, "ref"):
        return held.ref()
    return variable.ref() if hasattr(variable, "ref") else id(variable)


def groups_of(num_groups: int, groups: Any) -> Any:
    """Return `groups`, or what was once called num_groups."""
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
        ArgumentError: something among them is none.
    """
    if local_layers is None:
        return []
    found = list(local_layers) if isinstance(local_layers, list | tuple) else [local_layers]
    for layer in found:
        if not hasattr(layer, "trainable_weights"):
            raise ArgumentError(f"local_layers has a {type(layer).__name__}; want Keras layers")
    return found
