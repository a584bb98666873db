"""The adapter of Chainer for the conformance suite; arrays are NumPy arrays."""

from collections.abc import Mapping
from typing import Any

import chainer
import numpy as np

import multiring.chainer as mc
from multiring._frontend.process_sets import ProcessSet, global_process_set
from multiring.adapters.conformance import Adapter

chainer.disable_experimental_feature_warning = True


class _Held:
    everyone: mc.Communicator


def init(**options: Any) -> None:
    mc.init(**options)
    _Held.everyone = mc.create_communicator("flat")


def all_reduce(array: Any, op: str, *, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    everyone = process_set is global_process_set
    communicator = _Held.everyone if everyone else mc.create_communicator("naive", process_set=process_set)
    return communicator.allreduce(array, op=op, name=name)


def gradient(at: Any, weights: Any, op: str) -> Any:
    variable = chainer.Variable(at)
    found = mc.functions.allreduce(_Held.everyone, variable, op)
    chainer.functions.sum(found * weights).backward()
    return variable.grad


class Trainer:
    def __init__(self, parameters: Mapping[str, Any], rate: float, process_set: ProcessSet) -> None:
        self._model = chainer.Link()
        with self._model.init_scope():
            for name, value in parameters.items():
                setattr(self._model, name, chainer.Parameter(value.copy()))
        communicator = mc.create_communicator("flat", process_set=process_set)
        self._optimizer = mc.create_multi_node_optimizer(chainer.optimizers.SGD(rate), communicator, zero_fill=False)
        self._optimizer.setup(self._model)
        self._optimizer.is_changed(self._model)  # otherwise the first update would be a broadcast

    def step(self, slopes: Mapping[str, Any]) -> None:
        self._optimizer.update(
            lambda: sum(chainer.functions.sum(getattr(self._model, name) * slope) for name, slope in slopes.items())
        )

    def parameters(self) -> dict[str, Any]:
        return {name.lstrip("/"): np.array(each.array) for name, each in self._model.namedparams()}

    def state(self, **values: Any) -> Any:
        return mc.elastic.ChainerState(self._model, self._optimizer, **values)


ADAPTER = Adapter(
    name="Chainer",
    version=chainer.__version__,
    make=lambda array: array,
    back=lambda array: array,
    all_reduce=all_reduce,
    trainer=Trainer,
    gradient=gradient,
    init=init,
)
