"""What differs between Keras' backends: how lists of gradients are combined. Adapters are imported when in use."""

import itertools
from collections.abc import Sequence
from typing import Any

import keras

from multiring.errors import UnsupportedError
from multiring.frontend.gradient_reduction import GradientReduction
from multiring.frontend.lifecycle import is_initialized
from multiring.frontend.process_sets import ProcessSet, global_process_set, members_of

_WIRES = {"fp16": "fp16", "bf16": "bf16", "int8": "int8", "none": None}


class Compression:
    """In what form float32 travels between hosts, for `compression=`, on any backend."""

    none = None
    fp16 = "fp16"
    bf16 = "bf16"
    int8 = "int8"


def wire_of(compression: Any) -> str | None:
    """Return the wire type that is meant: Compression's here, its name, or an adapter's compressor.

    Raises:
        UnsupportedError: a compressor of somebody's own.
    """
    if compression is None or (isinstance(compression, str) and compression in _WIRES):
        return None if compression is None else _WIRES[compression]
    wire = getattr(compression, "wire", "")
    if wire or compression.__name__ == "NoneCompressor":
        return wire or None
    raise UnsupportedError(f"compression={compression!r} on Keras: want one of Compression's: none, fp16, bf16, int8")


def reduction(**options: Any) -> GradientReduction:
    """Return how Keras' backend combines gradients.

    Args:
        options: the fields of GradientReduction; and sparse_as_dense, of TensorFlow's.
    """
    backend = keras.backend.backend()
    wire = wire_of(options.pop("compression", None))
    if backend == "tensorflow":
        from multiring.tensorflow.compression import Compression as Compressors  # noqa: PLC0415 -- where it is in use
        from multiring.tensorflow.reduction import TensorReduction  # noqa: PLC0415

        # Names of a graph's tensors would differ where ranks have made different numbers of models before.
        options["name"] = _numbered(options["name"], options.get("process_set", global_process_set))
        compressor = getattr(Compressors, wire or "none")
        return TensorReduction(**options, compression=compressor, has_generic_names=True)
    options.pop("sparse_as_dense", None)  # there are no sparse gradients
    kinds: dict[str, type[GradientReduction]] = {"torch": TorchReduction, "jax": JaxReduction}
    if backend not in kinds:
        raise UnsupportedError(f"Keras on {backend}: want KERAS_BACKEND=tensorflow, torch or jax")
    return kinds[backend](**options, compression=wire)


class _Optimizers:
    """How many optimizers the ranks of a process set have made."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)


def _numbered(name: str, process_set: ProcessSet) -> str:
    """Return `name` with a number that the ranks of the set count alike; without one before `init`."""
    if not is_initialized() or not process_set.included():
        return name
    return f"{name}.{next(members_of(process_set).kept(_Optimizers).numbers)}"


class TorchReduction(GradientReduction):
    """Tensors of torch."""

    def combine(self, gradients: list[Any], name: str) -> Sequence[Any]:
        """Return these gradients combined over the ranks, in place where nothing is lost on the way."""
        from multiring.torch.collectives.grouped import (  # noqa: PLC0415 -- where it is in use
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


class JaxReduction(GradientReduction):
    """Arrays of JAX, inside jit too."""

    def combine(self, gradients: list[Any], name: str) -> Sequence[Any]:  # noqa: ARG002 -- by order
        """Return these gradients combined over the ranks."""
        from multiring.jax.collectives import all_reduce  # noqa: PLC0415 -- where it is in use

        factor = self.predivide_factor
        divided = gradients if factor == 1.0 else [each / factor for each in gradients]
        found: Sequence[Any] = all_reduce(divided, self.op, wire=self.compression, process_set=self.process_set)
        return found if factor == 1.0 else [each * factor for each in found]
