"""The adapter of TensorFlow for the conformance suite.

Operations run eagerly; steps are compiled.
"""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

import multiring.tensorflow as mt
from multiring._frontend.process_sets import ProcessSet, global_process_set
from multiring.adapters.conformance import Adapter


def make(array: Any) -> Any:
    return tf.constant(array)


def all_reduce(tensor: Any, op: str, *, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    return mt.allreduce(tensor, op=op, name=name, process_set=process_set)


def gradient(at: Any, weights: Any, op: str) -> Any:
    variable = tf.Variable(at)

    @tf.function  # type: ignore[untyped-decorator]
    def found() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(mt.allreduce(variable, op=op) * weights)
        return tape.gradient(loss, variable)

    return found().numpy()


class Trainer:
    def __init__(self, parameters: Mapping[str, Any], rate: float, process_set: ProcessSet) -> None:
        self._variables = {name: tf.Variable(value) for name, value in parameters.items()}
        self._rate = rate
        self._process_set = process_set
        self._step = tf.function(self._made_step)

    def _made_step(self, slopes: dict[str, Any]) -> None:
        variables = list(self._variables.values())
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(self._variables[name] * slope) for name, slope in slopes.items()])
        shared = mt.DistributedGradientTape(tape, process_set=self._process_set)
        for variable, each in zip(variables, shared.gradient(loss, variables), strict=True):
            if each is not None:
                variable.assign_sub(self._rate * each)

    def step(self, slopes: Mapping[str, Any]) -> None:
        self._step({name: tf.constant(slope) for name, slope in slopes.items()})

    def parameters(self) -> dict[str, Any]:
        return {name: each.numpy().copy() for name, each in self._variables.items()}

    def state(self, **values: Any) -> Any:
        return mt.elastic.TensorFlowState(list(self._variables.values()), **values)


ADAPTER = Adapter(
    name="TensorFlow",
    version=tf.__version__,
    make=make,
    back=lambda tensor: tensor.numpy(),
    all_reduce=all_reduce,
    trainer=Trainer,
    gradient=gradient,
    init=mt.init,
)
