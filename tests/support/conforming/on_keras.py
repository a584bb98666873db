"""The adapter of Keras for the conformance suite.

KERAS_BACKEND chooses the backend; a step is a call of `train_on_batch`.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import keras

import multiring.keras as mk
from multiring._frontend.process_sets import ProcessSet, global_process_set
from multiring.adapters.conformance import Adapter

_NO_GRADIENT = "Keras leaves gradients to its backend, and each backend has its own column"

_NO_TYPES = (
    {f"type {dtype}": f"Keras has no {dtype} on torch" for dtype in ("uint16", "uint32", "uint64")}
    if keras.backend.backend() == "torch"
    else {}
)


def all_reduce(value: Any, op: str, *, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    return mk.allreduce(value, name=name, op=op, process_set=process_set)


class Model(keras.Model):  # type: ignore[misc] # Keras has no types
    """A model that returns the sum of its parameters times its inputs."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        super().__init__()
        self.held = {
            name: self.add_weight(shape=value.shape, name=name, initializer="zeros")
            for name, value in parameters.items()
        }
        for name, value in parameters.items():
            self.held[name].assign(value)

    def call(self, inputs: Any) -> Any:
        sums = [keras.ops.sum(self.held[name] * each) for name, each in inputs.items()]
        return keras.ops.reshape(sum(sums[1:], sums[0]), (1, 1))


class Trainer:
    def __init__(self, parameters: Mapping[str, Any], rate: float, process_set: ProcessSet) -> None:
        self._model = Model(parameters)
        optimizer = mk.DistributedOptimizer(keras.optimizers.SGD(rate), process_set=process_set)
        self._model.compile(optimizer, loss=lambda _, found: keras.ops.sum(found))

    def step(self, slopes: Mapping[str, Any]) -> None:
        batch = {name: slope[None] for name, slope in slopes.items()}
        self._model.train_on_batch(batch, keras.ops.zeros((1, 1)))

    def parameters(self) -> dict[str, Any]:
        return {name: keras.ops.convert_to_numpy(each.value).copy() for name, each in self._model.held.items()}

    def state(self, **values: Any) -> Any:
        return mk.elastic.KerasState(self._model, **values)


def init(**options: Any) -> None:
    if keras.backend.backend() == "jax":
        importlib.import_module("jax").config.update("jax_enable_x64", True)
    mk.init(**options)


ADAPTER = Adapter(
    name=f"Keras on {keras.backend.backend()}",
    version=keras.__version__,
    make=keras.ops.convert_to_tensor,
    back=keras.ops.convert_to_numpy,
    all_reduce=all_reduce,
    trainer=Trainer,
    init=init,
    cannot={"gradients through": _NO_GRADIENT, **_NO_TYPES},
)
