"""Training that continues from the last commit after a failure.

The interface is Horovod's.

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

from multiring._frontend.elastic import running
from multiring._frontend.elastic.own import OwnValue, Randomness, RankChange
from multiring._frontend.elastic.speed_shares import SpeedShares
from multiring._frontend.elastic.state import ObjectState, State
from multiring._frontend.lifecycle import rank
from multiring._frontend.object_collectives import allgather_object, broadcast_object
from multiring.jax.joining import wait_for_programs

__all__ = ["JaxState", "ObjectState", "OwnValue", "Randomness", "RankChange", "SpeedShares", "State", "run"]

Result = TypeVar("Result")


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate `func` so that it runs again after a failure.

    The first argument of `func` is a State.

    See `multiring._frontend.elastic.running.run`. Dispatched programs end before the ranks join the job again.
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
    """A state of named pytrees.

    Each pytree is an attribute; its leaves are JAX arrays or other objects.

    The state keeps copies, so a program may donate the arrays.

    Args:
        kwargs: the pytrees by name.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(bcast_object=broadcast_object, get_rank=rank, gather_object=allgather_object, **kwargs)
        self._saved_state = _copied(self._attributes())

    def save(self) -> None:
        """Keep copies of the current pytrees."""
        self._saved_state = _copied(self._attributes())

    def restore(self) -> None:
        """Set the pytrees to copies of the saved pytrees."""
        self._set_attributes(_copied(self._saved_state))

    def sync(self) -> None:
        """Set the pytrees to those of rank 0, and save them."""
        super().sync()
        self.save()


def _copied(tree: Any) -> Any:
    """Return `tree` with copies of its leaves. Wait for their values, so a failed program raises here."""
    return jax.block_until_ready(
        jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else copy.deepcopy(leaf), tree)
    )
