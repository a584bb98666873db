"""Variables and objects for all ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from multiring.frontend import object_collectives
from multiring.frontend.lifecycle import local_rank, local_size, rank
from multiring.frontend.process_sets import ProcessSet, global_process_set, members_of, numbered_set
from multiring.tensorflow.asking import asked
from multiring.tensorflow.collectives import broadcast_


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Give all ranks rank `root_rank`'s values of `variables`, those of one type by one collective.

    Args:
        variables: of TensorFlow or Keras; the same on all ranks, in the same order.
        root_rank: as ranks are numbered in the whole job.
        process_set: by default all ranks.
        inplace: not used: values are always assigned.

    Returns:
        In a graph of TensorFlow 1 the operation that does it.
    """
    del inplace
    found = [getattr(variable, "value", variable) if _is_keras(variable) else variable for variable in variables]
    if not found:
        return None
    assigned = broadcast_(found, root_rank, process_set=process_set)
    return None if tf.executing_eagerly() else tf.group(*assigned)


def _is_keras(variable: Any) -> bool:
    return type(variable).__module__.startswith("keras")


def broadcast_global_variables(root_rank: int) -> Any:
    """Return the operation that gives all ranks rank `root_rank`'s global variables, of a graph of TensorFlow 1.

    Raises:
        RuntimeError: eager execution has no global variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. Please use "
            "`hvd.broadcast_variables(<model/optimizer variables>)` instead."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc] # TensorFlow has no types
    """Gives all ranks rank `root_rank`'s global variables once the session is there, initialised or restored."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        """Be a hook of tf.compat.v1.train.MonitoredTrainingSession; `device` as for tf.device."""
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Add the operation to the graph."""
        if self.bcast_op is None or self.bcast_op.graph != tf.compat.v1.get_default_graph():
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:  # noqa: ARG002 -- of the contract
        """Run it."""
        session.run(self.bcast_op)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return rank `root_rank`'s `obj`; see `multiring.frontend.object_collectives`. No session is needed."""
    del session
    return object_collectives.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return `broadcast_object` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return every rank's `obj`, by rank. No session is needed."""
    del session
    return object_collectives.allgather_object(obj, name, process_set)


# ---- who this process is, as operations: of a graph that runs again after the job has changed ----


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return how many ranks the set has when this runs, int32."""
    return asked(lambda: members_of(numbered_set(process_set_id)).size, name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return 1 where this rank is in the set when this runs, else 0, int32."""
    return asked(lambda: int(bool(numbered_set(process_set_id).included())), name)


def local_size_op(name: str | None = None) -> Any:
    """Return how many ranks this host has when this runs, int32."""
    return asked(local_size, name)


def rank_op(name: str | None = None) -> Any:
    """Return this process's rank when this runs, int32."""
    return asked(rank, name)


def local_rank_op(name: str | None = None) -> Any:
    """Return this process's rank among those of its host when this runs, int32."""
    return asked(local_rank, name)
