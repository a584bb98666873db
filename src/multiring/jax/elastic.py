"""Training that goes on after a failure, from where it last committed; Horovod's interface.

@mj.elastic.run
def train(state):
    ...
    state.commit()

train(mj.elastic.JaxState(parameters=parameters, optimizer_state=optimizer_state, step=0))
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from multiring.frontend.elastic import running
from multiring.frontend.elastic.state import ObjectState, State
from multiring.frontend.lifecycle import rank
from multiring.frontend.object_collectives import allgather_object, broadcast_object
from multiring.jax.joining import wait_for_programs

__all__ = ["JaxState", "ObjectState", "State", "run"]

Result = TypeVar("Result")


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Return `func`, which takes a State and whatever else, made to go on after a failure (a decorator).

    See `multiring.frontend.elastic.running.run`. Programs that were dispatched end before the ranks meet anew.
    """

    @functools.wraps(func)
    def wrapper(*arguments: Any, **keywords: Any) -> Result:
        try:
            return func(*arguments, **keywords)
        except Exception:
            wait_for_programs()
            raise

    return running.run(wrapper)


class JaxState(ObjectState):
    """Pytrees, by name; each is an attribute, with arrays of JAX, and whatever else, among its leaves.

    What is kept are copies, so that arrays may be donated to the programs that train.

    Args:
        kwargs: the pytrees.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(bcast_object=broadcast_object, get_rank=rank, gather_object=allgather_object, **kwargs)
        self._saved_state = _copied(kwargs)

    def save(self) -> None:
        """Keep copies of the pytrees as they are now."""
        self._saved_state = _copied(self._attributes())

    def restore(self) -> None:
        """Set the pytrees to copies of what was kept."""
        self._set_attributes(_copied(self._saved_state))

    def sync(self) -> None:
        """Set the pytrees to rank 0's, and keep those."""
        super().sync()
        self.save()


def _copied(tree: Any) -> Any:
    """Return `tree` with copies of its leaves; what waits for their values fails where these do."""
    return jax.block_until_ready(
        jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else copy.deepcopy(leaf), tree)
    )
