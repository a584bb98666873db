"""Training that goes on after a failure, from where it last committed.

state = multiring.caffe.elastic.CaffeState(solver, done=0)
"""

from typing import Any

from multiring.caffe.solver_gradients import parameters_of
from multiring.frontend.elastic.running import run
from multiring.frontend.elastic.state import ObjectState, State, all_or_nothing
from multiring.frontend.lifecycle import rank
from multiring.frontend.object_collectives import allgather_object, broadcast_object

__all__ = ["CaffeState", "ObjectState", "State", "run"]


class CaffeState(ObjectState):
    """The parameters of a solver's net, and whatever else, each an attribute.

    pycaffe shows neither a solver's momentum nor lets its iteration be set: both go on as they are.

    Args:
        solver: of pycaffe.
        kwargs: what `broadcast_object` takes.
    """

    def __init__(self, solver: Any, **kwargs: Any) -> None:
        self.solver = solver
        super().__init__(bcast_object=broadcast_object, get_rank=rank, gather_object=allgather_object, **kwargs)
        self._values = self._read()

    def _read(self) -> dict[str, Any]:
        return {name: blob.data.copy() for name, blob in parameters_of(self.solver.net)}

    def _write(self, values: dict[str, Any]) -> None:
        for name, blob in parameters_of(self.solver.net):
            blob.data[...] = values[name]

    def save(self) -> None:
        """Keep everything as it is now."""
        with all_or_nothing(self):
            self._values = self._read()
            super().save()

    def restore(self) -> None:
        """Make everything what it was when it was kept last."""
        self._write(self._values)
        super().restore()

    def sync(self) -> None:
        """Make everything rank 0's on every rank, and keep it."""
        with all_or_nothing(self):
            self._values = broadcast_object(self._values)
            self._write(self._values)
            super().sync()
