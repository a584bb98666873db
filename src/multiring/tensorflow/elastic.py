"""Training that continues from the last commit after a failure.

The interface is Horovod's.

@mt.elastic.run
def train(state):
    ...
    state.commit()

train(mt.elastic.TensorFlowKerasState(model, optimizer, batch=0))
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from multiring._frontend.elastic.own import OwnValue, Randomness, RankChange
from multiring._frontend.elastic.running import run
from multiring._frontend.elastic.speed_shares import SpeedShares
from multiring._frontend.elastic.state import ObjectState, State
from multiring._frontend.elastic.values_state import ValuesState
from multiring.tensorflow.functions import broadcast_variables

__all__ = [
    "ObjectState",
    "OwnValue",
    "Randomness",
    "RankChange",
    "SpeedShares",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
]


class _VariablesState(ValuesState):
    """A state of variables and of other attributes."""

    def _variables(self) -> Sequence[Any]:
        raise NotImplementedError

    def _read(self) -> list[Any]:
        return [variable.numpy() for variable in self._variables()]

    def _write(self, values: Sequence[Any]) -> None:
        # A variable that was created after the last save is set to zero: an optimizer creates such variables in its
        # first step.
        for place, variable in enumerate(self._variables()):
            value = values[place] if place < len(values) else tf.zeros_like(variable)
            variable.assign(value)

    def _share(self) -> list[Any]:
        broadcast_variables(self._variables(), root_rank=self.sync_root)
        return self._read()


class TensorFlowKerasState(_VariablesState):
    """A state with a Keras model, its optimizer and other values.

    The model, the optimizer and each value are attributes of the state.

    Args:
        model: a model that is built.
        optimizer: by default, the optimizer with which the model is compiled.
        backend: not used.
        kwargs: other values by name, of any type that `broadcast_object` accepts.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        del backend
        self.model = model
        self.optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        super().__init__(**kwargs)

    def _variables(self) -> Sequence[Any]:
        own = [] if self.optimizer is None else self.optimizer.variables
        return [*self.model.variables, *(own() if callable(own) and not isinstance(own, list) else own)]


class TensorFlowState(_VariablesState):
    """A state with variables and other values. Each value is an attribute of the state.

    Args:
        variables: by default, the global variables of the graph.
        session: the session of TensorFlow 1. Eager execution needs none.
        kwargs: other values by name, of any type that `broadcast_object` accepts.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        self.session = session
        self.variables = list(tf.compat.v1.global_variables() if variables is None else variables)
        self._assignments: list[tuple[Any, Any]] | None = None
        self._broadcasts: dict[int, Any] = {}  # by the rank that gives
        super().__init__(**kwargs)

    def _variables(self) -> Sequence[Any]:
        return self.variables

    def _session(self) -> Any:
        return None if tf.executing_eagerly() else self.session or tf.compat.v1.get_default_session()

    def _read(self) -> list[Any]:
        session = self._session()
        return super()._read() if session is None else session.run(self.variables)

    def _write(self, values: Sequence[Any]) -> None:
        session = self._session()
        if session is None:
            super()._write(values)
            return
        if self._assignments is None:
            with session.graph.as_default():
                places = [tf.compat.v1.placeholder(each.dtype.base_dtype, each.shape) for each in self.variables]
                pairs = zip(self.variables, places, strict=True)
                self._assignments = [(place, variable.assign(place)) for variable, place in pairs]
        session.run(
            [assigned for _, assigned in self._assignments],
            {place: value for (place, _), value in zip(self._assignments, values, strict=True)},
        )

    def _share(self) -> list[Any]:
        session = self._session()
        if session is None:
            return super()._share()
        if self.sync_root not in self._broadcasts:
            with session.graph.as_default():
                self._broadcasts[self.sync_root] = broadcast_variables(self.variables, root_rank=self.sync_root)
        session.run(self._broadcasts[self.sync_root])
        return self._read()
