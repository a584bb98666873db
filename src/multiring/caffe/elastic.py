"""Training that continues from the last commit after a failure.

state = multiring.caffe.elastic.CaffeState(solver, done=0)
"""

from typing import Any

from multiring._frontend.elastic.own import OwnValue, Randomness, RankChange
from multiring._frontend.elastic.running import run
from multiring._frontend.elastic.speed_shares import SpeedShares
from multiring._frontend.elastic.state import ObjectState, State
from multiring._frontend.elastic.values_state import ValuesState
from multiring._frontend.object_collectives import broadcast_object
from multiring.caffe.solver_gradients import parameters_of

__all__ = ["CaffeState", "ObjectState", "OwnValue", "Randomness", "RankChange", "SpeedShares", "State", "run"]


class CaffeState(ValuesState):
    """A state with the parameters of a solver's net and other values.

    Each of the other values is an attribute of the state.

    The state does not restore a solver's momentum and iteration, because pycaffe gives no access to them.

    Args:
        solver: a solver of pycaffe.
        kwargs: other values by name, of any type that `broadcast_object` accepts.
    """

    def __init__(self, solver: Any, **kwargs: Any) -> None:
        self.solver = solver
        super().__init__(**kwargs)

    def _read(self) -> dict[str, Any]:
        return {name: blob.data.copy() for name, blob in parameters_of(self.solver.net)}

    def _structure(self) -> list[str]:
        parameters = parameters_of(self.solver.net)
        return [*(f"{name}, of shape {tuple(blob.data.shape)}" for name, blob in parameters), *super()._structure()]

    def _write(self, values: dict[str, Any]) -> None:
        for name, blob in parameters_of(self.solver.net):
            blob.data[...] = values[name]

    def _share(self) -> dict[str, Any]:
        values: dict[str, Any] = broadcast_object(self._values, root_rank=self.sync_root)
        self._write(values)
        return values
