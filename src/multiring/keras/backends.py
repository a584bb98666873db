"""Combine lists of gradients on each of Keras' backends. The backend's adapter is imported when it is used."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from multiring._frontend.compression_names import wire_of
from multiring._frontend.errors import internal_errors
from multiring._frontend.gradient_reduction import GradientReduction
from multiring._frontend.keras_steps import current_step
from multiring._frontend.lifecycle import is_initialized
from multiring._frontend.process_sets import Members, ProcessSet, global_process_set, members_of
from multiring._frontend.requests.first_steps import comparison_of, watched_variables
from multiring._frontend.variable_names import names_of_variables
from multiring.errors import UnsupportedError

REMEDY = "callbacks.BroadcastGlobalVariablesCallback(0) or keras.distribute do"


def reduction(**options: Any) -> GradientReduction:
    """Return the gradient reduction for Keras' current backend.

    Args:
        options: the fields of GradientReduction, and sparse_as_dense for TensorFlow.

    Raises:
        UnsupportedError: the backend or the compression is not supported.
    """
    backend = keras.backend.backend()
    wire = wire_of(options.pop("compression", None))
    if backend == "tensorflow":
        from multiring.tensorflow.compression import Compression as Compressors  # noqa: PLC0415 -- an optional framework
        from multiring.tensorflow.reduction import TensorReduction  # noqa: PLC0415

        # The names of a graph's tensors would differ between ranks that have made different numbers of models.
        options["name"] = _numbered(options["name"], options.get("process_set", global_process_set))
        compressor = getattr(Compressors, wire or "none")
        return TensorReduction(**options, compression=compressor, has_generic_names=True)
    options.pop("sparse_as_dense", None)  # the other backends have no sparse gradients
    kinds: dict[str, type[GradientReduction]] = {"torch": TorchReduction, "jax": JaxReduction}
    if backend not in kinds:
        raise UnsupportedError(f"Keras on {backend}: want KERAS_BACKEND=tensorflow, torch or jax")
    return kinds[backend](**options, compression=wire)


class _Optimizers:
    """Counts the optimizers that the ranks of a process set have made."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)


def _numbered(name: str, process_set: ProcessSet) -> str:
    """Return `name` with a number that is the same on all ranks of the set. Before `init`, the name is unchanged."""
    if not is_initialized() or not process_set.included():
        return name
    return f"{name}.{next(members_of(process_set).kept(_Optimizers).numbers)}"


@dataclass
class TorchReduction(GradientReduction):
    """Combines tensors of torch."""

    _compared: dict[str, Members] = field(default_factory=dict)  # by name, the ranks that have compared all steps

    def combine(self, gradients: list[Any], name: str, variables: Sequence[Any], *, sees: bool) -> Sequence[Any]:
        """Return the gradients combined over the ranks.

        Without compression, the results overwrite the gradients.
        """
        members = members_of(self.process_set)
        if self._compared.get(name) is members:
            return self._combined(gradients, name)
        number = watched_variables(
            variables, _values, what=self.name, remedy=REMEDY, sees=sees and current_step() is None
        )
        comparison = comparison_of(members, number)
        compare = None if comparison is None else comparison.begin(name, [_array(each) for each in gradients])
        found = self._combined(gradients, name)
        if compare is not None:
            with internal_errors(self.name):
                compare()
        if comparison is None or comparison.is_over:
            self._compared[name] = members
        return found

    def _combined(self, gradients: list[Any], name: str) -> Sequence[Any]:
        from multiring.torch.collectives.grouped import (  # noqa: PLC0415 -- an optional framework
            grouped_allreduce,
            grouped_allreduce_,
        )
        from multiring.torch.compression import Compression as Compressors  # noqa: PLC0415

        factors: dict[str, Any] = {
            "prescale_factor": 1.0 / self.predivide_factor,
            "postscale_factor": self.predivide_factor,
        }
        if self.compression is None:
            return grouped_allreduce_(gradients, name=name, op=self.op, process_set=self.process_set, **factors)
        compressor = getattr(Compressors, self.compression)
        return grouped_allreduce(
            gradients, name=name, op=self.op, process_set=self.process_set, compression=compressor, **factors
        )


@dataclass
class JaxReduction(GradientReduction):
    """Combines arrays of JAX, also inside jit."""

    _owner: object = field(default_factory=object)

    def combine(self, gradients: list[Any], name: str, variables: Sequence[Any], *, sees: bool) -> Sequence[Any]:
        """Return the gradients combined over the ranks."""
        from multiring.jax.collectives import paths_of  # noqa: PLC0415 -- an optional framework
        from multiring.jax.first_steps import Watching, reduced  # noqa: PLC0415

        factor = self.predivide_factor
        divided = gradients if factor == 1.0 else [each / factor for each in gradients]
        looks = sees and current_step() is None
        paths = paths_of(names_of_variables(variables), gradients)
        names = [each.path for each in variables]
        watching = Watching((self._owner, name), self.name, names, REMEDY, sees=looks, paths=paths)
        values = [each.value for each in variables]
        found = reduced(divided, values, watching, op=self.op, wire=self.compression, process_set=self.process_set)
        return found if factor == 1.0 else [each * factor for each in found]


def _array(tensor: Any) -> Any:
    return keras.ops.convert_to_numpy(tensor)


def _values(variables: Sequence[Any]) -> Sequence[Any]:
    return [_array(each.value) for each in variables]
