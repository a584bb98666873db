"""The toy adapter of tests/support/toy.py for the conformance suite."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from tests.support import toy

from multiring._frontend.process_sets import ProcessSet, global_process_set
from multiring.adapters.conformance import Adapter


def all_reduce(array: Any, op: str, *, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    return toy.allreduce(array, op=op, name=name, process_set=process_set)


class Trainer:
    def __init__(self, parameters: Mapping[str, Any], rate: float, process_set: ProcessSet) -> None:
        self._model = {name: toy.frozen(value.copy()) for name, value in parameters.items()}
        self._options = rate, process_set
        self._share_anew()
        self._state: Any = None

    def _held(self) -> Any:
        return self._model if self._state is None else self._state.model

    def step(self, slopes: Mapping[str, Any]) -> None:
        stepped = dict(self._optimizer.step(self._held(), slopes))
        if self._state is None:
            self._model = stepped
        else:
            self._state.model = stepped

    def parameters(self) -> dict[str, Any]:
        return {name: np.array(each) for name, each in self._held().items()}

    def state(self, **values: Any) -> Any:
        self._state = toy.ModelState(model=self._model, **values)
        self._state.register_reset_callbacks([self._share_anew])
        return self._state

    def _share_anew(self) -> None:
        self._optimizer = toy.Optimizer(self._model, *self._options)


ADAPTER = Adapter(
    name="the toy",
    version="of the tests",
    make=lambda array: toy.frozen(array.copy()),
    back=lambda array: array,
    all_reduce=all_reduce,
    trainer=Trainer,
    cannot={"gradients through": "the toy has no automatic differentiation, so its gradients are not the framework's"},
)
