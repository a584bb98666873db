"""Training that goes on after a failure, from where it last committed.

state = mj.elastic.JaxState(parameters=parameters, opt_state=optimizer.init(parameters), step=0)
"""

from typing import Any

from multiring.frontend.elastic.running import run
from multiring.frontend.elastic.state import ObjectState, State
from multiring.frontend.lifecycle import rank
from multiring.frontend.object_collectives import allgather_object, broadcast_object

__all__ = ["JaxState", "ObjectState", "State", "run"]


class JaxState(ObjectState):
    """Pytrees, and whatever else `broadcast_object` takes, each an attribute that the program sets anew."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(bcast_object=broadcast_object, get_rank=rank, gather_object=allgather_object, **kwargs)
